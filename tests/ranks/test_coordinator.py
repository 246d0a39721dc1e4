"""How a crew agrees on its changes: random schedules of events, without sockets or clocks."""

import itertools
import json
import random
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klatsch.ranks.crew import Calendar
from klatsch.ranks.registry import Coordinator, Epoch

FACTS = {"rule": "dsgd"}


class Wire(SimpleNamespace):
    """A connection in memory: messages wait in it, both ways, until they are delivered."""

    def __init__(self, owner):
        super().__init__(member="", address="127.0.0.1", heard=0.0, owner=owner, down=deque(), up=deque(), closed=False)

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other

    def send(self, message):
        self.down.append(json.loads(json.dumps(message)))


class Node:
    """What a member's process does."""

    def __init__(self, world, name, rounds=0):
        self.world, self.name, self.rounds = world, name, rounds
        self.calendar, self.seen, self.dropped, self.left = Calendar(name), [], False, False
        self.stopped = self.leaving = False
        self.wire = Wire(self)
        join = {"op": "join", "member": name, "host": "h", "facts": FACTS, "rounds": rounds}
        self.wire.up.append(join)

    def train(self):
        """Begin the next round, if that is allowed."""
        calendar, t = self.calendar, self.calendar.begun + 1
        if calendar.epoch is None or self.dropped or self.left or t > calendar.bound:
            return
        if not self.seen:
            self.seen.append(calendar.epoch)
        if epoch := calendar.begin(t):
            self.seen.append(epoch)
            if self.name not in epoch.members:
                self.left = True
                return
        self.world.check_round(self, t)

    def hear(self, message):
        if message["op"] == "dropped":
            self.dropped = True
        elif answer := self.calendar.hear(message):
            self.wire.up.append(answer)

    def reconnect(self):
        """A new connection, after the old one broke."""
        self.wire = Wire(self)
        if self.calendar.newest is None:
            self.name = f"{self.name}x"  # it asks again, as somebody else
            self.calendar = Calendar(self.name)
            join = {"op": "join", "member": self.name, "host": "h", "facts": FACTS, "rounds": self.rounds}
            self.wire.up.append(join)
            return
        bound, known = self.calendar.promise(), self.calendar.newest
        message = {"op": "return", "member": self.name, "host": "h", "facts": FACTS, "epoch": list(known)}
        self.wire.up.append(message | {"bound": bound, "leaving": self.leaving})


class World:
    """Nodes, connections, a registry and time."""

    def __init__(self, **options):
        self.options, self.now, self.nodes, self.epochs, self.wires = options, 1.0, [], {}, []
        self.strict, self.numbers = True, itertools.count()
        self.new_registry()

    def new_registry(self):
        self.registry = Coordinator(timeout=4.0, settle=1.0, **self.options)
        make = self.registry._fix

        def fix(present, staying, waiting):
            make(present, staying, waiting)
            epoch = self.registry.epoch
            for node in self.nodes:  # nobody has begun it, of those that go on
                if node.name in epoch.members and node.name not in epoch.newcomers and node.calendar.epoch:
                    assert node.calendar.begun < epoch.start
            if self.strict:
                assert epoch.number not in self.epochs
            self.epochs[epoch.number] = epoch

        self.registry._fix = fix

    def check_round(self, node, t):
        """Whoever is in an epoch that has started is not training in an older one."""
        if not self.strict:
            return
        for epoch in self.epochs.values():
            if node.name in epoch.members and epoch.start <= t:
                assert node.calendar.epoch.number >= epoch.number, (node.name, t, epoch)
        assert node.calendar.epoch == self.epochs[node.calendar.epoch.number]

    def living(self):
        return [n for n in self.nodes if not n.dropped and not n.left]

    # events, each of one node
    def join(self, node):
        if len(self.living()) < 7:
            self.nodes.append(Node(self, f"n{next(self.numbers)}"))

    def kill(self, node):
        self.nodes.remove(node)
        self.lose(node)

    def cut(self, node):
        """The connection breaks, and another one is made; messages on their way to the registry may still arrive."""
        self.lose(node)
        self.wake(node)

    def lose(self, node):
        """The connection breaks, and there is no other for a while: it trains on, unless it has promised to wait."""
        if not node.wire.closed:
            node.wire.closed = True
            node.wire.down.clear()
            self.wires.append(node.wire)

    def part(self, node):
        """An edge breaks, and both ends live."""
        other = next((one for one in self.living() if one is not node), node)
        for one, two in ((node, other), (other, node)):
            if one.calendar.epoch and not one.wire.closed:
                report = {"epoch": one.calendar.epoch.number, "lost": [two.name]}
                one.wire.up.append({"op": "beat", "round": one.calendar.begun, "report": report})

    def stop(self, node):
        node.stopped = True

    def leave(self, node):
        node.leaving = True
        node.wire.up.append({"op": "leave"})

    def upwards(self, node):
        self.carry(next((wire for wire in self.wires if wire.owner is node), node.wire))
        for wire in self.wires[:1]:  # of one that is gone
            self.carry(wire)

    def carry(self, wire):
        if wire.up:
            self.registry.hear(wire, wire.up.popleft(), self.now)
        elif wire.closed and wire in self.wires:
            self.wires.remove(wire)
            self.registry.lost(wire, self.now)

    def downwards(self, node):
        if node.wire.down and not node.stopped and not node.wire.closed:
            node.hear(node.wire.down.popleft())

    def train(self, node):
        if not node.stopped:
            node.train()

    def pass_time(self, node):
        self.now += 0.6
        for other in list(self.nodes):
            if not other.stopped and not other.wire.closed:
                other.wire.heard = self.now  # by beats
            elif not other.wire.closed and self.now > other.wire.heard + 4.0:  # the registry closes it
                other.wire.closed = True
                self.registry.lost(other.wire, self.now)
                other.wire.down.clear()
                other.wire.up.clear()
        self.registry.step(self.now)

    def wake(self, node):
        """It goes on, and makes another connection if its own is closed."""
        node.stopped = False
        if node.wire.closed and not node.dropped and not node.left:
            node.reconnect()

    def restart(self):
        """The registry dies, and another one takes its place."""
        self.strict = False
        self.wires.clear()
        self.new_registry()
        for other in self.nodes:
            other.wire.closed = True
            other.wire.up.clear()
            other.wire.down.clear()
            if not other.stopped and not other.dropped and not other.left:
                other.reconnect()

    def settle(self, turns=30):
        """Nothing happens any more: all messages arrive, and time passes."""
        for node in list(self.nodes):
            self.wake(node)
        for _ in range(turns):
            self.pass_time(None)
            for wire in list(self.wires):
                while wire in self.wires:
                    self.carry(wire)
            for _ in range(4):
                for node in self.living():
                    while node.wire.up:
                        self.carry(node.wire)
                    while node.wire.down:
                        node.hear(node.wire.down.popleft())
            for node in self.living():
                node.train()


EVENTS = {  # and how often each happens
    "upwards": 50,
    "downwards": 50,
    "train": 60,
    "join": 6,
    "leave": 2,
    "kill": 3,
    "stop": 2,
    "wake": 6,
    "cut": 3,
    "lose": 3,
    "part": 3,
    "pass_time": 12,
}
seeds = st.integers(0, 1 << 32)


def run(world, draw, events):
    for name in draw.choices([*EVENTS], [*EVENTS.values()], k=events):
        if name in ("join", "pass_time") or world.nodes:
            getattr(world, name)(draw.choice(world.nodes) if world.nodes else None)


def crew_of(size, **options):
    """A crew in its first epoch."""
    world = World(**options)
    world.nodes += [Node(world, f"n{next(world.numbers)}") for _ in range(size)]
    world.settle(4)
    assert len(world.registry.epoch.members) == size
    return world


def check_end(world):
    """All that live are in one epoch, which is the registry's, and may train."""
    epoch = world.registry.epoch
    living = world.living()
    ids = {node.name for node in living}
    if living and set(epoch.members) != ids:
        # Only a lack of quorum keeps the crew from changing.
        assert "quorum" in world.registry.waits_for, (epoch, ids, world.registry.waits_for)
        return
    for node in living:
        assert node.calendar.newest == epoch
        assert node.calendar.bound > node.calendar.begun


@given(seeds)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_members_agree_on_every_change(seed):
    world = crew_of(3)
    run(world, random.Random(seed), 700)
    world.settle()
    for node in world.nodes:
        numbers = [epoch.number for epoch in node.seen]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else True
        assert all(epoch == world.epochs[epoch.number] for epoch in node.seen)
        assert all(one.start < two.start for one, two in zip(node.seen, node.seen[1:], strict=False))
    check_end(world)


@given(seeds)
@settings(max_examples=75, deadline=None, derandomize=True)
def test_a_new_registry_adopts_the_crew(seed):
    world, draw = crew_of(3), random.Random(seed)
    run(world, draw, 400)
    world.restart()
    run(world, draw, 400)
    world.settle()
    check_end(world)


def told(wire):
    """Who is out, by what a connection was told."""
    gone = set()
    while wire.down:
        message = wire.down.popleft()
        gone = (gone - {*message.get("epoch", ((), ()))[1]}) | {*message["gone"]}
    return gone


def test_ranks_beside_the_one_that_speaks_for_a_host_hear_who_is_out():
    world, beside, late = crew_of(4), Wire(None), Wire(None)
    world.registry.hear(beside, {"op": "listen"}, world.now)
    for dead in world.nodes[:2]:
        world.kill(dead)
        world.settle()
        assert dead.name in told(beside)
    assert not beside.down
    world.lose(world.nodes[0])
    for _ in range(20):
        world.upwards(world.nodes[0])
        world.pass_time(world.nodes[0])
    world.registry.hear(late, {"op": "listen"}, world.now)  # or come back, after it was told
    assert world.nodes[0].name in told(beside) & told(late)
    world.registry.lost(beside, world.now)
    world.kill(world.nodes[1])
    world.settle()
    assert not beside.down


def test_ranks_beside_it_hear_of_those_whom_another_registry_takes_back():
    registry, beside, epoch = Coordinator(), Wire(None), Epoch(4, ("a", "b"), (), 1)
    registry.hear(beside, {"op": "listen"}, 1.0)
    known = {"op": "return", "member": "a", "host": "h", "facts": FACTS, "epoch": [*epoch], "bound": 9}
    registry.hear(Wire(None), known, 1.0)
    assert [message["epoch"][1] for message in beside.down if "epoch" in message] == [["a", "b"]]


@pytest.mark.parametrize("bound, welcome", [(8, True), (9, True), (10, False)])
def test_one_that_missed_an_epoch_gets_it_unless_it_may_have_begun_it(bound, welcome):
    registry = Coordinator()
    wires = {name: Wire(None) for name in "ab"}
    old, new = Epoch(4, ("a", "b"), (), 1), Epoch(5, ("a", "b", "c"), ("c",), 10)
    for name, known in (("a", new), ("b", old)):
        told = {"op": "return", "member": name, "host": "h", "facts": FACTS, "epoch": [*known], "bound": bound}
        registry.hear(wires[name], told, 1.0)
    answer = wires["b"].down.popleft()
    assert answer["op"] == ("welcome" if welcome else "dropped")
    if welcome:
        calendar = Calendar("b")
        calendar.epoch = old
        calendar.hear(answer)
        assert calendar.coming == [new]


@pytest.mark.parametrize(
    "size, event, which, goes_on",
    [
        (5, "stop", (0, 1, 2), False),
        (5, "stop", (3, 4), True),
        (4, "stop", (0, 1), False),  # half of them, without the first
        (4, "stop", (2, 3), True),
        (8, "stop", (0, 1, 2), True),  # cut into 5 and 3
        (8, "stop", (0, 1, 2, 3, 4), False),
        (5, "kill", (0, 1, 2), True),  # they have ended, for all that one can know
    ],
)
def test_a_quorum_goes_on(size, event, which, goes_on):
    world = crew_of(size)
    for node in [world.nodes[k] for k in which]:
        getattr(world, event)(node)
    for _ in range(15):
        world.pass_time(None)
        for _ in range(4):
            for node in list(world.nodes):
                world.upwards(node)
                world.downwards(node)
    members = world.registry.epoch.members
    assert len(members) == (size - len(which) if goes_on else size)
    assert ("quorum" in world.registry.waits_for) != goes_on


@pytest.mark.parametrize("rounds, goes_on", [((7, 7, 6), True), ((7, 7), False), ((0, 0, 0), False)])
def test_a_majority_that_has_given_up_goes_on_from_what_it_holds(rounds, goes_on):
    """Their neighbours were out of reach, and one is silent: it may live, but it cannot go on by itself."""
    world = crew_of(5, least=5)
    *others, silent = world.nodes
    gone, here = others[: len(others) - len(rounds)], others[len(others) - len(rounds) :]
    world.stop(silent)
    for node in gone:
        world.stop(node)
    for node, done in zip(here, rounds, strict=True):
        join = {"op": "join", "member": f"{node.name}2", "formers": [node.name], "host": "h", "facts": FACTS}
        world.registry.hear(node.wire, join | {"rounds": done}, world.now)
    for _ in range(15):
        world.pass_time(None)
    epoch = world.registry.epoch
    if goes_on:
        assert epoch.start == 8
        assert epoch.members == tuple(f"{node.name}2" for node in here)
        assert epoch.newcomers == (f"{here[-1].name}2",)
    else:
        assert epoch.number == 1
        assert "quorum" in world.registry.waits_for


@pytest.mark.parametrize("others_left", [True, False])
def test_who_was_told_to_be_out_cannot_return_unless_the_registry_was_cut_off(others_left):
    world = crew_of(3)
    silent = world.nodes if not others_left else world.nodes[:1]
    for node in silent:
        world.registry.lost(node.wire, world.now + 3)  # not well before
    for quarters in range(40):
        now = world.now + 3 + quarters / 4
        world.registry.step(now)
    if others_left:  # they have not answered yet, so the epoch is the same
        assert {"op": "gone", "gone": [silent[0].name]} in world.nodes[1].wire.down
    for node in silent:
        node.reconnect()
        world.registry.hear(node.wire, node.wire.up.popleft(), now)
    assert {node.wire.down[0]["op"] for node in silent} == {"dropped" if others_left else "welcome"}
    assert world.registry.epoch.number == 1


@pytest.mark.parametrize("heard", ["beats", "nothing"])
def test_a_registry_that_was_paused_gives_those_who_had_to_leave_it_time_to_return(heard):
    """What they sent before they closed their connections waits in buffers: they have not ended."""
    world = crew_of(3)
    registry, here = world.registry, world.nodes[0]
    world.now += 60
    for node in world.nodes:
        if heard == "beats":
            node.wire.heard = world.now
            if node is not here:
                registry.hear(node.wire, {"op": "beat", "round": node.calendar.begun, "report": {}}, world.now)
        registry.lost(node.wire, world.now)
    here.reconnect()
    world.carry(here.wire)
    world.now += 1.2
    registry.step(world.now)
    for node in world.nodes[1:]:
        node.reconnect()
        world.carry(node.wire)
    world.settle(4)
    assert registry.epoch.number == 1
    assert not any(node.dropped for node in world.nodes)
    world.kill(here)  # long after the pause: it has ended
    world.settle(4)
    assert registry.epoch.number == 2


def test_an_answer_that_comes_after_its_sender_has_come_back_does_not_count():
    """It was on its way over the connection that broke; the promise in it was given up when the member was welcome."""
    world = crew_of(2)
    registry, (slow, other) = world.registry, world.nodes
    world.join(None)
    world.carry(world.nodes[-1].wire)
    for node in (slow, other):
        while node.wire.down:
            node.hear(node.wire.down.popleft())
    before = slow.wire
    slow.reconnect()
    world.carry(slow.wire)
    slow.hear(slow.wire.down.popleft())
    for _ in range(5):
        slow.train()
    world.carry(before)
    world.carry(other.wire)
    assert registry.epoch.number == 1
    slow.hear(slow.wire.down.popleft())
    world.carry(slow.wire)
    assert registry.epoch.number == 2
    assert registry.epoch.start > slow.calendar.begun


@pytest.mark.parametrize(
    "address, near", [("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False)]
)
def test_members_of_this_machine_alone_are_not_mixed_with_others(address, near):
    """A registry that listens on :: sees addresses of the older kind in another form."""
    registry, wires = Coordinator(), [Wire(None), Wire(None)]
    wires[1].address = address
    for k, wire in enumerate(wires):
        registry.hear(wire, {"op": "join", "member": f"m{k}", "host": "h", "facts": FACTS, "rounds": 0}, 1.0)
    assert [*registry.members] == ["m0", "m1"][: 1 + near]
    assert near or f"members at {address} cannot reach one at 127.0.0.1" in wires[1].down[0]["why"]


def test_one_that_leaves_learns_of_deaths_until_it_goes():
    world = crew_of(3)
    leaver, dead, other = world.nodes
    registry = world.registry
    registry.hear(leaver.wire, {"op": "leave"}, world.now)
    for node in world.nodes:
        registry.hear(node.wire, {"op": "begun", "ballot": registry._ballot, "round": 5}, world.now)
    assert leaver.name not in registry.epoch.members
    registry.lost(dead.wire, world.now)
    for seconds in (0.75, 1.5):
        registry.step(world.now + seconds)
    for node in (leaver, other):
        assert {"op": "gone", "gone": [dead.name]} in node.wire.down
    other.wire.down.clear()
    registry.lost(leaver.wire, world.now + 1)
    assert registry._parting == []
    assert {"op": "gone", "gone": [leaver.name]} not in other.wire.down  # it has gone, with all its messages


def test_others_learn_of_one_that_is_cut_off_in_its_last_rounds():
    """They wait for it until the epoch starts that it is not in."""
    world = crew_of(3)
    leaver, *others = world.nodes
    registry = world.registry
    registry.hear(leaver.wire, {"op": "leave"}, world.now)
    for node in world.nodes:
        registry.hear(node.wire, {"op": "begun", "ballot": registry._ballot, "round": 5}, world.now)
    assert leaver.name not in registry.epoch.members
    registry.lost(leaver.wire, world.now + registry.timeout)
    for node in others:
        assert {"op": "gone", "gone": [leaver.name]} in node.wire.down


def test_edges_between_living_members_are_made_anew_ever_more_rarely():
    """Where they cannot be made, the crew must not change all the time; whole for long, it forgets that."""
    world = crew_of(3)
    registry, (one, two, three), told = world.registry, world.nodes, []
    registry.tell = told.append

    def report(node, *lost):
        report = {"epoch": node.calendar.epoch.number, "lost": [other.name for other in lost]}
        registry.hear(node.wire, {"op": "beat", "round": node.calendar.begun, "report": report}, world.now)

    def pass_time(seconds):
        for _ in range(int(seconds / 0.7)):
            world.pass_time(None)
            for node in world.nodes:
                while node.wire.down:
                    node.hear(node.wire.down.popleft())
                while node.wire.up:
                    world.carry(node.wire)
                node.train()

    def breaks(seconds):
        """How long the crew took to begin other epochs, with an edge that cannot be made."""
        before, number, times, began = registry.epoch.members, registry.epoch.number, [], world.now
        while world.now < began + seconds:
            pass_time(0.7)
            if registry.epoch.number > number:
                number = registry.epoch.number
                times.append(world.now)
            for node, other in ((one, two), (two, one)):
                report(node, other)
        assert registry.epoch.members == before
        return [later - earlier for earlier, later in zip([began, *times], times, strict=False)]

    report(one, two)  # the other end may hang
    report(two, three)
    pass_time(100)
    assert (registry.epoch.number, registry.waits_for, told) == (1, "", [])
    report(two, one)
    assert told == [registry.waits_for] == ["n0 and n1 have lost each other, and connect anew in 2 s"]
    pass_time(10)
    assert registry.epoch.number == 2
    assert (told[1:], registry.waits_for) == ([f"epoch 2 from round {registry.epoch.start}: 3 members (new edges)"], "")
    assert all(node.calendar.epoch == registry.epoch for node in world.nodes)
    pass_time(100)  # what was said of the epoch before does not count
    assert registry.epoch.number == 2
    first, *more = breaks(3600)
    assert 8 < first < 12
    assert 32 < more[0] < 36
    assert 128 < more[1] < 132
    assert all(600 < seconds < 605 for seconds in more[3:])
    assert len(more) > 6
    for node in world.nodes:
        report(node)
    pass_time(700)
    assert breaks(5)[0] < 5
    registry.hear(
        one.wire, {"op": "beat", "round": 9, "report": {"epoch": registry.epoch.number, "lost": 7}}, world.now
    )  # nonsense
    registry.step(world.now)


def test_members_go_on_from_what_they_have_read_in_the_order_of_their_files():
    world = World(least=4)
    for _ in range(4):
        world.join(None)
    world.settle(4)
    first = {node.name: node for node in world.nodes}
    assert len(world.registry.epoch.members) == 4

    def read(name, rounds, place, epoch=1):
        told = {"op": "resume", "epoch": epoch, "rounds": rounds, "place": place}
        world.registry.hear(first[name].wire, told, world.now)

    read("n0", 40, 2)
    read("n1", 0, 0)
    read("n2", 40, 1)
    assert world.registry.waits_for == "3 of 4 members have looked for their checkpoints"
    world.join(None)  # it waits with them
    world.carry(world.nodes[-1].wire)
    assert world.registry.epoch.number == 1
    read("n3", 40, 0)
    assert world.registry.epoch == (2, ("n3", "n2", "n0", "n1", "n4"), ("n1", "n4"), 41)
    read("n3", 40, 0)  # what it said about the last epoch, once more, after its connection broke
    assert world.registry.waits_for == ""
