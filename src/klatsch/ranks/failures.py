"""What goes wrong on ranks: each error says who, in which round, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from klatsch.ranks.agreement import shown


class LinkError(RuntimeError):
    """A neighbour that is gone, or late past the timeout.

    Attributes:
        rank: who noticed.
        neighbor: who is gone or late.
        round: the round t in which it was noticed.
        seconds: how long it was waited for.
        gone: whether its connection broke; else it is open, and the neighbour late.
    """

    def __init__(self, rank: int, neighbor: int, edge: str, t: int, seconds: float, reason: str | None) -> None:
        self.rank, self.neighbor, self.round, self.seconds, self.gone = rank, neighbor, t, seconds, reason is not None
        what = f"is gone ({reason})" if reason is not None else "is late: its connection is open, but nothing moves"
        super().__init__(f"rank {rank}, round {t}: neighbour {neighbor} {what}; waited {seconds:.1f} s on edge {edge}")

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.remedy}"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if self.gone:
            first = "see what ended it (an error, or fewer steps than the others take), resume from a Checkpointer"
        else:
            first = "see that it takes as many steps as the others, give it more time (timeout=...)"
        return f"{first}, end uneven trainings with optimizer.finish(), or go on without it (on_failure='continue')"


class MessageError(LinkError):
    """A neighbour that has sent numbers that are not finite."""

    def __init__(self, rank: int, neighbor: int, t: int) -> None:
        super().__init__(rank, neighbor, f"{neighbor} -> {rank}", t, 0.0, "refused")
        self.args = (f"rank {rank}, round {t}: neighbour {neighbor} has sent numbers that are not finite",)

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return "see what it computes, resume from a Checkpointer, or go on without it (on_failure='continue')"


class QuorumError(RuntimeError):
    """Fewer ranks are within reach than `quorum` asks for."""

    def __init__(self, rank: int, t: int, near: Sequence[int], size: int, quorum: float) -> None:
        super().__init__(
            f"rank {rank}, round {t}: {len(near)} of {size} ranks are left within reach ({shown(near)}), and "
            f"quorum = {quorum:g} asks for more; see what ended the others, and resume from a Checkpointer"
        )


class NonFiniteError(FloatingPointError):
    """Gradients or a state that are not finite, or so large that their squares are not.

    Attributes:
        rank: whose they are.
        round: the round t that they would have led to, or that the state is of.
    """

    def __init__(self, rank: int, t: int, what: str, remedy: str) -> None:
        self.rank, self.round = rank, t
        super().__init__(f"rank {rank}, round {t}: {what}; {remedy}")
