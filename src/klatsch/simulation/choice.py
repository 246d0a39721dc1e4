"""Which way to run rounds: the fastest that can run this rule on this problem here."""

from __future__ import annotations

from klatsch.rules import Rule, State
from klatsch.simulation.captured import GraphRounds
from klatsch.simulation.fused import FusedRounds
from klatsch.simulation.stack import Rounds, TorchRounds, device_of
from klatsch.simulation.trace import NotLinearError
from klatsch.topology import Topology

ENGINES = ("auto", "torch", "fused", "cuda graph")


def fastest(engine: str, plain: TorchRounds, rule: Rule, topology: Topology, state: State) -> Rounds:
    """The way asked for, or the fastest for "auto".

    Raises:
        ValueError: there is no such way, or it cannot run this; the message says why.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r}; choose from {', '.join(ENGINES)}")
    if engine == "torch":
        return plain
    where = device_of(state).type
    if engine == "fused" or (engine == "auto" and where == "cpu"):
        try:
            return _fused(plain, rule, topology, state)
        except (ValueError, OSError, NotLinearError) as reason:
            if engine == "fused":
                raise ValueError(f"engine = 'fused' cannot run this: {reason}; use engine='auto'") from None
    if engine == "cuda graph" or (engine == "auto" and where == "cuda"):
        try:
            return _captured(plain, state)
        except (ValueError, RuntimeError) as reason:
            if engine == "cuda graph":
                raise ValueError(f"engine = 'cuda graph' cannot run this: {reason}; use engine='auto'") from None
    return plain


def fastest_together(plain: TorchRounds, state: State) -> Rounds:
    """The fastest way for several networks in one stack: captured on a GPU if that is possible, else plain."""
    try:
        return _captured(plain, state)
    except (ValueError, RuntimeError):
        return plain


def _captured(plain: TorchRounds, state: State) -> GraphRounds:
    if device_of(state).type != "cuda":
        raise ValueError("it runs on a GPU only, with device='cuda'")
    return GraphRounds(plain, state)  # RuntimeError: something that cannot be captured


def _fused(plain: TorchRounds, rule: Rule, topology: Topology, state: State) -> FusedRounds:
    problem = plain.gradients.problem
    if device_of(state).type != "cpu":
        raise ValueError("it runs on the CPU only")
    if problem.quadratic() is None:
        raise ValueError(f"{type(problem).__name__} is no quadratic problem")
    if not topology.row_stochastic:
        raise ValueError(f"the rows of {topology.name} do not sum to 1")
    return FusedRounds(plain.gradients, rule, plain.rates, topology, state)
