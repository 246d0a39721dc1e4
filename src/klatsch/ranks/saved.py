"""What a folder of checkpoints holds: which files belong together, and from which rounds a training can go on.

Every rank writes files of its own, such as rank00001-round0000000100.safetensors (rank00001.0-... where a node is a
host of several ranks). A training has an identity, which stands in all of its files, and a crew: the ranks that still
hear each other. Once ranks have left or are lost, a round is complete without them. When a training goes on with
another crew, its identity gets one more part. Only headers are read here, and without torch, but for an export.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from klatsch import sealed
from klatsch.ranks.failures import who
from klatsch.sealed import REMEDY, CheckpointError

FORMAT = "klatsch ranks 5"
NAME = re.compile(r"rank(\d+)(?:\.(\d+))?-round(\d+)\.safetensors")
MOST_RANKS = 1_000_000

Training = tuple[str, ...]  # an identity: drawn at the start, and one part more for every other crew


class Seen(NamedTuple):
    """What the name and the header of a file say; plain data, which ranks tell each other."""

    rank: int  # of the node that wrote it
    rounds: int
    training: Training = ()
    crew: tuple[int, ...] = ()
    size: int = 0  # nodes at the start
    trouble: str = ""  # in short, such as "damaged"


class SavedFile(NamedTuple):
    """One file of a folder."""

    path: Path
    place: int  # on its host
    seen: Seen
    header: dict[str, Any]
    error: str = ""


class Round(NamedTuple):
    """The files of one training after one round."""

    training: Training
    rounds: int
    crew: frozenset[int]  # the ranks that are needed
    held: frozenset[int]  # the ranks that have a file; some may be out of the crew
    size: int  # nodes at the start

    def lacks(self, started: int | None = None) -> int:
        """How many files are missing, to go on with all of the crew or with as many ranks as are started."""
        return (len(self.crew) if started is None else min(len(self.crew), started)) - len(self.crew & self.held)

    @property
    def merit(self) -> tuple[object, ...]:
        """The one to go on from is the largest: not a few ranks that were cut off, the last crew, the last round."""
        return 2 * len(self.crew & self.held) >= self.size, len(self.training), self.rounds, len(self.crew & self.held)


def files(folder: Path) -> list[SavedFile]:
    """All checkpoints of ranks in a folder, by round and rank."""
    all_files = [_file(path, int(match[1]), int(match[2] or 0), int(match[3])) for path, match in named(folder)]
    return sorted(all_files, key=lambda file: (file.seen.rounds, file.seen.rank, file.place))


def named(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """The files of a folder that have the name of a checkpoint: rank, place and round."""
    return [(path, match) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]


def name(rank: int, place: int | None, rounds: int) -> str:
    """The name of a file; `place` is None where a node is one rank."""
    return f"rank{rank:05d}{'' if place is None else f'.{place}'}-round{rounds:010d}.safetensors"


def rounds_of(seen: Iterable[Seen]) -> list[Round]:
    """What can be gone on from, best first, whether or not files are missing."""
    held: dict[tuple[Training, int], dict[int, Seen]] = {}
    for each in seen:
        if not each.trouble:
            held.setdefault((each.training, each.rounds), {})[each.rank] = each
    best = []
    for (training, rounds), by_rank in held.items():
        # Ranks learn of a loss one after the other, and pieces of a network that fell apart each have their crew.
        crews = {frozenset(each.crew) for each in by_rank.values()}
        size = max(each.size for each in by_rank.values())
        options = [Round(training, rounds, crew, frozenset(by_rank), size) for crew in crews]
        best.append(min(options, key=lambda option: (option.lacks() > 0, -len(option.crew), sorted(option.crew))))
    return sorted(best, key=lambda each: each.merit, reverse=True)


def inventory(seen: Collection[Seen], ranks: Iterable[int], training: Training) -> str:
    """Which ranks have which rounds, in words."""
    held: dict[str, list[int]] = {}
    for rank in sorted({*ranks, *(each.rank for each in seen)}):
        rounds: dict[int, str] = {}
        for each in seen:
            if each.rank == rank:
                other = " (of another training)" * (each.training[:1] != training[:1])
                mark = f" ({each.trouble})" if each.trouble else other
                rounds[each.rounds] = min(rounds.get(each.rounds, mark), mark)
        listed = ", ".join(f"{number}{mark}" for number, mark in sorted(rounds.items()))
        held.setdefault(f"round {listed}" if listed else "none", []).append(rank)
    return "; ".join(f"{who(some)} {what}" for what, some in held.items())


def _file(path: Path, rank: int, place: int, rounds: int) -> SavedFile:
    try:
        header = sealed.header_of(path, FORMAT)
        _check(path, header, {"rank": rank, "place": place, "rounds": rounds})
    except CheckpointError as error:
        return SavedFile(path, place, Seen(rank, rounds, trouble=error.trouble), {}, str(error))
    seen = Seen(rank, rounds, tuple(header["training"]), tuple(header["crew"]), header["size"])
    return SavedFile(path, place, seen, header)


def _check(path: Path, header: dict[str, Any], named: dict[str, int]) -> None:
    """Refuse a header that lacks something, or that says other numbers than the name of its file."""
    kinds = {"training": list, "crew": list, "size": int, "places": int, "run": dict, "topology": str}
    for key, kind in (kinds | dict.fromkeys(named, int)).items():
        if type(header.get(key)) is not kind:
            raise CheckpointError(f"{path} is not a checkpoint: its header has {key} = {header.get(key)!r}; {REMEDY}")
    for key, number in named.items():
        if header[key] != number:
            remedy = "give it its own name back, or move it away"
            raise CheckpointError(f"{path} holds {key} {header[key]}, and its name says {number}; {remedy}")
    sound = header["training"] and all(isinstance(part, str) for part in header["training"])
    nodes = range(header["size"])
    crewed = header["crew"] and all(type(node) is int and node in nodes for node in header["crew"])
    if not sound or not crewed or header["size"] > MOST_RANKS:
        raise CheckpointError(f"{path} is not a checkpoint: its training or its crew are none; {REMEDY}")
    for text in (*header["training"], header["topology"], str(header["run"].get("rule"))):
        if not text.isprintable():  # it would command a terminal
            raise CheckpointError(f"{path} is not a checkpoint: {text!r} is no name; {REMEDY}")
