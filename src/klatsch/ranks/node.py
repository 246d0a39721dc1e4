"""One node of a network: its part of the rule's state, and the rounds that advance it.

The same `rule.update` as in simulation runs on slices of the vectors that stay in the cache: between two flows a rule
is elementwise, so slices are independent. If a message depends on the gradient, the update runs up to that call of
`flow` to find what to send, and once more from the beginning when all messages have arrived. If messages arrive late,
those of the round are written while the state advances, and once is enough.

On a GPU an update is a kernel. One that fills a message also writes what is known of the new state by then, and the
next ones read what lies there. The new state lies beside the old one, so kernels can look for themselves whether
messages are finite: if one is not, the round has not happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.columns import Number
from klatsch.ranks import kernels
from klatsch.ranks.agreement import Everyone
from klatsch.ranks.assembly import assembled
from klatsch.ranks.links import GlooLinks
from klatsch.ranks.mailbox import Mailbox, Memory
from klatsch.ranks.membership import Membership
from klatsch.ranks.message import Block
from klatsch.rules import Flow, Rule, State
from klatsch.rules.base import each
from klatsch.wire.program import Symbol
from klatsch.wire.rehearsal import Rehearsal, Sum

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # numbers per slice: a cache's worth, or enough to hide the launches
PIECE = 1 << 20  # numbers of a sum that travel at a time
LEDGER_TAG = (1 << 20) - 3  # above the tags of rounds


class Given(NamedTuple):
    """What a round starts from, for a slice of the vectors."""

    rule: Rule  # with the settings of the round
    grad: Tensor
    lr: Number


Symbols = Callable[[Tensor], Tensor]  # gives a tensor in the type of the state, or a symbol for it, to compute with
Inputs = Callable[[Block, Symbols], Given]
Work = Callable[[Symbols, State], None]  # on a slice of the state
Receiver = Callable[[Block, State, Rule], None]  # called with a slice of the new state and the rule of the round


class _Reached(Exception):  # noqa: N818
    """The update has reached the call of `flow` where it should stop."""


class Ledger:
    """What each neighbour has added to sums of flows, such as D2's correction y, to be taken out when it is lost.

    Such sums are zero over the network. Without the lost node's they would not be, and push the others' mean for ever.
    """

    def __init__(self, sums: Sequence[Sum], x: Tensor) -> None:
        self.sums = {(entry.call, entry.part): entry for entry in sums}
        self._like = x
        self.entries: dict[tuple[int, str], Tensor] = {}  # by neighbour and field
        self.last: dict[int, int] = {}  # by neighbour: the round of its last entry

    def enter(self, t: int, call: int, part: int, block: Block, shares: dict[int, Tensor]) -> None:
        """Add the shares of the neighbours in a flow of round t, or in a slice of it."""
        entry = self.sums[call, part]
        self.last |= dict.fromkeys(shares, t)
        for node, share in shares.items():
            if (node, entry.field) not in self.entries:
                self.entries[node, entry.field] = torch.zeros_like(self._like)
            whole = self.entries[node, entry.field]
            (whole if block is None else whole[block]).add_(share, alpha=entry.factor)

    def make_up(self, state: State, links: GlooLinks, t: int) -> None:
        """Make entries for sums that came without, as if their flows had come along a tree; all ranks do it together.

        What a rank owes its parent is the sum of its branch, and so the entries of every rank add up to its own sums.
        """
        # Of the whole graph: all are there, and each may know of other links that were lost before.
        parents, children, _ = Membership(links.topology, links.rank).tree()
        for field in sorted({entry.field for entry in self.sums.values()}):
            branch = state[field].to("cpu", copy=True)
            for child in children:
                below = torch.empty_like(branch)
                for piece in torch.split(below, PIECE):  # a timeout is about silence
                    links.pass_on(LEDGER_TAG, t, piece, child, True)
                self.entries[child, field] = below.neg().to(self._like)
                branch += below
            for parent in parents:
                for piece in torch.split(branch, PIECE):
                    links.pass_on(LEDGER_TAG, t, piece, parent, False)
                self.entries[parent, field] = branch.to(self._like)
        links.hang_up()

    def take_out(self, gone: Collection[int], state: State) -> None:
        """Take what these nodes have added out of a state."""
        for node, field in [entry for entry in self.entries if entry[0] in gone]:
            self.last.pop(node, None)
            state[field].sub_(self.entries.pop((node, field)))

    @property
    def memory(self) -> Memory:
        """Copies of the entries, for a checkpoint; empty where there are none."""
        entries = {f"{node} {field}": v.clone() for (node, field), v in self.entries.items()}
        return {"ledger": entries, "last": {str(node): t for node, t in self.last.items()}} if entries else {}

    def load(self, memory: Memory) -> None:
        """Go on with such a memory."""
        entries: dict[str, Tensor] = memory.get("ledger", {})  # type: ignore[assignment]
        last: dict[str, int] = memory.get("last", {})  # type: ignore[assignment]
        keys = {key: key.split() for key in entries}
        self.entries = {(int(n), field): entries[key].to(self._like, copy=True) for key, (n, field) in keys.items()}
        self.last = {int(node): int(t) for node, t in last.items()}


class Node:
    """One rank's share of a network: a rule that starts at x, of any shape that ends in the parameter axis.

    Nodes on the same links need different streams. A guarded node refuses messages that are not finite.
    """

    def __init__(self, rule: Rule, x: Tensor, links: GlooLinks, stream: int = 0, guarded: bool = False) -> None:
        self.rule, self.links, self.rounds, self._speaks = rule, links, 0, links.topology.speaks
        rehearsal = self.rehearsal = Rehearsal(rule, x)
        cuts = x.ndim == 1 and not rule.needs_shapes
        rehearsal.check(slices=cuts)  # a round may call it twice, and cuts plain vectors
        self._traffic = rehearsal.traffic
        by_rows = links.topology.row_stochastic and not rule.push
        self._mail = Mailbox(self._traffic, x, links, by_rows, stream, guarded)
        self._ledger = Ledger(rehearsal.sums if links.survives and by_rows else [], x)
        self._output = rehearsal.output
        self.apart: Tensor | None = None  # see Mailbox.apart, of x if it travels, in the last mix
        self._balances = by_rows and not links.survives  # when ranks leave, without a ledger
        self._excess: State = {}
        self._blocks, self._wide, self._dtype = _blocks(x, cuts), x.shape[-1], x.dtype
        self._begun, self._calls = False, 0
        usual = x.ndim == 1 and x.dtype is torch.float32 and not self._ledger.sums
        self._fuses = usual and kernels.available(x.device.type)
        self._mail.defers = self._fuses and not self._mail.late and self._mail.is_plain
        self._levels: dict[str, int] = {}  # see `_work_on`
        self._formulas = kernels.Formulas()  # of the round
        self._following: State = {}  # where the next state will be
        self._spare: State = {}  # where the one before the last was
        self.moved = False  # whether the next state is there, and what `arrived` has written
        start = rule.init(x)
        self._fields = {name: v.clone() for name, v in start.items()}
        self.load(start, 0)

    @property
    def state(self) -> State:
        """The state after the last round; its tensors are the node's own memory."""
        return dict(self._fields)

    @property
    def memory(self) -> Memory:
        """What the channel holds and what is on its way, and the ledger; for a checkpoint, beside the state."""
        return self._mail.memory | self._ledger.memory

    def load(self, fields: State, rounds: int, memory: Memory | None = None) -> None:
        """Continue from a state saved after some rounds; without the channel's memory it begins anew."""
        self._fields |= self._mail.early_fields(rounds + 1)
        for name, value in fields.items():
            self._fields[name].copy_(value)
        self.rounds, self._begun, self._excess = rounds, False, {}
        try:
            self._mail.load(memory or {})
            self._ledger.load(memory or {})
            for node in self._ledger.last:
                self.links.membership.number(self.links.rank, node)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"what the channel held does not fit: {error}") from None

    @property
    def owes(self) -> Set[str]:
        """The sums of which it knows what it owes to which neighbour."""
        return {entry.field for entry in self._ledger.sums.values()}

    def meet(self, everyone: Everyone) -> bool:
        """After `load`, on all ranks together: where the ends of a lost link differ, copies begin anew everywhere.

        What the two have added to each other's sums is taken out where only one of them had done so. If no rank has a
        ledger with its state, they make one. Returns whether copies begin anew.
        """
        known, rank, ledger = self.links.membership, self.links.rank, self._ledger
        # Only on undirected graphs both add to the other's sums in the same rounds.
        last = ledger.last if self.links.topology.symmetric else {}
        entered = torch.zeros(known.links, dtype=torch.int64)
        for node, t in last.items():
            entered[known.number(rank, node)] = t if rank < node else -t
        kept = torch.tensor([len(ledger.entries)])
        sums = everyone.summed(torch.cat([entered, self._mail.checks(), kept]))
        ledger.take_out([node for node in last if sums[known.number(rank, node)]], self._fields)
        if ledger.sums and not sums[-1]:
            ledger.make_up(self._fields, self.links, self.rounds)
        differ = bool(sums[known.links : -1].any())
        if differ:
            self._mail.load({})
        return differ

    @torch.no_grad()
    def write(self, point: Callable[[State], Tensor], into: Tensor) -> None:
        """Write a point of the state into a vector, in the same slices and so the same bits as a round."""
        for block in self._blocks:
            self._work_on("point", block, partial(_put, point, self._part(block, into)))

    def keep_also(self, rule: Rule) -> None:
        """Add the fields that the rule needs with other options, such as a momentum, with their initial values."""
        for name, value in rule.init(self.rule.query(self.state)).items():
            if name not in self._fields:
                self._fields[name] = value.clone()

    def balance(self) -> None:
        """Before a round: learn what is missing in sums of flows, such as D2's y, if a rank has left with its part.

        All nodes on the same links do this before any of them exchanges messages.
        """
        t = self.rounds + 1
        if self._balances and self.links.membership.heard_out(t):
            for name in sorted({entry.field for entry in self.rehearsal.sums}):
                with assembled(self.links, self.rounds, name, leavers=True) as everyone:
                    own = self._fields[name].cpu()
                    self._excess[name] = everyone.mean(own.reshape(-1)).view_as(own)

    def exchange(self, given: Inputs, arrived: Receiver | None = None) -> None:
        """The first half of a round: send and receive messages. If a neighbour fails, the state is unchanged.

        Kernels also compute the new state, beside the old one.
        """
        t, mail = self.rounds + 1, self._mail
        if not self._begun:
            self._begin(t)
        mail.heard, self.moved, self._formulas = {}, False, kernels.Formulas()
        self._following = self._fields | mail.early_fields(t + 1)
        beside = self._fuses and self._levels.get("state") != 0
        alone = {name: v for name, v in self._fields.items() if beside and v is self._following[name]}
        self._spare = {n: self._spare[n] if n in self._spare else torch.empty_like(v) for n, v in alone.items()}
        self._following |= self._spare
        if mail.late:
            mail.listen(t - mail.late)
            if self._speaks(t):
                for k in range(len(self._traffic.messages)):
                    mail.wait_until_sent(t, k)
            return
        for k, sent in enumerate(self._traffic.messages):
            if sent.call is None:  # it travels early
                continue
            mail.listen(t, sent.needs)
            mail.wait_until_sent(t, k)
            if self._speaks(t):  # otherwise nobody waits for it
                self._checked(partial(self._compute_message, k, t, given))
                mail.send(t, k)
        mail.listen(t)
        if self._traffic.early:
            mail.wait_until_sent(t, 0)
        if mail.defers:
            self._checked(partial(self._move, t, given, arrived))

    def advance(self, given: Inputs, arrived: Receiver | None = None, last: bool = False) -> None:
        """The second half: compute the new state, pass its slices to `arrived`, and begin the next round, if any."""
        t, mail = self.rounds + 1, self._mail
        mail.commit(t - mail.late, self._blocks)
        if not self.moved:
            self._move(t, given, arrived)
        if self._output is not None:
            apart = mail.apart(t - mail.late, self._output.message, self._output.part)
            self.apart = self.apart if apart is None else apart
        self._spare |= {name: v for name, v in self._fields.items() if self._spare.get(name) is self._following[name]}
        self._fields, self.rounds, self.moved = self._following, t, False
        self._formulas = kernels.Formulas()
        self._ledger.take_out(self.links.absent(t), self._fields)  # neighbours saw the state before
        for name, mean in self._excess.items():
            self._fields[name].sub_(mean.to(self._fields[name]))
        self._excess = {}
        if mail.late and self._speaks(t):
            mail.dispatch(t)
        if last:
            self.land()  # the links can be used again
        else:
            self._begin(t + 1)

    def land(self) -> None:
        """Wait for what is on its way, and forget it: no rank ends while messages to it still travel."""
        self._mail.land()

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self, t: int) -> None:
        """Prepare to receive all messages of round t, and send those that need no gradient."""
        mail = self._mail
        if mail.late:
            if not self._begun:
                mail.dispatch()
        else:
            mail.expect(t)
            if self._traffic.early:
                if not mail.shares_memory and self._speaks(t):
                    self._put_fields(0, t)
                mail.send(t, 0)
        self._begun = True

    def _put_fields(self, k: int, t: int) -> None:
        """Write the fields that travel untouched into message k."""
        fields = self._traffic.messages[k].fields
        first = len(self._traffic.messages[k].shapes) - len(fields)
        for n, name in enumerate(fields, first):
            for block in self._blocks if self._mail.where(k, n, self._blocks[0]) is not None else [None]:
                self._mail.put(t, k, n, block, self._part(block, self._fields[name]))

    def _compute_message(self, k: int, t: int, given: Inputs) -> None:
        """Fill message k: run the update up to the call of `flow` whose tensors it carries.

        On symbols it runs to its end, and fields that are known by then are written.
        """
        sent = self._traffic.messages[k]

        def fill(block: Block, symbol: Symbols, old: State) -> None:
            rule, grad, lr = given(block, symbol)
            try:
                new = rule.update(old, grad, self._flow(t, block, old, stop=sent.call), t, lr)
            except _Reached:
                return
            if self._calls != len(self._traffic.calls):
                raise self._other_calls()
            for name, value in new.items():
                is_new = isinstance(value, Symbol) and value.known not in (None, _known(old[name]))
                if is_new and name in self._spare and self._is_wide(self._fields[name]):
                    self._part(block, self._following[name]).copy_(value)

        for block in self._blocks:
            self._work_on("message", block, partial(fill, block))
        self._put_fields(k, t)

    def _move(self, t: int, given: Inputs, arrived: Receiver | None) -> None:
        """Compute the new state, and pass its slices to `arrived`."""
        following, single, same = self._following, dict[str, Tensor](), set[str]()

        def move(block: Block, symbol: Symbols, old: State) -> None:
            rule, grad, lr = given(block, symbol)
            new = _apart(old, rule.update(old, grad, self._flow(t, block, old), t, lr))
            wide = {name for name in new if block is None or following[name].shape[-1] == self._wide}
            new |= {name: symbol(new[name]) for name in wide}
            if self._calls != len(self._traffic.calls):
                raise self._other_calls()
            for name, value in new.items():
                if isinstance(value, Symbol) and name in self._spare and value.known == _known(old[name]):
                    same.add(name)
                elif name in wide or isinstance(value, Symbol):
                    self._part(block, following[name]).copy_(value)
                else:  # the same for all slices, and the next ones still read it
                    single[name] = value
            if arrived is not None:
                arrived(block, new, rule)

        for block in self._blocks:
            self._work_on("state", block, partial(move, block))
        for name, value in single.items():
            following[name].copy_(value)
        self._following |= {name: self._fields[name] for name in same}
        self.moved = True

    def _checked(self, compute: Callable[[], None]) -> None:
        """Compute; and again without the neighbours of which that shows that they have sent what is not finite."""
        compute()
        while self._mail.defers and self._formulas.refused() and self._mail.examine(self.rounds + 1):
            compute()

    def _work_on(self, kind: str, block: Block, work: Work) -> None:
        """Work on a slice of the state: in one kernel on a GPU, if that is possible.

        By level, symbols stand for all fields (2), for all but single numbers (1), or for none.
        """
        old = each(partial(self._part, block), self._fields)
        while self._fuses and (level := self._levels.get(kind, 2)):
            script = kernels.Script(self._formulas if kind != "point" else None)
            known = {name for name, v in self._fields.items() if level == 2 or self._is_wide(v)}
            try:
                work(script.symbol, {name: script.symbol(v) if name in known else v for name, v in old.items()})
                return script.run()
            except Exception:  # nothing was computed: a rule of one's own may do anything to symbols
                self._levels[kind] = 0 if all(map(self._is_wide, self._fields.values())) else level - 1
        if self._mail.defers and kind != "point":
            self._mail.defers = False
            self._mail.examine(self.rounds + 1)
        work(lambda v: v.to(self._dtype), old)

    def _flow(self, t: int, block: Block, old: State, stop: int | None = None) -> Flow:
        """The rule's `flow` for one slice; it raises _Reached at call number `stop`."""
        self._calls = 0
        mail = self._mail
        writes, written = mail.late > 0 and self._speaks(t), set[tuple[int, int]]()

        def exchanged(mixed: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
            c, self._calls = self._calls, self._calls + 1
            if c >= len(self._traffic.calls):
                raise self._other_calls()
            traced = any(isinstance(v, Symbol) for v in tensors)
            if c == stop:
                for tensor, (k, part, field) in zip(tensors, self._traffic.calls[c], strict=True):
                    if field is None:
                        mail.put(t, k, part, block, tensor)
                if not traced:
                    raise _Reached
            results = []
            for n, (tensor, (k, part, field)) in enumerate(zip(tensors, self._traffic.calls[c], strict=True)):
                if field is not None and tensor is not old[field]:
                    raise self._other_calls()
                if writes and (k, part) not in written:
                    mail.put(t, k, part, block, tensor)
                    written.add((k, part))
                if (heard := mail.heard.get(k)) is not None:
                    where = mail.where(k, part, block)
                    results.append(heard.pull(tensor, part, where, mixed))
                    if stop is None and (c, n) in self._ledger.sums:
                        self._ledger.enter(t, c, n, where, heard.shares(tensor, part, where))
                elif mail.late and not mixed:  # nothing arrives in this round
                    results.append(torch.zeros_like(tensor))
                elif stop is not None and traced:  # not known yet
                    results.append(Symbol(tensor.tracer, None))  # type: ignore
                else:
                    results.append(tensor)
            return tuple(results)

        return Flow(partial(exchanged, False), partial(exchanged, True), not self._speaks(t))

    def _part(self, block: Block, v: Tensor) -> Tensor:
        return v if block is None or not self._is_wide(v) else v[block]

    def _is_wide(self, v: Tensor) -> bool:
        return v.shape[-1] == self._wide

    def _other_calls(self) -> ValueError:
        return ValueError(
            f"{self.rule.name} does not call flow the same way in every round; neighbours must know what to wait for"
        )


def _blocks(x: Tensor, cuts: bool) -> list[Block]:
    """Slices of a plain vector, or one of all of it; any other tensor stays whole."""
    if x.ndim != 1:
        return [None]
    size = BLOCK.get(x.device.type, BLOCK["cuda"]) if cuts else max(len(x), 1)
    return [slice(k, min(k + size, len(x))) for k in range(0, max(len(x), 1), size)]


def _put(point: Callable[[State], Tensor], place: Tensor, symbol: Callable[[Tensor], Tensor], state: State) -> None:
    place.copy_(symbol(point(state)))


def _known(v: Tensor) -> object:
    return v.known if isinstance(v, Symbol) else None


def _apart(old: State, new: State) -> State:
    """The new state, with copies of fields that are other fields of the old one: those will be overwritten."""
    owners = {v.data_ptr(): name for name, v in old.items() if isinstance(v, Tensor)}  # kernels read before they write
    others = {name: v for name, v in new.items() if isinstance(v, Tensor) and owners.get(v.data_ptr(), name) != name}
    return new | each(torch.clone, others)
