"""How messages travel on a graph: the options of a channel, with their limits, and the bytes of an encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from klatsch import own
from klatsch.arguments import number, whole

if TYPE_CHECKING:
    from klatsch.encodings import Encoding

LONGEST = 10**6  # rounds of a period, whose matrices are listed one by one
LATEST = 10**4  # rounds that a message may travel
AS_THEY_ARE, FLOAT32 = "float32", 4  # how numbers travel if nothing is said, and the bytes of one
# The options of a channel, with their defaults; `topology.channel` says what they do.
CHANNEL = {"every": 1, "late": 0, "wire": AS_THEY_ARE, "loss": 0.0, "one_way": False}


def rounds_between(H: object, graphs: int = 1) -> int:
    """Check the rounds between two mixes of a graph with some matrices in turn, and return a plain int."""
    between = whole(H, "every", 1)
    if between * graphs > LONGEST:
        long = f", a period of {between * graphs:,} rounds" if graphs > 1 else ""
        raise ValueError(f"every = {between:,}{long}; give a whole number of rounds from 1 to {LONGEST // graphs:,}")
    return between


def rounds_late(late: object) -> int:
    """Check a number of rounds that a message may travel."""
    return whole(late, "late", 0, LATEST)


def check_loss(name: str, loss: object, one_way: object, wire: object) -> float:
    """Check the probability that a message is lost, and return it."""
    if not isinstance(one_way, bool):
        raise ValueError(f"one_way = {one_way!r}; give true or false")
    rate = number("loss", loss, lambda v: 0 <= v < 1, "a probability from 0 up to but not including 1, such as 0.1")
    asked = f"{name} with loss = {rate:g}"
    if one_way and not rate:
        raise ValueError(f"{asked} and one_way = true: which messages? give loss, such as loss = 0.1")
    if rate and encoding(wire).remembers:
        lost = "what one difference says would be missing for ever; use bfloat16"
        raise ValueError(f"{asked} and wire = {wire!r}: {lost}")
    return rate


def check_wire(name: str, wire: object, drawn: bool) -> None:
    """Check how numbers travel on a graph."""
    if reason := no_wire(name, wire, drawn):
        raise ValueError(reason)


def no_wire(name: str, wire: object, drawn: bool) -> str:
    """Why numbers cannot travel so on a graph, which may be drawn anew in every round; nothing if they can."""
    if wire == AS_THEY_ARE or not encoding(wire).remembers or not drawn:
        return ""
    return (
        f"{name} with wire = {wire!r}: the graph is drawn anew in every round, and messages are differences to what "
        "the same neighbours hold already; use wire = 'bfloat16', or a graph that repeats, such as one_peer_exponential"
    )


def check_channel(
    every: object = 1, late: object = 0, wire: object = AS_THEY_ARE, loss: object = 0.0, one_way: object = False
) -> None:
    """Check the options of a channel, whatever the graph; a file is not executed for that."""
    if own.is_own(wire):
        own.part_of(str(wire))
        wire = AS_THEY_ARE
    rounds_between(every)
    rounds_late(late)
    check_wire("", wire, drawn=False)
    check_loss("a graph", loss, one_way, wire)


def encoded_bytes(wire: str, numbers: int) -> int:
    """The bytes of a vector as it travels."""
    return FLOAT32 * numbers if wire == AS_THEY_ARE else encoding(wire).bytes(numbers)


def damps(wire: object) -> bool:
    """Whether an encoding needs smaller weights."""
    return wire != AS_THEY_ARE and encoding(wire).delay > 0


def encoding(wire: object) -> Encoding:
    """The encoding of numbers by its name."""
    from klatsch import encodings  # with torch, which graphs do not need

    return encodings.of(wire)
