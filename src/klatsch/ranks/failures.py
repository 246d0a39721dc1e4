"""Errors and warnings on ranks: who, in which round, and what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from itertools import count

BETWEEN = ("klatsch", "torch", "copy", "pickle", "contextlib")  # a user's line and a warning


class LinkError(RuntimeError):
    """A neighbour is gone, or later than the timeout allows: `rank` noticed in `round`, after so many `seconds`.

    `gone` says whether the connection of `neighbor` broke; otherwise it is late.
    """

    def __init__(
        self, rank: int, neighbor: int, t: int, reason: str | None, seconds: float = 0.0, incoming: bool = True
    ) -> None:
        self.rank, self.neighbor, self.round, self.seconds, self.gone = rank, neighbor, t, seconds, reason is not None
        self.why = reason or f"nothing came for {seconds:.1f} s"
        what = f"is gone ({reason})" if self.gone else "is late: its connection is open, but nothing moves"
        edge = f"{neighbor} -> {rank}" if incoming else f"{rank} -> {neighbor}"
        super().__init__(f"rank {rank}, round {t}: neighbour {neighbor} {what}; waited {seconds:.1f} s on edge {edge}")

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.remedy}"

    @property
    def remedy(self) -> str:
        if self.gone:
            first = "see what ended it (an error, or fewer steps than the others take), resume from a Checkpointer"
        else:
            first = "check that it takes as many steps as the others, give it more time (timeout=...)"
        return f"{first}, end uneven training with optimizer.finish(), or go on without it (on_failure='continue')"


class MessageError(LinkError):
    """A neighbour has sent numbers that are not finite."""

    remedy = "check what it computes, resume from a Checkpointer, or go on without it (on_failure='continue')"

    def __init__(self, rank: int, neighbor: int, t: int) -> None:
        super().__init__(rank, neighbor, t, "refused")
        self.args = (f"rank {rank}, round {t}: neighbour {neighbor} has sent numbers that are not finite",)


class QuorumError(RuntimeError):
    """Fewer ranks are within reach than `quorum` asks for."""

    def __init__(self, rank: int, t: int, near: Sequence[int], size: int, quorum: float) -> None:
        super().__init__(
            f"rank {rank}, round {t}: {len(near)} of {size} ranks are left within reach ({shown(near)}), and "
            f"quorum = {quorum:g} asks for more; see what ended the others, and resume from a Checkpointer"
        )


class NonFiniteError(FloatingPointError):
    """Gradients of a `rank` in a `round`, or its state after one, are not finite, or so large that squares are not."""

    def __init__(self, rank: int, t: int, what: str, remedy: str) -> None:
        self.rank, self.round = rank, t
        super().__init__(f"rank {rank}, round {t}: {what}; {remedy}")


def shown(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 3, or ranks 0, 2, 5."""
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def who(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence, with "has" or "have"."""
    return f"{shown(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def warn(text: str) -> None:
    """Warn of the user's line that led here."""
    for level in count(1):
        frame = sys._getframe(level)
        if frame.f_back is None or str(frame.f_globals.get("__name__")).partition(".")[0] not in BETWEEN:
            warnings.warn(text, RuntimeWarning, stacklevel=level + 1)
            return


def reason(error: BaseException) -> str:
    """What gloo says, without the place in its source code."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return (text.partition(".cc:")[2].partition("] ")[2] or text).partition(". ")[0]
