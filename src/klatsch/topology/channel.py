"""How messages travel on a graph: the options of a channel, with their limits, and the bytes of an encoding."""

from __future__ import annotations

from klatsch.arguments import named, number, whole

LONGEST = 10**6  # rounds of a period, whose matrices are listed one by one
LATEST = 10**4  # rounds that a message may travel
WIRES = ("float32", "bfloat16", "int8")  # how numbers may travel; the first is as they are, new ones go to the end
BLOCK = 256  # numbers that share a scale in int8
# The options of a channel, with their defaults; `topology.channel` says what they do.
CHANNEL = {"every": 1, "late": 0, "wire": WIRES[0], "loss": 0.0, "one_way": False}


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
    if rate and wire == "int8":
        raise ValueError(f"{asked} and wire = 'int8': what one difference says would be missing for ever; use bfloat16")
    return rate


def check_wire(name: str, wire: object, drawn: bool) -> None:
    """Check how numbers travel on a graph."""
    named("wire", wire, dict.fromkeys(WIRES))
    if reason := no_wire(name, wire, drawn):
        raise ValueError(reason)


def no_wire(name: str, wire: object, drawn: bool) -> str:
    """Why numbers cannot travel so on a graph, which may be drawn anew in every round; nothing if they can."""
    if wire != "int8" or not drawn:
        return ""
    return (
        f"{name} with wire = 'int8': the graph is drawn anew in every round, and int8 sends differences to what the "
        "same neighbours hold already; use wire = 'bfloat16', or a graph that repeats, such as one_peer_exponential"
    )


def check_channel(
    every: object = 1, late: object = 0, wire: object = WIRES[0], loss: object = 0.0, one_way: object = False
) -> None:
    """Check the options of a channel, whatever the graph."""
    rounds_between(every)
    rounds_late(late)
    check_wire("", wire, drawn=False)
    check_loss("a graph", loss, one_way, wire)


def encoded_bytes(wire: str, numbers: int) -> int:
    """The bytes of a vector as it travels."""
    scales = -(-numbers // BLOCK)  # of int8, in bfloat16
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 2 * scales}[wire]
