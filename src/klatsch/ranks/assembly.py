"""All ranks within reach at once: means of vectors, and copies of the first rank's, along the links of the graph.

`consensus()`, `average_` and `merged` need every rank, and so does the start. Numbers go up a tree of links and the
result comes down again, in pieces that follow each other, so that a timeout is about silence and not about size.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from klatsch.ranks.failures import reason, shown, who
from klatsch.ranks.waiting import Note, Transfer

if TYPE_CHECKING:
    from klatsch.ranks.gloo import GlooLinks

PIECE = 1 << 18  # bytes
WINDOW = 4  # pieces that are on their way to a neighbour at a time
LOOK = 0.5  # seconds after which a rank that waits looks where the others are
MOST_PATIENCE = 4  # timeouts for one piece if nobody is silent
FIRST_TAG, LAST_TAG = 1 << 20, 1 << 31  # above the tags of rounds, and new in every round
NEWS, UP, DOWN = range(3)
VERDICT = "verdict"  # the note that says why ranks that have come after some rounds do so in vain


class Assembly:
    """The ranks within reach, `ranks`, after the same round t; all of them ask for the same `what`.

    First they exchange news until all within reach know the same, and nobody goes on unless all have come. Raises
    ValueError if they come after different rounds or for different things, RuntimeError if one is silent. A rank that
    leaves takes no part, unless `leavers` asks for those that are in the next round.
    """

    def __init__(self, links: GlooLinks, t: int, what: str, leavers: bool) -> None:
        self._links, self._round, self._began = links, t, time.monotonic()
        self._heard: dict[int, tuple[bytes, float]] = {}  # by rank: its last note, and since when it is there
        self.ranks: list[int] = []
        known, during = links.membership, t + 1 if leavers else None
        asked = torch.zeros(known.size, dtype=torch.int64)
        asked[known.rank] = 1 + int.from_bytes(hashlib.sha256(what.encode()).digest()[:7])
        for _ in range(known.size - 1):
            message = torch.cat([asked.view(torch.uint8), torch.zeros(len(known), dtype=torch.uint8)])
            known.tell(message[asked.nbytes :])
            beside = known.beside(during)
            came = [self._receive(NEWS, message, source) for source in beside]
            went = [self._send(NEWS, message, target) for target in beside]
            news = self._settled(came)
            self._settled(went)
            for theirs in news:
                asked = torch.maximum(asked, theirs[: asked.nbytes].view(torch.int64))
            if known.learn(theirs[asked.nbytes :] for theirs in news):
                links.take_stock(t)
        self.ranks = known.within_reach(during)
        (parent, self._children), self._depth = known.tree(during), known.depth(during)
        self._parents = [] if parent is None else [parent]
        _check_same({rank: int(asked[rank]) for rank in self.ranks})

    def mean(self, mine: Tensor) -> Tensor:
        """The mean over all of them of a vector on the CPU, the same bits on each; equal vectors stay what they are.

        If a rank dies meanwhile, the others raise RuntimeError.
        """
        return self._passed(mine, up=True)

    def copy(self, mine: Tensor) -> Tensor:
        """The first rank's vector, on each of them."""
        return self._passed(mine, up=False)

    def _passed(self, mine: Tensor, up: bool) -> Tensor:
        """A vector that goes up the tree as the mean of what is below, if it goes up, and down from the first rank."""
        result = mine.clone()
        pieces = torch.split(result, max(PIECE // result.element_size(), 1))
        rising = self._stream(UP, pieces, self._children if up else [])
        falling = self._stream(DOWN, pieces, self._parents)
        # The deeper a rank, the more pieces it sends up before the first one comes down: all links are busy at once.
        ahead = WINDOW * self._depth if up else 0
        leaving: deque[list[Transfer]] = deque()
        counts = set[int]()
        for k in range(len(pieces) + ahead):
            whole: Tensor | None = None
            leaving.append([])
            if k < len(pieces) and (up or not self._parents):
                whole = _merged(pieces[k], next(rising))
                leaving[-1] += [self._send(UP, whole, parent) for parent in self._parents]
            if k >= ahead:
                if self._parents:
                    whole = next(iter(next(falling)), torch.zeros(len(pieces[k - ahead]) + 1, dtype=mine.dtype))
                assert whole is not None
                counts.add(int(whole[-1]))
                pieces[k - ahead].copy_(whole[:-1])
                leaving[-1] += [self._send(DOWN, whole, child) for child in self._children]
            if len(leaving) > WINDOW:
                self._settled(leaving.popleft())
        for transfers in leaving:
            self._settled(transfers)
        if counts - {len(self.ranks) if up else 1}:
            raise RuntimeError("a rank was lost meanwhile; try again")
        return result

    def _stream(self, kind: int, pieces: Iterable[Tensor], sources: Sequence[int]) -> Iterator[list[Tensor]]:
        """What some neighbours send, piece by piece; a few are always expected before they are needed."""

        def expect(piece: Tensor) -> list[Transfer]:
            return [self._receive(kind, piece.new_empty(len(piece) + 1), source) for source in sources]

        rest = iter(pieces)
        posted = deque(map(expect, islice(rest, WINDOW)))

        def arrived() -> Iterator[list[Tensor]]:
            while posted:
                transfers = posted.popleft()
                posted.extend(map(expect, islice(rest, 1)))
                yield self._settled(transfers)

        return arrived()

    # --- waiting -----------------------------------------------------------------------------------------------

    def _receive(self, kind: int, like: Tensor, source: int) -> Transfer:
        return self._links.call(self._tag(kind), torch.empty_like(like), source, incoming=True)

    def _send(self, kind: int, message: Tensor, target: int) -> Transfer:
        return self._links.call(self._tag(kind), message, target, incoming=False)

    def _tag(self, kind: int) -> int:
        return FIRST_TAG + (self._round * 3 + kind) % (LAST_TAG - FIRST_TAG)

    def _settled(self, transfers: Iterable[Transfer]) -> list[Tensor]:
        """Wait for transfers; returns the memory of those that have not failed."""
        memories = []
        for transfer in transfers:
            began, seconds = time.monotonic(), min(LOOK, self._links.timeout / 8)
            while not transfer.ended(seconds):
                self._look(transfer.peer, time.monotonic() - began)
                seconds = min(2 * seconds, self._links.timeout / 8)  # a store far away has other things to do
            if transfer.error is None:
                memories.append(transfer.memory)
                continue
            self._look(transfer.peer, 0.0)  # it may have ended because of what it has told
            if not self._links.survives:
                raise self._in_vain("gone", {self._round}, f"rank {transfer.peer} is gone: {reason(transfer.error)}")
            self._links.fail(transfer, self._round, time.monotonic() - began)
        return memories

    def _look(self, peer: int, waited: float) -> None:
        """Raise if others have come after another round, or if one is silent for too long; all ranks say the same."""
        links, known = self._links, self._links.membership
        others = {str(rank): rank for rank in known.within_reach() if rank != known.rank}
        links.notes.waiting()
        notes, told = links.notes.read([*others]), links.notes.read([VERDICT])
        verdict = (told or {}).get(VERDICT, b"").decode().split(maxsplit=2)
        if verdict and str(self._round) in verdict[1].split(","):
            raise self._in_vain(verdict[0], {self._round}, verdict[2])
        places = {known.rank: f"has come after round {self._round}"}
        rounds = {self._round}
        for key, note in (notes or {}).items():
            if self._heard.get(rank := others[key], (b"", 0.0))[0] != note:
                self._heard[rank] = note, time.monotonic()
            _, how, r, *_ = Note.read(note)
            # At the start, ranks that have the first one's numbers go on before others do.
            if (how == "after" and r != self._round) or (how == "in" and r > self._round > 0):
                places[rank] = f"has come after round {r}" if how == "after" else f"is in round {r}"
                rounds |= {r} if how == "after" else set()
        if len(places) > 1 and not self.ranks:  # later, some may go on before others
            text = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
            raise self._in_vain("rounds", rounds, f"the ranks are not at the same round: {text}; {REMEDY}")
        if waited < links.timeout:
            return
        now = time.monotonic()
        silent = [rank for rank in others.values() if now - self._since(rank) >= links.timeout]
        if silent or notes is None or waited >= MOST_PATIENCE * links.timeout:
            named = silent if silent and notes is not None else [peer]
            text = f"{who(named)} not answered for {max(now - self._since(rank) for rank in named):.1f} s"
            raise self._in_vain("silence", {self._round}, text)

    def _in_vain(self, kind: str, rounds: set[int], text: str) -> Exception:
        """An error for this rank, and for all others that have come after one of these rounds."""
        self._links.notes.tell(VERDICT, f"{kind} {','.join(map(str, sorted(rounds)))} {text}")
        error = ValueError(text) if kind == "rounds" else RuntimeError(text)
        self._links.in_vain(self._round, error)
        time.sleep(2 * LOOK)  # others read it before this rank ends, and perhaps the store with it
        return error

    def _since(self, rank: int) -> float:
        """Since when a rank says nothing new."""
        return self._heard[rank][1] if rank in self._heard else self._began


REMEDY = "ranks with fewer batches than others end with optimizer.finish(), on all ranks, before they ask for this"


def _merged(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The mean of a piece and of others' means, each with the number of ranks in it at its end."""
    if not others:
        return torch.cat([piece, piece.new_ones(1)])
    mean, count = piece.double(), 1.0
    for other in others:
        count += float(other[-1])
        mean += (other[:-1] - mean) * (float(other[-1]) / count)  # differences keep equal values equal
    return torch.cat([mean, mean.new_tensor([count])]).to(piece.dtype)


def _check_same(asked: Mapping[int, int]) -> None:
    first = asked[min(asked)]
    if other := [rank for rank, what in asked.items() if what != first]:
        raise ValueError(
            f"the ranks do not agree on what to average: {shown(other)} asked for something else than rank "
            f"{min(asked)}; call the same function on all ranks, for models with the same buffers and parameters"
        )
