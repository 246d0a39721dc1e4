"""Which point the model holds: the one where gradients are taken, or the one to evaluate and keep.

For most rules they are the same. Otherwise (`beta` below 1, or an average of iterates), the model holds the query point
while it trains, and x, the rule's output, on demand. Evaluating or saving the wrong one warns. `average_` and `merged`
put the mean over all ranks there.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from klatsch.optim.groups import parameters_of
from klatsch.optim.hosts import piece
from klatsch.optim.share import Point, Share
from klatsch.ranks.agreement import Group, agree, members, summed, told
from klatsch.ranks.failures import reason, warn

if TYPE_CHECKING:
    from klatsch.optim.gossip import Gossip

SINCE = {"output": "optimizer.eval()", "merged": "average_(model, parameters=True)"}
POINT = "the point at which gradients are taken"
REMEDY = (
    f"while it holds {POINT}, and not x, the one to evaluate and save; do it inside `with optimizer.averaged():`, or "
    "between optimizer.eval() and optimizer.train()"
)
RESUMING = "to resume a training, klatsch.Checkpointer or optimizer.state_dict() has all that is needed"
WARNINGS = {
    "run": f"the model was run for evaluation (in eval mode, or without gradients) {REMEDY}",
    "saved": f"the model's state_dict() was taken {REMEDY}; {RESUMING}",
    "copied": f"the model was copied or pickled {REMEDY}; {RESUMING}",
    "merged": "average_ has put the mean of all ranks' x into the model, which is the point to evaluate and save, in "
    "place of the query point; optimizer.train() puts that back",
    "statistics": f"the running statistics of {{}} were gathered at {POINT}, and the model now holds x; "
    "klatsch.recalibrate(model, batches) gathers them there",
}
RECIPES = {  # of docs/frameworks.md, by the package that wraps models
    "lightning.pytorch": "Lightning: Trainer(strategy=klatsch.frameworks.lightning.GossipStrategy())",
    "transformers.trainer": "Hugging Face: klatsch.frameworks.huggingface.GossipTrainer instead of Trainer",
    "accelerate.accelerator": "Accelerate: accelerator.prepare_model(model, evaluation_mode=True)",
}


class Points(Optimizer):
    """The part of an optimizer that puts one point or another into the model."""

    living: ClassVar[weakref.WeakSet[Gossip]] = weakref.WeakSet()  # all in this process, to be found from a model
    shares: list[Share]
    watch: Watch
    _apart: bool  # whether the rule's output is another point than the one where gradients are taken
    _holds: Point = "query"
    _gradients_at_x = False  # whether the last ones were taken there, and dropped

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return self.shares[0].node.rounds

    def eval(self) -> None:
        """Put x, the point to evaluate and save, into the model; `train()` puts the query point back.

        If nodes are hosts, all ranks of a host call this together, and what is below, too. Does nothing where
        gradients are taken at x, as with beta = 1.
        """
        self._show_output()
        self.watch.warn_of_statistics()

    def train(self) -> None:
        """Put the point back at which gradients are taken, after `eval()` or `average_`."""
        if self._holds != "query":
            if self._apart:
                self._check_untouched()
            self._show("query")

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate or save inside: there the model holds x, and afterwards what it held before."""
        before = self._holds
        self.eval()
        try:
            yield
        finally:
            self._return_to(before)

    def output(self) -> list[Tensor]:
        """The rule's output, shaped like the trained parameters: x, or the average of iterates if it keeps one."""
        outputs: dict[int, Tensor] = {}
        for share in self.shares:
            x = share.rule.output(share.node.state).to(share.values.dtype)
            outputs |= zip(map(id, share.parameters), share.copies(x), strict=True)
        return [outputs[id(p)] for p in parameters_of(self.param_groups) if id(p) in outputs]

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters that are trained here."""
        return any(share.holds(tensor) for share in self.shares)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Average the model over ranks inside: there it holds x. After a failure it holds what it held before."""
        before = self._holds
        self._show_output()
        try:
            yield
        except BaseException:
            self._return_to(before)
            raise
        if self.rounds == 0:  # all points are one, and training starts from whatever the model holds
            self._return_to(before)
            return
        self._holds = "merged"
        if self._apart:
            for share in self.shares:
                share.accept()
            if before == "query":
                self.watch.warn("merged")

    def _check_training(self) -> None:
        if self._apart and self._holds != "query":
            raise ValueError(
                f"the model holds x, to evaluate or save, since {SINCE[self._holds]}, and takes no steps from there; "
                "call optimizer.train() before the forward pass, or evaluate inside `with optimizer.averaged():`"
            )

    def _check_gradients(self) -> None:
        self._check_training()  # again, since a closure may call eval()
        if self._gradients_at_x and not any(share.has_gradients for share in self.shares):
            raise ValueError(
                "the gradients were taken while the model held x, to evaluate or save, and a step needs them where the "
                "model trains; call optimizer.train() before the forward pass"
            )
        self._gradients_at_x = False

    def _check_untouched(self) -> None:
        for share in self.shares:
            share.check_untouched(self._holds if self._apart else "query")

    def _show_output(self) -> None:
        if self._apart:
            self._check_untouched()
            if self._holds == "query":
                self._show("output")

    def _return_to(self, before: Point) -> None:
        if before == "query":
            self.train()
        elif self._holds != before:  # what was merged before is gone
            self._show("output")

    @torch.no_grad()
    def _show(self, point: Point) -> None:
        for share in self.shares:
            if point != "query":
                share.watch_gradients()
            elif self.rounds > 0:  # before, all points are one
                self._gradients_at_x |= share.drop_gradients()
            share.show(point)
        self._holds = point
        self.watch.attach(point == "query")


class Watch:
    """Watches the models that own the parameters: refuses wrappers that average gradients, warns once of each mistake.

    An optimizer knows parameters only. `model.parameters()` tells which model it is of; otherwise a global hook finds
    the outermost modules that are run, and is removed in the first step at the latest. Another one sees wrappers that
    are made later. Hooks on a few modules notice when the model is run, saved or copied.
    """

    def __init__(self, optimizer: Points, parameters: Sequence[Tensor], ranks: Sequence[int], apart: bool) -> None:
        self.said: set[str] = set()  # the warnings
        self._optimizer, self._parameters, self._ranks = weakref.ref(optimizer), parameters, set(ranks)
        self._ours = {id(p) for p in parameters}
        self._missing, self._fsdp, self._first, self._paused = set(self._ours), False, True, False
        self._apart, self._on = apart, True
        self._known, self._modules, self._wrappers = (weakref.WeakSet[nn.Module]() for _ in range(3))
        self._sharded: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of FSDP2
        self._normed: str | None = None  # the first layer that keeps statistics
        self._hooks, self._search = ExitStack(), ExitStack()
        self._search.enter_context(register_module_forward_pre_hook(self._run))
        # torch.compile warns of every global hook, as long as it is there; this one is gone when the model runs.
        warnings.filterwarnings("ignore", f"Using `torch.compile.*when there are global hooks(?#{id(self)})")
        self._search.callback(_forget, warnings.filters[0])
        later = register_module_module_registration_hook(self._registered)
        for close in (self._hooks.close, self._search.close, later.remove):
            weakref.finalize(optimizer, close)

    def take(self, root: nn.Module) -> None:
        """Take in a model, or a part of one, that owns some of the parameters."""
        modules = [*root.modules()]
        for module in modules:
            if isinstance(module, _wrappers()):
                self._refuse(module)
        self._sharded.update(m for m in modules if isinstance(m, fsdp("FSDPModule")))
        # A few are enough: even a part of a model runs its first or its last layer.
        ends = {id(self._parameters[0]), id(self._parameters[-1])}
        self._modules.update([root, *(m for m in modules if any(id(p) in ends for p in m._parameters.values()))])
        layers = (f"{type(layer).__name__} {name!r}" for name, layer in normed(root).items())
        self._normed = self._normed or next(layers, None)
        self.attach(self._on)

    def reshard(self) -> None:
        """Have FSDP2 show its pieces again, if a forward pass without a backward pass has left whole parameters."""
        for module in self._sharded:
            module.reshard()

    def check(self) -> None:
        """Refuse wrappers that were made since, and in the first step FSDP that has put others in our place."""
        if self._wrappers:
            gc.collect()  # one that nobody uses does no harm
        for wrapper in [*self._wrappers]:
            self._refuse(wrapper)
            self._wrappers.discard(wrapper)  # it does no harm
        first, self._first = self._first, False
        if first:
            self._search.close()
            if self._fsdp and all(p.grad is None for p in self._parameters):
                what = "no parameter of the optimizer has a gradient: FSDP has put others in their place"
                raise ValueError(f"{what}; train the model without it; {recipe()}")

    def attach(self, on: bool) -> None:
        """Put the hooks in place while the model holds the query point, or remove them, so that it can be pickled."""
        self._hooks.close()
        self._on = on
        for module in self._modules if on and self._apart else ():
            self._hooks.enter_context(module.register_forward_pre_hook(_Hook(self, "run")))
            self._hooks.enter_context(module.register_state_dict_pre_hook(_Hook(self, "saved")))  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the model's state_dict() inside without a warning, for what else is in it."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def noticed(self, module: nn.Module | None, how: str) -> None:
        """Judge what a hook saw: a module that is run, saved or copied."""
        if self._paused or how in self.said or not self._has_moved:
            return
        if how == "run" and torch.is_grad_enabled() and any(m.training for m in self._modules):
            return
        if module is None or any(id(p) in self._ours for p in module.parameters()):  # else run with others' values
            self.warn(how)

    def warn_of_statistics(self) -> None:
        """Warn of running statistics that were gathered at the query point, not at x."""
        if self._apart and self._normed is not None and self._has_moved:
            self.warn("statistics", self._normed)

    def warn(self, what: str, of: str = "") -> None:
        if what not in self.said:
            self.said.add(what)
            warn(WARNINGS[what].format(of))

    @property
    def _has_moved(self) -> bool:
        """Whether the optimizer lives and has taken steps: before, all points are one."""
        optimizer = self._optimizer()
        return optimizer is not None and "shares" in vars(optimizer) and optimizer.rounds > 0  # or it could not be made

    def _run(self, module: nn.Module, _: object) -> None:
        """A module is run; the outermost ones come first."""
        if torch.compiler.is_compiling() or module in self._known:
            return
        self._fsdp |= isinstance(module, (*fsdp("FSDPModule"), *fsdp("FullyShardedDataParallel")))
        if own := {id(p) for p in module.parameters()} & self._ours:
            self.take(module)
            self._missing -= own
            # A wrapper may be there that has not run yet, if this is no training.
            if not self._missing and module.training and torch.is_grad_enabled():
                self._search.close()
        self._known.update(module.modules())

    def _registered(self, parent: nn.Module, _name: str, _child: nn.Module | None) -> None:
        """A module becomes part of another one, which may be a wrapper."""
        if isinstance(parent, _wrappers()):
            self._wrappers.add(parent)
            self._fsdp |= not isinstance(parent, DistributedDataParallel)

    def _refuse(self, wrapper: nn.Module) -> None:
        """Refuse DDP and FSDP that average the gradients of ranks that gossip."""
        known = vars(wrapper)
        ignored, inside = known.get("parameters_to_ignore", ()), wrapper.get_submodule("module")
        groups = (known.get("process_group"), known.get("_inter_node_pg"))
        if any(len(self._ranks.intersection(_ranks(group))) > 1 for group in groups) and any(
            id(p) in self._ours for name, p in inside.named_parameters() if name not in ignored
        ):
            raise ValueError(
                f"{type(wrapper).__name__} is around this model on ranks that gossip, and averages their gradients "
                "before gossip can; train the model without it, or put it around the ranks of one host, and gossip "
                f"between hosts (mesh=..., docs/hosts.md); {recipe()}"
            )


class _Hook:
    """A hook on a module; in copies, which have other parameters, it does nothing."""

    def __init__(self, watch: Watch | None, how: str) -> None:
        self._watch, self._how = watch, how

    def __call__(self, module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._watch is not None:
            self._watch.noticed(module, self._how)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        if self._watch is not None:
            self._watch.noticed(None, "copied")
        return _Hook, (None, self._how)


def normed(model: nn.Module) -> dict[str, _BatchNorm]:
    """The modules of a model that keep running statistics of their inputs, such as BatchNorm, by name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: m for name, m in layers.items() if m.running_mean is not None}


def model_of(params: object) -> nn.Module | None:
    """The model if these are `model.parameters()` or `model.named_parameters()`; to be asked before they are used."""
    owner = inspect.getgeneratorlocals(params).get("self") if inspect.isgenerator(params) else None
    return owner if isinstance(owner, nn.Module) else None


def recipe() -> str:
    """What to do instead in the frameworks that are in use, and where to read it."""
    return "; ".join((*(text for package, text in RECIPES.items() if package in sys.modules), "see docs/frameworks.md"))


def fsdp(name: str) -> tuple[type[nn.Module], ...]:
    """A class of FSDP if it is imported, which takes a while; else it has no objects."""
    module = sys.modules.get("torch.distributed.fsdp")
    return (vars(module)[name],) if module is not None and name in vars(module) else ()


def _wrappers() -> tuple[type[nn.Module], ...]:
    return (DistributedDataParallel, *fsdp("FullyShardedDataParallel"))


def _forget(ignored: Any) -> None:
    with suppress(ValueError):  # somebody else has reset all filters
        warnings.filters.remove(ignored)  # type: ignore[attr-defined]


def _ranks(group: Group) -> list[int]:
    with suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # a destroyed group
        return dist.get_process_group_ranks(group) if group is not None else []
    return []


# --- the mean over ranks, and what gossip does not average: buffers ---------------------------------------------------


@torch.no_grad()
def average_(model: nn.Module, *, parameters: bool = False, group: Group = None) -> nn.Module:
    """Average the floating-point buffers of a model over all ranks, in place; all ranks must call it together.

    BatchNorm's running statistics follow each rank's own data, and the optimizer does not see them: call this before
    evaluating or saving. The mean goes up and down a tree of the graph's links, in float32 unless a tensor is in
    float64, and counts in `optimizer.bytes_sent`; ranks must be at the same round, and one that does not answer within
    the optimizer's timeout is named. If ranks have left or are lost, it averages over those within reach, and a warning
    names them. Without an optimizer of klatsch, or over another `group`, it is an all-reduce.

    Args:
        model: the model, with the same buffers on every rank; it is returned.
        parameters: average the parameters as well, to get the model of the whole network: the mean of x, even if the
            model holds another point while it trains. Do it after the last step, or in between inside
            `with optimizer.averaged():`, which puts this rank's point back.
        group: the process group; by default that of the optimizer, or all ranks. If nodes are hosts, their buffers are
            averaged place by place.
    """
    for optimizer in Points.living:
        optimizer.watch.reshard()
    whole = [*model.buffers(), *(model.parameters() if parameters else ())]
    tensors, trainers = [piece(v) for v in whole if v.is_floating_point()], _trainers(model)
    group = trainers[0].process_group if group is None and trainers else group
    with ExitStack() as stack:
        for trainer in trainers if parameters else ():
            stack.enter_context(trainer.merging())
        for tensor, values in zip(tensors, _mean(tensors, trainers, group), strict=True):
            tensor.copy_(values.view_as(tensor))
    return model


@contextmanager
def merged(model: nn.Module, *, group: Group = None) -> Iterator[nn.Module]:
    """Evaluate or save inside: there the model is that of the whole network, and afterwards this rank's own again.

    That is the mean over all ranks of x and of floating-point buffers; see `average_`. All ranks must enter together.

    Args:
        model: the model, while it trains or afterwards.
        group: see `average_`.
    """
    trainers = _trainers(model)
    with ExitStack() as stack:
        for trainer in trainers:
            stack.enter_context(trainer.averaged())
        moved = [trainer for trainer in trainers if trainer.rounds > 0]  # the others train from what the model holds
        others = [v.data for v in (*model.buffers(), *model.parameters()) if not any(t.owns(v) for t in moved)]
        before = [v.clone() for v in others]
        try:
            yield average_(model, parameters=True, group=group)
        finally:
            for tensor, values in zip(others, before, strict=True):
                tensor.copy_(values)


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[object]) -> nn.Module:
    """Gather the running statistics of a model again, at x, as means over some batches.

    BatchNorm's statistics belong to the point where they were gathered. If an optimizer trains at another point than x
    (`beta` below 1), call this before evaluating or saving. It is torch.optim.swa_utils.update_bn, at x and without
    dropout. Every rank gathers its own; `klatsch.average_(model)` averages them.

    Args:
        model: the model; returned with modes and momenta as before, after an error also with its old statistics.
        batches: inputs of the model, or tuples or lists that begin with them, as a DataLoader yields.
    """
    layers = list(normed(model).values())
    if not layers:
        return model
    first = next(model.parameters(), None)
    with ExitStack() as stack, ExitStack() as statistics:
        for optimizer in _trainers(model):
            optimizer.watch.said.add("statistics")  # somebody takes care of them
            stack.enter_context(optimizer.averaged())
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for layer in layers:
            for buffer in layer.buffers(recurse=False):
                statistics.callback(buffer.copy_, buffer.clone())
            stack.callback(setattr, layer, "momentum", layer.momentum)
            layer.reset_running_stats()
            layer.momentum = None  # a mean over all batches
            layer.training = True
        count = 0
        for count, batch in enumerate(batches, 1):  # noqa: B007
            inputs = batch[0] if isinstance(batch, list | tuple) else batch
            model(inputs.to(first.device) if first is not None and isinstance(inputs, Tensor) else inputs)
        if count == 0:
            raise ValueError("batches is empty, or was used up before; give some, such as a DataLoader")
        statistics.pop_all()  # keep the new ones
    return model


def _trainers(model: nn.Module) -> list[Gossip]:
    trained = {id(p) for p in model.parameters()}
    return [o for o in Points.living if any(id(p) in trained for p in parameters_of(o.param_groups))]


def _mean(tensors: Sequence[Tensor], trainers: Sequence[Gossip], group: Group) -> list[Tensor]:
    """The means over ranks of some tensors, as vectors."""
    kinds = str([[str(v.dtype), list(v.shape)] for v in tensors])
    sent_as = [torch.float64 if v.dtype is torch.float64 else torch.float32 for v in tensors]
    along_links = bool(trainers) and group is trainers[0].process_group
    with trainers[0].together("average_", kinds) if along_links else _collective(group, kinds) as mean:
        means: dict[torch.dtype, Iterator[Tensor]] = {}
        for dtype in dict.fromkeys(sent_as):
            same = [v for v, other in zip(tensors, sent_as, strict=True) if other is dtype]
            vector = mean(torch.cat([v.detach().cpu().to(dtype).reshape(-1) for v in same]))
            means[dtype] = iter(torch.split(vector, [v.numel() for v in same]))
        return [next(means[dtype]) for dtype in sent_as]


@contextmanager
def _collective(group: Group, kinds: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """A mean over all ranks of a group; says what is missing where it fails."""
    size = len(members(group))
    try:
        agree(partial(told, group), {"buffers of the model": kinds})
        yield lambda vector: summed(group, vector) / size
    except RuntimeError as error:
        needed = f"average_ needs an answer from all {size} ranks"
        raise RuntimeError(f"{needed} ({reason(error)}); was it called on every rank?") from None
