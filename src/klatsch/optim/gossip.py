"""Every update rule as a torch optimizer: one process is one node, and talks to its neighbours only.

The model holds the query point, where gradients are taken; a rule's vectors (DAT's iterate w, momentum, tracked
gradients) live in the optimizer. With most rules, and with beta = 1, the query point is x, the one to evaluate and
save, and there is no switching between training and evaluation. With the others `eval()` puts x into the model and
`train()` the query point back; see points.py.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from klatsch import topology as topologies
from klatsch.optim import groups as checks
from klatsch.optim import state as saved
from klatsch.optim.flat import Flat, by_dtype
from klatsch.optim.groups import OnNonFinite
from klatsch.optim.points import Points
from klatsch.optim.share import Share
from klatsch.optim.watch import Watch
from klatsch.optim.wrappers import Wrappers
from klatsch.ranks.agreement import agree, broadcast, group_of, leave, members
from klatsch.ranks.failures import NonFiniteError, QuorumError, reason, shown
from klatsch.ranks.links import Links, OnFailure, Total, open_links
from klatsch.rules import Rule
from klatsch.rules.base import checked, rate
from klatsch.topology import Topology
from klatsch.version import VERSION


class Gossip(Points, Joinable):
    """An update rule on this rank's parameters, gossiped with its neighbours on a topology.

    Make it on every rank, with the same rule, topology and shapes. Ranks start from rank 0's parameters. A parameter
    that receives no gradient counts as one with gradient zero: it is still averaged with the neighbours'. Parameters
    that are frozen when the optimizer is made stay out of it. Ranks with fewer batches than others end with `finish()`,
    or train inside torch's `Join([optimizer])`.

    The model holds the point where gradients are taken. Where the rule's output x is another one (`beta` below 1, or
    `average`), evaluate and save inside `with optimizer.averaged():`, or between `eval()` and `train()`.

    Args:
        params: parameters, or groups of them with their own "lr", "weight_decay" and, if the rule has one, "momentum".
        rule: the update rule, such as rules.make("dat", lr=0.1); its lr is the default of the groups.
        topology: a Topology with one node per rank, or the name of one.
        group: the process group; all ranks by default.
        weight_decay: added to gradients as weight_decay times the point where they are taken.
        timeout: seconds that a neighbour may keep this rank waiting.
        on_failure: "raise" LinkError when a neighbour is gone or late, or "continue" without it: its weight in the
            gossip matrix becomes part of this rank's own.
        quorum: with on_failure="continue", the share of all ranks that must be left within reach, such as 0.5; else
            training stops with QuorumError.
        on_nonfinite: "raise" NonFiniteError when a gradient is not finite, before anything is sent; or "skip", a round
            without gradient, which `skipped` counts.
        start_equal: start from rank 0's parameters; else every rank starts from its own.
        any_graph: run also where the rule refuses the graph.

    Raises:
        ValueError: something does not fit, or the ranks do not agree; with the remedy.
    """

    living: ClassVar[weakref.WeakSet[Gossip]] = weakref.WeakSet()  # those of this process, for who has only a model
    _step_supports_amp_scaling = True  # a GradScaler must not skip a round, or neighbours would wait for it

    def __init__(
        self,
        params: Any,
        rule: Rule,
        topology: Topology | str = "ring",
        group: Any = None,
        *,
        weight_decay: float = 0.0,
        timeout: float = 300.0,
        on_failure: OnFailure = "raise",
        quorum: float = 0.0,
        on_nonfinite: OnNonFinite = "raise",
        start_equal: bool = True,
        any_graph: bool = False,
    ) -> None:
        rule = checked(rule)
        checks.settings(rule, weight_decay, timeout, on_failure, quorum, on_nonfinite)
        lr = checks.first_rate(rule.lr)
        self._made = False
        super().__init__(params, checks.options(rule, lr, weight_decay))
        Joinable.__init__(self)
        self._made = True
        self.on_nonfinite, self.skipped = on_nonfinite, 0
        self._finished = False
        self._idle_hooks: list[weakref.WeakMethod[Callable[[], Any]]] = []
        self._schedule = rule.lr if callable(rule.lr) else None
        self._follow = [entry for entry in self.param_groups if entry["lr"] == lr]
        self._scheduled = lr
        trained = checks.trainable([p for entry in self.param_groups for p in entry["params"]])
        self._frozen = [p for entry in self.param_groups for p in entry["params"] if not p.requires_grad]

        self._wrappers = Wrappers(trained, members(group))
        size = len(members(group))
        self.topology = topologies.make(topology, size) if isinstance(topology, str) else topology
        self.rule = checks.graph(rule, self.topology, size, any_graph)
        self._asked, self.group = group, group_of(group, timeout)
        settings = {"on_failure": on_failure, "quorum": f"{quorum:g}", "start_equal": str(start_equal)}
        settings["device"] = trained[0].device.type
        agree(self.group, {"version of klatsch": VERSION, "rule": rule.name})
        agree(self.group, checks.facts(self.rule, self.topology, self.param_groups) | settings)
        flats = [Flat(same, checks.names(self.param_groups)) for same in by_dtype(trained).values()]
        if start_equal:
            for tensor in (*(flat.values for flat in flats), *(p.data for p in self._frozen)):
                broadcast(self.group, tensor)
        # A group of their own: a collective that fails closes all connections of its group.
        own = group_of(group, timeout)
        self._links = open_links(group, own, self.topology, trained[0].device, float(timeout), on_failure, quorum)
        self._shares = self._make_shares(flats)
        self._close = self._closed_at_end()
        self._watch = Watch(self, trained) if self.rule.apart else None
        weakref.finalize(self, leave, self.group, group)
        Gossip.living.add(self)

    # --- training ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One round: take in the gradients, exchange messages with the neighbours, move the model to the next point.

        Raises:
            ValueError: the model holds x since `eval()`, and not the point where gradients are taken.
            LinkError: a neighbour is gone or late, and failures are to be raised. The model and the state are still
                those of the round before, and can be saved.
            NonFiniteError: a gradient is not finite; nothing was sent, and the state is that of the round before.
        """
        if self._finished:
            raise ValueError(f"rank {self.rank} has called finish() and takes no more steps; make a new optimizer")
        self._check_training()
        if self._watch is not None and self.rounds == 0:
            self._watch.look()
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if any(p.requires_grad for p in self._frozen):
            raise ValueError("a parameter was frozen when the optimizer was made and is not now; make a new optimizer")
        self._wrappers.look(now=any(share.flat.touched for share in self._shares))
        Join.notify_join_context(self)  # inside torch's Join: tells ranks that are done that this one is not
        self._round(self._gradient_factor())
        return loss

    @torch.no_grad()
    def finish(self, leave: bool = False) -> int:
        """Take no more steps; for ranks that have fewer batches than others. Every rank must end with it.

        Gossips on, in rounds without gradient, until all ranks have finished, so that none waits for one that is done.
        All return after the same round.

        Args:
            leave: tell the others, and go on without them: their weights for this rank become their own.

        Returns:
            The rounds without gradient.
        """
        self._check_training()
        began, known = self.rounds, self._links.membership
        if not self._finished:
            self._finished = True
            known.finish(began, leave)
        while (last := known.last_round()) is None or self.rounds < last:
            self._idle()
        self.drain()
        return self.rounds - began

    def _idle(self) -> None:
        """A round without gradient."""
        self._round(0.0)
        for reference in self._idle_hooks:
            if (hook := reference()) is not None:
                hook()

    def _round(self, factor: float) -> None:
        self._check_training()
        self._check_untouched()
        self._holds = "query"
        self._follow_schedule()
        for entry in self.param_groups:
            checks.values(entry, self.defaults)
        # No share moves before all have heard: a failure leaves them at the same round.
        for share in self._shares:
            share.take_in(self.param_groups, factor)
        wrong = [text for share in self._shares if (text := share.not_finite()) is not None]
        if wrong:
            self._skip(wrong[0])
        for share in self._shares:
            share.exchange()
        for share in self._shares:
            share.advance()

    def _skip(self, wrong: str) -> None:
        """Have a round without gradient, if that is wanted."""
        if self.on_nonfinite == "raise":
            remedy = "see the loss and the learning rate, clip, or go on without it (on_nonfinite='skip')"
            raise NonFiniteError(self.rank, self.rounds + 1, wrong, f"nothing was sent; {remedy}")
        for share in self._shares:
            share.take_in(self.param_groups, 0.0)
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"rank {self.rank}, round {self.rounds + 1}: {wrong}; a round without gradient instead, and so from "
                "now on (optimizer.skipped counts them)",
                RuntimeWarning,
                stacklevel=3,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. They stay where they are, in one buffer, whatever `set_to_none` says."""
        for share in self._shares:
            share.flat.zero_gradients()
        for parameter in self._frozen:
            parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group in; only while the optimizer is made, since all parameters live in one buffer."""
        if self._made:
            raise ValueError("parameters cannot be added to a Gossip optimizer; make a new one with all of them")
        super().add_param_group(param_group)
        checks.group(self.param_groups[-1], self.defaults)

    def __repr__(self) -> str:
        here = f"rank {self.rank} of {self.topology.name}, {self.topology.size} nodes, round {self.rounds}"
        return f"{super().__repr__()}\n{checks.name_of(self.rule)} on {here}"

    # --- what torch's Join asks for ------------------------------------------------------------------------------

    def join_hook(self, **_: Any) -> JoinHook:
        """What a rank does whose batches have ended while others go on: rounds without gradient."""
        return _Idler(self)

    @property
    def join_device(self) -> torch.device:
        """Where Join counts the ranks that go on: the CPU, since the group is gloo's."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The group in which Join counts them."""
        return self.group

    # --- what it knows -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Which node of the topology this is."""
        return dist.get_rank(self.group)

    @property
    def process_group(self) -> Any:
        """The process group that it was given; None for all ranks."""
        return self._asked

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._shares[0].flat.values.device

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to its neighbours."""
        return self._links.bytes_sent

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited for messages."""
        return self._links.seconds_waited

    @property
    def survives(self) -> bool:
        """Whether it goes on without ranks that fail."""
        return self._links.survives

    @property
    def lost(self) -> tuple[int, ...]:
        """Neighbours that this rank goes on without."""
        return tuple(self._links.lost)

    def consensus(self) -> float:
        """Gamma, the mean over ranks of the squared distance of x from its network mean; all ranks must ask together.

        It is that of x, the rule's output, whichever point the model holds.
        With on_failure="continue" it is that of the ranks within reach, and a warning says who they are.

        Raises:
            RuntimeError: a rank does not answer.
        """
        with self.together("consensus()") as (total, ranks):
            distance = torch.zeros(1, dtype=torch.float64)
            for share in self._shares:
                here = share.output().detach().double().cpu()
                distance += (here - total(here) / len(ranks)).square().sum()
            return float(total(distance)) / len(ranks)

    @contextmanager
    def together(self, what: str) -> Iterator[tuple[Total, list[int]]]:
        """Give a function that sums a vector over all ranks, or over those within reach, and who they are.

        Raises:
            RuntimeError: a rank does not answer.
        """
        size = self.topology.size
        try:
            with self._links.together(self.group, self.rounds) as (total, ranks):
                if len(ranks) < size:
                    warnings.warn(
                        f"{what} is that of {len(ranks)} of {size} ranks ({shown(ranks)}); the others are gone or out "
                        "of reach",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                yield total, ranks
        except QuorumError:
            raise
        except RuntimeError as error:
            why = f"from all ranks within reach, after the same round ({reason(error)})"
            raise RuntimeError(f"{what} needs an answer {why}") from None

    # --- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as torch optimizers give it: copies of tensors, shaped like the parameters."""
        for share in self._shares:
            self.state.update(saved.per_parameter(share))
        try:
            found = super().state_dict()
        finally:
            self.state.clear()
        return found | {"gossip": saved.header(self._shares)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; on all ranks, each with its own of the same round.

        The model then holds its x or its query point, as it did before: that is no part of the state.

        Raises:
            ValueError: it is no state of this rule and these parameters. Nothing is changed then.
        """
        vectors = saved.checked(state_dict, self.param_groups, self._shares)
        for entry, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            entry.update({name: value for name, value in other.items() if name != "params"})
        self.load_vectors(vectors, state_dict["gossip"]["rounds"])

    def vectors(self) -> list[dict[str, Tensor]]:
        """The fields of the state as flat vectors, by dtype of the parameters: this optimizer's own memory."""
        return [share.vectors() for share in self._shares]

    @torch.no_grad()
    def load_vectors(self, vectors: list[dict[str, Tensor]], rounds: int) -> None:
        """Go on from what `vectors` gave after so many rounds, on all ranks.

        Raises:
            ValueError: the ranks do not agree on the round.
        """
        agree(self.group, {"round to go on from": str(rounds), "rounds done before": str(self.rounds)})
        if self.rounds > 0:  # messages are on their way that belong to another story
            own = group_of(self._asked, self._links.timeout)
            self._close()
            self._links = self._links.reopened(own)
            self._shares = self._make_shares([share.flat for share in self._shares])
            self._close = self._closed_at_end()
        for share, fields in zip(self._shares, vectors, strict=True):
            share.load(fields, rounds)
        self._show("query" if self._holds == "query" or self._watch is None else "output")
        self._finished = False
        if self._schedule is not None and self._follow:
            self._scheduled = self._follow[0]["lr"]

    def count_from(self, bytes_sent: int, seconds_waited: float, skipped: int = 0) -> None:
        """Go on counting from what was counted before a restart."""
        self._links.bytes_sent, self._links.seconds_waited, self.skipped = bytes_sent, seconds_waited, skipped

    def on_idle(self, hook: Callable[[], Any]) -> None:
        """Call a method, while its object lives, after every round without gradient in which others may train."""
        self._idle_hooks.append(weakref.WeakMethod(hook))

    def drain(self) -> None:
        """Wait until all that this rank has sent has left, at most for the timeout."""
        self._links.drain()

    # --- inside ------------------------------------------------------------------------------------------------

    def _make_shares(self, flats: list[Flat]) -> list[Share]:
        return [Share(flat, self.rule, self._links, k) for k, flat in enumerate(flats)]

    def _closed_at_end(self) -> Callable[[], Any]:
        """The last messages must leave before the optimizer or the process ends, or neighbours could not finish."""
        return weakref.finalize(self, _end, self._links, self._asked)

    def _follow_schedule(self) -> None:
        if self._schedule is None:
            return
        if any(entry["lr"] != self._scheduled for entry in self._follow):
            raise ValueError(
                f"lr is a function of the round, and something set it to {[entry['lr'] for entry in self._follow]}; "
                "use a number with a scheduler, or the function alone"
            )
        self._scheduled = rate(self._schedule, self.rounds + 1)
        for entry in self._follow:
            entry["lr"] = self._scheduled

    def _gradient_factor(self) -> float:
        """What gradients are multiplied with, as a GradScaler asks: 1 without one, 0 where some are not finite."""
        if float(getattr(self, "found_inf", 0.0)) > 0:
            return 0.0
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)


class _Idler(JoinHook):
    def __init__(self, optimizer: Gossip) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def main_hook(self) -> None:
        self._optimizer._idle()


def _end(links: Links, group: Any) -> None:
    links.close()
    leave(links.group, group)
