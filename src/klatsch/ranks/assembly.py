"""All ranks within reach at once: means of vectors, and copies of the first rank's, along the links of the graph.

`consensus()`, `average_` and `merged` need every rank, and so does the start. Numbers go up a tree of links and the
result comes down again, in pieces that follow each other, so that a timeout is about silence and not about size.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from klatsch.ranks.failures import reason, shown, who
from klatsch.ranks.links import MOST_PATIENCE, OUT, GlooLinks
from klatsch.ranks.waiting import Transfer

PIECE = 1 << 18  # bytes
WINDOW = 4  # pieces that are on their way to a neighbour at a time
LOOK = 0.5  # seconds after which a rank that waits looks where the others are
FIRST_TAG, LAST_TAG = 1 << 20, 1 << 31  # above the tags of rounds, and new in every round
NEWS, UP, DOWN = range(3)
VERDICT = "verdict"  # the note that says why ranks that have come after some rounds do so in vain
LOST = "lost"  # the kind of a verdict after which all go on
NONE: Mapping[int, list[Tensor]] = MappingProxyType({})
REMEDY = "ranks with fewer batches than others end with optimizer.finish(), on all ranks, before they ask for this"


@contextmanager
def assembled(links: GlooLinks, t: int, what: str, leavers: bool = False) -> Iterator[Assembly]:
    """All ranks within reach, for means over them; see `Assembly`."""
    if t in links.in_vain:  # what was sent then is still on its way
        raise links.in_vain[t]
    try:
        with links.notes.excuse(t, every=min(links.timeout / 8, 1.0)):
            yield Assembly(links, t, what, leavers)
    finally:
        links.hang_up()


class Assembly:
    """The ranks within reach, `ranks`, after the same round t; all of them ask for the same `what`.

    First they exchange news until all within reach know the same, and nobody goes on unless all have come. Raises
    ValueError if they come after different rounds or for different things, RuntimeError if one is silent. A rank that
    leaves takes no part, unless `leavers` asks for those that are in the next round.
    """

    def __init__(self, links: GlooLinks, t: int, what: str, leavers: bool) -> None:
        self._links, self._round, self._began = links, t, time.monotonic()
        self.ranks: list[int] = []
        known, during = links.membership, t + 1 if leavers else None
        asked = torch.zeros(known.size, dtype=torch.int64)
        asked[known.rank] = 1 + int.from_bytes(hashlib.sha256(what.encode()).digest()[:7])
        for _ in range(known.size - 1):
            message = torch.cat([asked.view(torch.uint8), torch.zeros(len(known), dtype=torch.uint8)])
            known.tell(message[asked.nbytes :])
            neighbours = known.beside(during)
            arriving = [self._call(NEWS, torch.empty_like(message), source, True) for source in neighbours]
            leaving = [self._call(NEWS, message, target, False) for target in neighbours]
            news = self._settled(arriving)
            self._settled(leaving)
            for told in news:
                asked = torch.maximum(asked, told[: asked.nbytes].view(torch.int64))
            if known.learn(told[asked.nbytes :] for told in news):
                links.take_stock(t)
        self.ranks = known.within_reach(during)
        self._parents, self._children, self._depth = known.tree(during)
        first = self.ranks[0]
        if others := [rank for rank in self.ranks if asked[rank] != asked[first]]:
            raise ValueError(
                f"the ranks do not agree on what to average: {shown(others)} asked for something else than rank "
                f"{first}; call the same function on all ranks, for models with the same buffers and parameters"
            )

    def mean(self, vector: Tensor) -> Tensor:
        """The mean over all of them of a vector on the CPU, the same bits on each; equal vectors stay what they are.

        If a rank dies meanwhile, the others raise RuntimeError.
        """
        return self._passed(vector, up=True)

    def mean_and_debts(self, vector: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The mean, and by neighbour what this rank owes it if vectors less their mean have come along the tree.

        That is their sum over all ranks on this side of the link; the other end has it with the other sign. All that a
        rank owes is its own vector less the mean.
        """
        branches: dict[int, list[Tensor]] = {peer: [] for peer in (*self._parents, *self._children)}
        mean, debts = self._passed(vector, True, branches), dict[int, Tensor]()
        for peer, parts in branches.items():
            sign, own = 1.0 if peer in self._parents else -1.0, torch.split(mean, len(parts[0]) - 1)
            debts[peer] = torch.cat([sign * part[-1] * (part[:-1] - m) for part, m in zip(parts, own, strict=True)])
        return mean, debts

    def share(self, weight: float) -> float:
        """A number over the mean of those of all of them."""
        return weight / float(self.mean(torch.tensor([weight], dtype=torch.float64)))

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's tensors to each of them."""
        for tensor in tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            first = self._passed(flat.view(torch.uint8), up=False)  # as bytes: gloo does not know every dtype
            tensor.copy_(first.view(flat.dtype).reshape(tensor.shape))

    def _passed(self, vector: Tensor, up: bool, branches: Mapping[int, list[Tensor]] = NONE) -> Tensor:
        """A vector that goes up the tree as the mean of what is below, if it goes up, and down from the first rank.

        Means of what is beyond links, or of what is on this side of that to the parent, are added to `branches`, piece
        by piece, each with its number of ranks.
        """
        result = vector.clone()
        pieces = torch.split(result, max(PIECE // result.element_size(), 1))
        rising = self._stream(UP, pieces, self._children if up else [])
        falling = self._stream(DOWN, pieces, self._parents)
        # The deeper a rank, the more pieces it sends up before the first one comes down: all links are busy at once.
        ahead = WINDOW * self._depth if up else 0
        leaving: deque[list[Transfer]] = deque()
        counts = set[int]()
        for k in range(len(pieces) + ahead):
            merged: Tensor | None = None
            leaving.append([])
            if k < len(pieces) and (up or not self._parents):
                below = next(rising)
                merged = _merged(pieces[k], below)
                for peer, part in (*zip(self._parents, [merged]), *zip(self._children, below)):  # noqa: B905
                    branches.get(peer, []).append(part)
                leaving[-1] += [self._call(UP, merged, parent, False) for parent in self._parents]
            if k >= ahead:
                if self._parents:
                    merged = next(iter(next(falling)), torch.zeros(len(pieces[k - ahead]) + 1, dtype=vector.dtype))
                assert merged is not None
                counts.add(int(merged[-1]))
                pieces[k - ahead].copy_(merged[:-1])
                leaving[-1] += [self._call(DOWN, merged, child, False) for child in self._children]
            if len(leaving) > WINDOW:
                self._settled(leaving.popleft())
        for transfers in leaving:
            self._settled(transfers)
        if counts - {len(self.ranks) if up else 1}:
            raise RuntimeError("a rank was lost meanwhile; try again")
        return result

    def _stream(self, kind: int, pieces: Iterable[Tensor], sources: Sequence[int]) -> Iterator[list[Tensor]]:
        """What some neighbours send, piece by piece; a few are always expected before they are needed."""
        posted: deque[list[Transfer]] = deque()
        for piece in pieces:
            posted.append([self._call(kind, piece.new_empty(len(piece) + 1), source, True) for source in sources])
            if len(posted) > WINDOW:
                yield self._settled(posted.popleft())
        for transfers in posted:
            yield self._settled(transfers)

    # --- waiting -----------------------------------------------------------------------------------------------

    def _call(self, kind: int, memory: Tensor, peer: int, incoming: bool) -> Transfer:
        tag = FIRST_TAG + (self._round * 3 + kind) % (LAST_TAG - FIRST_TAG)
        return self._links.call(tag, memory, peer, incoming)

    def _settled(self, transfers: Iterable[Transfer]) -> list[Tensor]:
        """Wait for transfers; returns the memory of those that have not failed."""
        memories = []
        for transfer in transfers:
            began, seconds = time.monotonic(), min(LOOK, self._links.step)
            while not transfer.ended(seconds):
                if self._links.is_out(transfer.peer):
                    transfer.error = RuntimeError(OUT)
                    break
                self._look(transfer.peer, time.monotonic() - began)
                seconds = min(2 * seconds, self._links.step)  # a store far away has other things to do
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
        others = [rank for rank in known.within_reach() if rank != known.rank]
        links.notes.waiting()
        notes, verdict = links.notes.of(*others), links.notes.read([VERDICT])
        if verdict:
            kind, rounds, text = json.loads(verdict[VERDICT])
            if self._round in rounds:
                raise self._in_vain(kind, {self._round}, text)
        places, rounds = {known.rank: f"has come after round {self._round}"}, {self._round}
        for rank, note in (notes or {}).items():
            # At the start, ranks that have the first one's numbers go on before others do.
            if note.how == "after" and note.round != self._round:
                places[rank] = f"has come after round {note.round}"
                rounds.add(note.round)
            elif note.how == "in" and note.round > self._round > 0:
                places[rank] = f"is in round {note.round}"
        if len(places) > 1 and not self.ranks:  # later, some may go on before others
            text = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
            raise self._in_vain("rounds", rounds, f"the ranks are not at the same round: {text}; {REMEDY}")
        if waited < links.timeout:
            return
        silences = {rank: time.monotonic() - max(links.notes.since(rank), self._began) for rank in others}
        silent = [rank for rank in others if silences[rank] >= links.timeout]
        if silent or notes is None or waited >= MOST_PATIENCE * links.timeout:
            named = silent if silent and notes is not None else [peer]
            text = f"{who(named)} not answered for {max(silences[rank] for rank in named):.1f} s"
            raise self._in_vain("silence", {self._round}, text)

    def _in_vain(self, kind: str, rounds: set[int], text: str) -> Exception:
        """An error for this rank, and for all others that have come after one of these rounds."""
        self._links.notes.tell(VERDICT, json.dumps([kind, sorted(rounds), text]))
        error = self._links.in_vain[self._round] = ValueError(text) if kind == "rounds" else RuntimeError(text)
        if kind != LOST:
            time.sleep(2 * LOOK)  # others read it before this rank ends, and perhaps the store with it
        return error


def abandon(links: GlooLinks, t: int, text: str) -> None:
    """Tell others that wait for this rank after round t that it goes on without them, and why."""
    links.notes.tell(VERDICT, json.dumps([LOST, [t], text]))


def _merged(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The mean of a piece and of others' means, each with the number of ranks in it at its end."""
    if not others:
        return torch.cat([piece, piece.new_ones(1)])
    mean, count = piece.double(), 1.0
    for other in others:
        count += float(other[-1])
        mean += (other[:-1] - mean) * (float(other[-1]) / count)  # differences keep equal values equal
    return torch.cat([mean, mean.new_tensor([count])]).to(piece.dtype)
