"""What a node minimises: the network minimises f(x) = 1/M sum_i f_i(x), and node i sees noisy gradients of f_i only."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from klatsch.arguments import kind_of, whole
from klatsch.columns import WeightMatrix, replaced

Shape = tuple[int, ...]


class Headline(NamedTuple):
    """The metric of a problem by which learning rates are chosen, and which figures show."""

    metric: str
    text: str
    largest: bool = False  # whether large is good
    of_mean: str = ""  # the same metric of the mean of all nodes' models, if there is one
    of_worst: str = ""  # the same of the worst node


SQUARED = "squared distance to the optimum, mean over nodes"
DISTANCE = Headline("distance", SQUARED, of_mean="distance_of_mean", of_worst="worst_distance")


class Quadratic(NamedTuple):
    """Gradients g = x H_i + sum_r scale[c, r] rows[i, r] + noise[c] xi: what the fused engine understands."""

    H: Tensor  # (M, d, d), symmetric
    rows: Tensor  # (M, R, d)
    scale: Tensor  # (C, R)
    noise: Tensor  # (C,)


class Logistic(NamedTuple):
    """Gradients g = l2 x - mean_b a_b / (1 + exp(x'a_b)) of samples a_b, drawn by number: it understands these, too."""

    samples: Tensor  # (M, n, d)
    l2: float
    batch: int


class Problem(ABC):
    """A stochastic problem spread over nodes: what it must have, and what it may have, with defaults.

    Randomness is a function of (seed, t, node): repeated calls return the same numbers, and calls for one node the same
    to rounding. Your own problem derives from this class and has `nodes`, `dim`, `start`, `grad` and `metrics`.
    """

    nodes: int  # M
    dim: int  # d, the number of parameters
    columns: int = 1  # C, if the problem itself differs between the columns of a run
    optimum: Tensor | None = None  # (C, d), if it is known
    drawn: int | None = None  # numbers drawn per node and round; d by default
    exact: Callable[[Tensor], Tensor] | None = None  # the gradients at x, (M, C, d), without noise
    matrices: Sequence[WeightMatrix] | None = None  # hidden ones among the parameters; None: it does not say
    samples: int | None = None  # of all nodes together; None where there is no end of them
    on_fewer: Callable[[int, int], Problem] | None = None  # the same data on so many nodes, drawn with another seed
    brief: bool = False  # set by `briefly`; then nothing is measured of gradients, either
    shown: ClassVar[tuple[str, ...]] = ()  # fields that tell two problems of this class apart

    # Known of a class of problems before one is made:
    headline: Headline = DISTANCE
    worst: Mapping[str, float] = MappingProxyType({})  # the worst value of each metric for which larger is better
    per_column: tuple[str, ...] = ()  # options that may differ between the columns of one run
    per_network: tuple[str, ...] | None = None  # options that, like the seed, may differ between networks in a stack
    columns_share: bool = True  # whether the columns of a run share work
    numbers_per_parameter: int | None = None  # held by a node besides its states; None: a matrix and draws
    check: Callable[..., None] | None = None  # refuses (nodes, **options) without fetching the data
    dim_of: Callable[..., int] | None = None  # d of (nodes, **options), before there are data
    rounds_per_epoch: Callable[..., int] | None = None  # of (nodes, **options), if there is a data set
    joined: Callable[[Sequence[Any]], Problem] | None = None  # several such problems as one stack of nodes
    content: Callable[..., str] | None = None  # of (**options): SHA-256 of data that differ between machines
    ready: Callable[[], object] | None = None  # fetches the data before many processes need them

    @abstractmethod
    def start(self) -> Tensor:
        """One common starting point, (d,)."""

    @abstractmethod
    def grad(self, x: Tensor, t: int, nodes: Sequence[int] | None = None) -> Tensor:
        """Stochastic gradients of round t: x is (len(nodes), ..., d), all nodes where `nodes` is None."""

    @abstractmethod
    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """How good the points x, (M, C, d), are: one number per column, or one per node and column, (M, C), by name."""

    def among(self, nodes: Sequence[int]) -> Problem:
        """The same problem where only some nodes take part; override it if metrics depend on who does."""
        if self.draws_ahead:
            kind = type(self).__name__
            raise ValueError(f"{kind} does not say what some of its nodes draw; give it a method among(self, nodes)")

        def grad(x: Tensor, t: int, some: Sequence[int] | None = None) -> Tensor:
            return self.grad(x, t, [nodes[k] for k in (range(len(nodes)) if some is None else some)])

        return replaced(self, nodes=len(nodes), grad=grad)

    def grad_with_autograd(self, x: Tensor, t: int, *nodes: Sequence[int]) -> Tensor:
        """What `grad` returns, which may use autograd, wherever it is called."""
        with torch.enable_grad():
            return self.grad(x.detach(), t, *nodes).detach()

    def by_node(self, x: Tensor) -> dict[str, Tensor]:
        """The headline of each node, (M, C), as if all were where it is; override it with what is faster, or more."""
        metric = self.headline.metric
        each = [torch.as_tensor(self.metrics(own.expand_as(x))[metric]) for own in torch.unbind(x)]
        return {metric: torch.stack([v.mean(0) if v.ndim > 1 else v for v in each]).expand(x.shape[:2])}

    @property
    def large_is_good(self) -> tuple[str, ...]:
        """The metrics of which the largest value is the best."""
        return tuple({*self.worst, *([self.headline.metric] if self.headline.largest else [])})

    def worst_of(self, metric: str) -> float:
        """What stands for a metric that is not finite."""
        return self.worst.get(metric, -torch.inf if metric in self.large_is_good else torch.inf)

    def to(self, dtype: torch.dtype, device: torch.device) -> Problem:
        """The same problem with its tensors elsewhere."""
        return self

    def briefly(self) -> Problem:
        """For runs that are looked at often: if possible with the headline alone, on a part of the test data."""
        return self

    def fingerprint(self) -> str | None:
        """SHA-256 of everything that determines the gradients; None where nothing tells two problems apart."""
        return None

    @property
    def draws_ahead(self) -> bool:
        """Whether the randomness of many rounds can be drawn at once, which is faster."""
        return type(self).draw is not Problem.draw and type(self).gradient is not Problem.gradient

    def draw(self, t: Tensor) -> Tensor:
        """The randomness of rounds t, (len(t), M, ...)."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(self, t)")

    def gradient(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The gradients of one round at x, (M, C, d), from what was drawn for it, (M, ...)."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient(self, x, drawn)")

    def quadratic(self) -> Quadratic | None:
        """The parts of the gradient, for the fused engine; None if it cannot use them."""
        return None

    def logistic(self) -> Logistic | None:
        """The same, where the gradient is that of logistic regression."""
        return None

    def __repr__(self) -> str:
        values = ((name, vars(self)[name]) for name in self.shown)
        more = "".join(f", {name} {v:g}" if isinstance(v, float) else f", {name} {v}" for name, v in values)
        return f"<{type(self).__name__}: {self.nodes} nodes, {self.dim} parameters{more}>"


class Drawing(Problem):
    """A problem whose gradients are a formula of what is drawn, written once for all nodes and for some."""

    seed: int
    sha256: str | None = None  # of everything that determines the gradients
    numbers: Tensor  # of the nodes, by which they draw
    of_nodes: ClassVar[tuple[str, ...]]  # fields whose first axis are the nodes
    alone: ClassVar[tuple[str, ...]] = ()  # metrics that can be measured alone

    @property
    def draws_ahead(self) -> bool:
        """Unless a class of one's own has other gradients than the formula's."""
        return type(self).grad is Drawing.grad

    def grad(self, x: Tensor, t: int, nodes: Sequence[int] | None = None) -> Tensor:
        """Stochastic gradients of round t at x, (m, C, d), for these m nodes (all by default).

        Where the problem has one column, x may also be (m, d), or (d,) for a single node.
        """
        asked = self if nodes is None else self.part(nodes)
        at = points(x, asked.nodes, self.dim, self.columns)
        asked = asked.to(x.dtype, x.device)
        return asked.gradient(at, asked.draw(torch.tensor([t]))[0]).reshape(x.shape)

    def fingerprint(self) -> str | None:
        return self.sha256

    def briefly(self) -> Self:
        """With the headline alone, unless a class of one's own measures something else."""
        is_own = not type(self).metrics.__module__.startswith("klatsch.") or self.headline.metric not in self.alone
        return self if is_own else replaced(self, brief=True)

    def among(self, nodes: Sequence[int]) -> Self:
        """The same problem where only some nodes take part: what is minimised and measured is theirs."""
        return self.part(nodes)

    def part(self, nodes: Sequence[int]) -> Self:
        """The same problem as some nodes see it."""
        asked = torch.as_tensor(list(nodes))
        if asked.ndim != 1 or asked.numel() == 0 or asked.min() < 0 or asked.max() >= self.nodes:
            raise ValueError(f"nodes = {list(nodes)}; give numbers from 0 to {self.nodes - 1}")
        return replaced(self, nodes=len(asked), **{k: vars(self)[k][asked] for k in ("numbers", *self.of_nodes)})

    def to(self, dtype: torch.dtype, device: torch.device) -> Self:
        """The same problem with its tensors in another dtype or on another device."""
        tensors = {name: v for name, v in vars(self).items() if isinstance(v, Tensor)}
        moved = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in tensors.items()}
        return replaced(self, **moved)


class Convex(Drawing):
    """A problem with one known optimum, which starts at the origin."""

    optimum: Tensor
    matrices = ()  # its parameters are one vector
    alone = ("distance", "distance_of_mean", "worst_distance", "loss_gap", "worst_loss_gap")

    @property
    @abstractmethod
    def L(self) -> float:
        """Smoothness: how fast any node's gradient may change (Assumption 2.1)."""

    @classmethod
    def dim_of(cls, nodes: int, **options: Any) -> int:
        return int(settings(cls, nodes, options).get("dim") or cls(nodes, **options).dim)  # type: ignore[call-arg]

    @property
    def D1(self) -> Tensor:
        """The distance ||w_1 - x*|| of the start from the optimum, per column."""
        return self.optimum.square().sum(-1).sqrt()

    @property
    def zeta(self) -> Tensor:
        """Heterogeneity at the optimum, sqrt(1/M sum_i ||grad f_i(x*)||²), per column; measured, not the argument."""
        return self.exact(self.optimum.expand(self.nodes, -1, -1)).square().sum(-1).mean(0).sqrt()

    def start(self) -> Tensor:
        return torch.zeros_like(self.optimum[0])

    def exact(self, x: Tensor) -> Tensor:
        return self.gradient(x, None)

    @abstractmethod
    def gradient(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """The gradients at x, (M, C, d); exact where nothing is drawn."""

    @abstractmethod
    def loss_gap(self, x: Tensor) -> Tensor:
        """f(x) - f* for points (..., C, d)."""

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Squared distance to the optimum: mean over nodes, of their mean, worst node. Loss gap: the last two."""

        def squared(v: Tensor) -> Tensor:
            return (v - self.optimum).square().sum(-1)

        measures: dict[str, Callable[[], Tensor]] = {
            "distance": lambda: squared(x).mean(0),
            "distance_of_mean": lambda: squared(x.mean(0)),
            "worst_distance": lambda: squared(x).amax(0),
            "loss_gap": lambda: self.loss_gap(x.mean(0)),
            "worst_loss_gap": lambda: self.loss_gap(x).amax(0),
        }
        return {name: measure() for name, measure in measures.items() if not self.brief or name == self.headline.metric}

    def by_node(self, x: Tensor) -> dict[str, Tensor]:
        return {"distance": (x - self.optimum).square().sum(-1), "loss_gap": self.loss_gap(x)}


def checked(problem: object, source: str = "problem is") -> Problem:
    """A problem; anything else is refused."""
    missing = [part for part in ("nodes", "dim") if part not in dir(problem)]
    if not isinstance(problem, Problem) or missing:
        lacks = f" without {' and '.join(missing)}" if isinstance(problem, Problem) else ""
        raise ValueError(
            f"{source} {kind_of(problem)}{lacks}; give a problem, such as problems.LeastSquares(16), or an "
            "object of a class that derives from klatsch.problems.Problem"
        )
    return problem


def settings(kind: Callable[..., object], nodes: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a problem is made with, including defaults."""
    given = inspect.signature(kind).bind(nodes, **options)
    given.apply_defaults()
    return given.arguments


def shapes(problem: Problem, start: Tensor) -> dict[str, tuple[Shape, Shape]]:
    """The shapes of a custom problem's flat start and of its gradients, each with the one it should have."""
    M, d = int(problem.nodes), int(problem.dim)
    compared: dict[str, tuple[Shape, Shape]] = {"start()": (tuple(start.shape), (d,))}
    if len(start) == d:
        compared["grad(x, 1)"] = tuple(problem.grad(start.expand(M, 1, d), 1).shape), (M, 1, d)
        compared["grad(x, 1, [0])"] = tuple(problem.grad(start.expand(1, 1, d), 1, [0]).shape), (1, 1, d)
    return compared


def pooled(nodes: int, pool: int | None) -> int:
    """How many nodes' data there are: those of a pool, or of the nodes themselves."""
    if pool is None:
        return nodes
    if whole(pool, "pool", 1) % nodes:
        raise ValueError(f"pool = {pool} for {nodes} nodes; give a multiple of {nodes}, so that each has as many data")
    return pool


def points(x: Tensor, nodes: int, dim: int, columns: int) -> Tensor:
    """Points as (nodes, C, d), from these, from (nodes, d), or from (d,) for a single node."""
    wanted = f"({nodes}, {columns}, {dim})" if columns > 1 else f"({nodes}, columns, {dim}) or ({nodes}, {dim})"
    fits = x.ndim in (1, 2, 3) and x.shape[-1] == dim and (x.shape[0] == nodes if x.ndim > 1 else nodes == 1)
    if not fits or (columns > 1 and (x.ndim < 3 or x.shape[1] != columns)):
        raise ValueError(f"x has shape {tuple(x.shape)}; give {wanted}")
    return x.reshape(nodes, -1, dim)


def digest(*parts: Tensor | int) -> str:
    """SHA-256 of tensors and numbers, equal for equal content on every machine."""
    hashed = hashlib.sha256()
    for part in parts:
        tensor = torch.as_tensor(part)
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


def array(name: str, value: ArrayLike | Tensor, ndim: int, wanted: str) -> Tensor:
    """Numbers from anything that holds them, as float64."""
    try:
        array = value.detach().cpu().double() if isinstance(value, Tensor) else torch.tensor(np.asarray(value, float))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers ({error}); give shape {wanted}") from None
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; give {ndim} dimensions, {wanted}")
    if not torch.isfinite(array).all():
        place = tuple(int(v) for v in (~torch.isfinite(array)).nonzero()[0])
        raise ValueError(f"{name}{list(place)} = {array[place].item()}; give finite numbers only")
    return array
