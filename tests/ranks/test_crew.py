"""Crews of real processes that train nothing: joins, leaves, deaths, and what a registry lives through."""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore

from klatsch.files import token_of
from klatsch.ranks import registry
from klatsch.ranks.crew import Crew, Dropped
from klatsch.ranks.registry import PROTOCOL, Coordinator, Line, Registry, address_of, ask, framed, proof
from tests.support.waiting import HANG, wait_until

MODULE = "tests.support.rank_crews"


class Town:
    """A registry, and members that write what they see to files."""

    def __init__(self, prepared, folder):
        self.prepared, self.folder, self.members = prepared, folder, []
        self.port, self.token_file = prepared.free_port(), folder / "token"
        self.where = f"127.0.0.1:{self.port}"

    def serve(self, *options, port=None, timeout=30):
        words = ("--host", "127.0.0.1", "--port", port or self.port, "--token-file", self.token_file)
        self.registry = self.prepared.klatsch("crew", "serve", *words, "--timeout", timeout, *options)
        wait_until(lambda: "klatsch crew join" in self.registry.stdout, self.registry)
        self.token = token_of(self.token_file)
        return self.registry

    def member(self, where=None, token=None, **options):
        log = self.folder / f"member-{len(self.members)}"
        words = (log, where or self.where, token or self.token.decode(), json.dumps(options))
        process = self.prepared.python("-m", MODULE, *words, preload=(MODULE,))
        member = Life(log, process)
        self.members.append(member)
        return member

    def status(self, where=None):
        return ask([address_of(where or self.where)], self.token, {"op": "status"})

    def crew(self, size, *options, **more):
        """A crew whose first epoch has so many members."""
        self.serve("--least", size, *options, timeout=more.pop("timeout", 30))
        members = [self.member(**more) for _ in range(size)]
        for member in members:
            member.sees(size)
        return members


class Life:
    """A member's process, and what it has seen."""

    def __init__(self, log, process):
        self.log, self.process, self.pid = log, process, process.pid
        self._seen, self._read = [], 0

    def events(self):
        if self.log.exists():
            with self.log.open() as log:
                log.seek(self._read)  # all of it, every time, would take longer and longer
                lines = log.read()
            self._seen += map(json.loads, lines.splitlines())
            self._read += len(lines)
        return self._seen

    def of(self, name):
        return [event[name] for event in self.events() if name in event]

    def wait(self, name):
        """The last event with a name, once there is one."""
        return wait_until(lambda: self.of(name), self.process)[-1]

    @property
    def id(self):
        return self.wait("joined")

    def sees(self, size):
        """Wait until it trains in an epoch of so many members."""

        def arrived():
            events = self.events()
            known = [k for k, event in enumerate(events) if "epoch" in event]
            if known and len(events[known[-1]]["epoch"][1]) == size and "round" in events[-1]:
                return events[known[-1]]["epoch"]
            return None

        return wait_until(arrived, self.process)

    def trains_on(self):
        """Wait for a few more rounds."""
        last = max(self.of("round"), default=0)
        wait_until(lambda: max(self.of("round"), default=0) > last + 5, self.process)


@pytest.fixture
def town(prepared, tmp_path):
    return Town(prepared, tmp_path)


def consistent(members):
    """All that saw an epoch saw the same, one after the other, and from the same round on."""
    seen = {}
    for member in members:
        numbers = [epoch[0] for epoch in member.of("epoch")]
        assert numbers == sorted(set(numbers))
        for epoch in member.of("epoch"):
            assert seen.setdefault(epoch[0], epoch) == epoch
        for event in member.events():
            if "epoch" in event and "joined" not in event:
                assert event["round"] == event["epoch"][3]
    return seen


def test_members_join_leave_and_die(town):
    first = town.crew(3)
    assert {member.wait("address") for member in first} == {"127.0.0.1"}
    late = town.member()
    number, members, newcomers, start = late.sees(4)
    assert (number, newcomers, members[-1]) == (2, [late.id], late.id)
    for member in first:
        assert member.sees(4) == [number, members, newcomers, start]
    os.kill(first[0].pid, signal.SIGTERM)  # asks to leave
    assert first[0].process.done().returncode == 0
    assert first[0].of("left") == [late.sees(3)[3]]
    first[1].process.kill()
    epoch = late.sees(2)
    assert epoch[1] == [m.id for m in (first[2], late)] or sorted(epoch[1]) == sorted([first[2].id, late.id])
    assert first[2].sees(2) == epoch
    consistent([*first, late])
    told = town.status()
    assert {row["member"] for row in told["members"]} == {first[2].id, late.id}
    assert all(row["loss"] > 0 and row["state"] == "trains" for row in told["members"])


def test_members_meet_over_the_crews_store(town):
    """ProcessGroupGloo takes it: edges of two, made anew in every epoch."""
    members = town.crew(2, edges=True)
    members.append(town.member(edges=True))
    for member in members:
        member.sees(3)
        member.trains_on()
    members[0].process.kill()
    for member in members[1:]:
        member.sees(2)
        member.trains_on()
    consistent(members)


def test_two_die_at_once_and_one_joins(town):
    members = town.crew(4)
    members[1].process.kill()
    members[2].process.kill()
    late = town.member()
    for member in (members[0], members[3], late):
        epoch = member.sees(3)
        member.trains_on()
    assert epoch[1] == [members[0].id, members[3].id, late.id] or set(epoch[1]) == {
        members[0].id,
        members[3].id,
        late.id,
    }
    consistent([*members, late])


def test_one_that_was_stopped_finds_itself_out_and_joins_again(town):
    members = town.crew(3, timeout=20)
    before = members[1].id
    os.kill(members[1].pid, signal.SIGSTOP)
    members[0].sees(2)
    os.kill(members[1].pid, signal.SIGCONT)
    assert "goes on without it" in members[1].wait("dropped")
    epoch = members[1].sees(3)
    assert members[1].id != before
    assert epoch[2] == [members[1].id]
    assert members[0].sees(3) == epoch


def test_a_new_registry_adopts_the_crew(town):
    members = town.crew(3)
    town.registry.kill()
    town.registry.done()
    for member in members:
        member.trains_on()  # without it
    town.serve()
    late = town.member()
    epoch = late.sees(4)
    assert epoch[0] == 2
    assert epoch[2] == [late.id]
    for member in members:
        assert member.sees(4) == epoch
    consistent([*members, late])


def test_one_that_leaves_without_a_registry_goes_at_once(town):
    members = town.crew(2)
    town.registry.kill()
    wait_until(lambda: members[0].of("lost"), members[0].process)
    os.kill(members[0].pid, signal.SIGTERM)
    assert members[0].process.done().returncode == 0
    assert members[0].of("left")
    members[1].trains_on()


@pytest.mark.parametrize("registry", ["is there", "is gone"])
def test_one_that_leaves_before_it_was_let_in(town, registry):
    town.serve("--least", 2)
    member = town.member()
    wait_until(lambda: town.status()["members"], member.process)
    assert town.status()["waits_for"] == "1 of 2 members are there"
    if registry == "is gone":
        town.registry.kill()
        town.registry.done()
    os.kill(member.pid, signal.SIGTERM)
    assert member.process.done().returncode == 0
    assert "it left before it was let in" in member.of("error")[0]
    if registry == "is there":
        assert town.status()["members"] == []


def test_a_registry_that_dies_while_a_change_is_agreed_on(monkeypatch):
    """A member keeps its promise for a while, as the change may have been agreed on, and then goes on without it."""
    monkeypatch.setattr("klatsch.ranks.crew.PATIENCE", HANG)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def begin_a_change():
            with server.accept()[0] as end:
                file = end.makefile("rb")

                def message():
                    return json.loads(file.read(int.from_bytes(file.read(4), "big")))

                end.sendall(framed({"crew": PROTOCOL, "nonce": "n"}))
                nonces = "n", message()["nonce"]
                end.sendall(framed({"proof": proof(b"", "registry", nonces), "timeout": 60.0, "quorum": 0.5}))
                while (told := message())["op"] != "join":
                    pass
                end.sendall(framed({"op": "epoch", "epoch": (1, (told["member"],), (), 1)}))
                end.sendall(framed({"op": "propose", "ballot": 1}))
                while (told := message())["op"] != "begun":
                    pass
                file.close()
                server.close()
                return told

        with ThreadPoolExecutor() as pool:
            registry = pool.submit(begin_a_change)
            crew = Crew("{}:{}".format(*server.getsockname()))
            assert crew.join({}).start == 1
            wait_until(lambda: crew._proposal)  # it came while the first change was being made
            assert not crew.expects_change(0.0)
            assert registry.result() == {"op": "begun", "ballot": 1, "round": 0}
            assert [crew.before(t) for t in (1, 2)] == [None, None]
            third = pool.submit(crew.before, 3)
            wait_until(lambda: crew.alone)
            assert not third.done()
            monkeypatch.setattr("klatsch.ranks.crew.PATIENCE", 0.0)
            assert third.result() is None
        crew.close()


def test_a_registry_at_another_address_takes_over(town):
    other = town.prepared.free_port()
    both = f"{town.where},127.0.0.1:{other}"
    members = town.crew(2, where=both)
    town.registry.kill()
    town.serve(port=other)
    late = town.member(where=both)
    assert late.sees(3)[0] == 2
    for member in members:
        member.sees(3)


def test_who_asks_two_registries_to_join_again_has_given_up_its_place(town):
    """Most of a crew wait to join once more, and one has trained on, while registries come and go."""
    town.serve("--least", 3)
    trains, *wait = crews = [Crew(town.where, town.token) for _ in range(3)]

    def until_it_changes():
        return next(epoch for epoch in map(trains.before, itertools.count(1)) if epoch)

    with ThreadPoolExecutor() as pool:
        assert {epoch.number for epoch in pool.map(lambda crew: crew.join({"rule": "dsgd"}), crews)} == {1}
        town.registry.kill()
        town.registry.done()
        asked = [pool.submit(crew.join, {"rule": "dsgd"}, 7) for crew in wait]
        for _ in range(2):  # the one that trains does not answer yet
            town.serve("--least", 3)
            wait_until(lambda: len(town.status()["members"]) == 5)
            town.registry.kill()
            town.registry.done()
        town.serve("--least", 3)
        wait_until(lambda: len(town.status()["members"]) == 5)
        assert pool.submit(until_it_changes).result(HANG).number == 2
        assert {one.result(HANG).number for one in asked} == {2}
    for crew in crews:
        crew.close()


def test_quorum_decides_who_goes_on(town):
    members = town.crew(5, timeout=20)
    for member in members[:3]:
        os.kill(member.pid, signal.SIGSTOP)
    wait_until(lambda: "quorum = 0.5 asks for more" in town.status()["waits_for"])
    assert "2 of 5 members are there" in town.status()["waits_for"]
    members[3].trains_on()  # what it does about it is the optimizer's
    os.kill(members[0].pid, signal.SIGCONT)  # it returns, as the epoch still has it
    for member in (members[0], *members[3:]):
        assert member.sees(3)[0] == 2
    for member in members[1:3]:
        os.kill(member.pid, signal.SIGCONT)
    for member in members:
        member.sees(5)


def test_one_that_waits_long_says_what_for(town, monkeypatch):
    monkeypatch.setattr("klatsch.ranks.crew.SILENCE", 0.1)
    town.serve("--least", 2)
    crews = [Crew(town.where, town.token) for _ in range(2)]
    with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor() as pool:
        warnings.simplefilter("always")
        first = pool.submit(crews[0].join, {"rule": "dsgd"})
        wait_until(lambda: told)
        assert crews[1].join({"rule": "dsgd"}) == first.result()
    assert "still waiting to join the crew" in str(told[0].message)
    assert "the registry waits" in str(told[0].message)
    for crew in crews:
        crew.close()


def test_wrong_facts_are_refused_by_name(town):
    members = town.crew(2)
    wrong = town.member(facts={"rule": "dat", "dtype": "float32"})
    text = "this member's rule is dat, the crew's dsgd; make them the same"
    assert wrong.process.done().returncode == 0
    assert wrong.of("error") == [text]
    more = town.member(facts={"dtype": "float32"})
    more.process.done()
    assert more.of("error") == ["this member's dtype is float32, the crew's nothing; make them the same"]
    long = town.member(facts={"rule": "x" * 30_000})
    long.process.done()
    assert re.fullmatch(r"this member's rule is x{140}\.\.\. \(\w{16}\), the crew's dsgd; .*", long.of("error")[0])
    for member in members:
        member.trains_on()
        assert len(member.of("epoch")) == 1  # it did not notice


def test_a_wrong_token_is_refused(town):
    town.serve()
    wrong = town.member(token="x" * 64)
    done = wrong.process.done()
    assert done.returncode == 1
    assert f"the registry at {town.where} is not ours: its token is another one" in done.stderr
    assert not town.status()["members"]


def test_a_member_is_dropped(town, run_cli):
    members = town.crew(3)
    options = (town.where, "--token-file", town.token_file)
    code, _, err = run_cli("crew", "drop", "nobody", *options)
    assert code == 2
    assert "there is no member 'nobody'; there are" in err
    code, _, err = run_cli("crew", "drop", "", *options)
    assert (code, "there is no member ''; there are" in err) == (2, True)
    code, out, _ = run_cli("crew", "drop", members[1].id[:7], *options)  # which is enough
    assert code == 0
    assert out == f"{members[1].id[:7]} was dropped\n"
    assert "dropped by klatsch crew drop" in members[1].wait("dropped")
    assert members[1].process.done().returncode == 0
    assert members[0].sees(2)[1] == sorted([members[0].id, members[2].id], key=members[0].of("epoch")[0][1].index)


def test_those_who_have_done_most_rounds_go_on(town):
    """A crew that starts from checkpoints: the others are newcomers."""
    town.serve("--least", 3)
    members = [town.member(rounds=rounds) for rounds in (40, 7, 40)]
    for member in members:
        epoch = member.sees(3)
    assert epoch[2:] == [[members[1].id], 41]
    assert epoch[1][-1] == members[1].id  # newcomers are last


def test_a_registry_that_was_stopped_itself_blames_nobody(town):
    members = town.crew(3, timeout=5)
    os.kill(town.registry.pid, signal.SIGSTOP)
    for member in members:
        member.trains_on()
    wait_until(lambda: all(member.of("lost") for member in members))
    os.kill(town.registry.pid, signal.SIGCONT)
    late = town.member()
    epoch = late.sees(4)
    assert epoch[0] == 2
    for member in members:
        assert member.sees(4) == epoch


# --- strangers --------------------------------------------------------------------------------------------------------


def frame(body, size=None):
    return (len(body) if size is None else size).to_bytes(4, "big") + body


def reach(town):
    return socket.create_connection(("127.0.0.1", town.port))


GARBAGE = {
    "nothing": b"",
    "half a head": b"\0\0",
    "half a message": frame(b"{}", 100),
    "a huge message": frame(b"x" * 1000, (1 << 32) - 1),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no object": frame(b"[1, 2]"),
    "no text": frame(b"\xff\xfe"),
    "nesting": frame(b"[" * 500),
    "no proof": frame(b'{"nonce": "a"}'),
    "a proof that is none": frame(b'{"nonce": "a", "proof": "\\ud800"}'),
    "another proof": frame(b'{"nonce": 1e999, "proof": [null, 1]}'),
    "a message without a proof": frame(b'{"op": "status", "id": 0}'),
}


def test_strangers_do_not_disturb_a_crew(town):
    """Garbage, half messages, and more silent connections than are let wait: members train on, and others join."""
    members = town.crew(2)
    draw = random.Random(1)
    for data in (*GARBAGE.values(), *(draw.randbytes(draw.randrange(1, 600)) for _ in range(200))):
        with reach(town) as end, suppress(ConnectionError):
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)
            while answer := end.recv(1 << 12):
                assert b"proof" not in answer
    with ExitStack() as silent:
        for k in range(400):  # they neither speak nor go
            end = silent.enter_context(reach(town))
            with suppress(ConnectionError):
                end.sendall(list(GARBAGE.values())[k % 3])
        late = town.member()
        epoch = late.sees(3)
        assert epoch[0] == 2
        for member in members:
            assert member.sees(3) == epoch
    assert town.registry.poll() is None
    assert town.registry.stderr == ""


def test_strangers_that_wait_are_few(monkeypatch):
    """The first of them goes when there are too many, however patient the registry is."""
    monkeypatch.setattr(registry, "PATIENCE", HANG)

    async def crowd():
        address = asyncio.get_running_loop().create_future()
        server = Registry(b"", Coordinator())
        serving = asyncio.create_task(server.serve("127.0.0.1", 0, lambda *where: address.set_result(where)))
        ends = [await asyncio.open_connection(*await address) for _ in range(registry.STRANGERS + 1)]
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                await ends[0][0].read()
        for _, writer in ends:
            writer.close()
        serving.cancel()

    asyncio.run(crowd())


def test_what_was_proved_once_proves_nothing_again(town):
    """Another connection has another nonce."""
    town.serve()
    with reach(town) as first, reach(town) as second:
        nonces = [json.loads(end.recv(1 << 12)[4:])["nonce"] for end in (first, second)]
        assert nonces[0] != nonces[1]
        answer = {"nonce": "a", "proof": proof(town.token, "member", (nonces[0], "a"))}
        first.sendall(framed(answer))
        assert b"proof" in first.recv(1 << 12)
        second.sendall(framed(answer))
        assert b"refused" in second.recv(1 << 12)


def test_members_take_the_quorum_of_their_registry(town):
    town.serve("--least", 1, "--quorum", 0)
    crew = Crew(town.where, town.token)
    crew.join({"rule": "dsgd"})
    assert crew.quorum == 0.0
    town.registry.kill()
    town.registry.done()
    town.serve("--quorum", 0.7)
    wait_until(lambda: crew.quorum == 0.7)
    crew.close()


def test_a_false_registry_is_not_believed(town):
    """One that does not know the token cannot prove that it is the registry; nor can it send back a member's proof."""
    town.serve()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            with server.accept()[0] as end:
                end.sendall(framed({"crew": PROTOCOL, "nonce": "n"}))
                told = json.loads(end.recv(1 << 12)[4:])
                end.sendall(framed({"proof": told["proof"], "timeout": 1.0}))

        false = threading.Thread(target=pretend)
        false.start()
        with pytest.raises(ValueError, match="is not ours: its token is another one"):
            Crew(f"127.0.0.1:{server.getsockname()[1]}", town.token)
        false.join()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "join"},
        {"op": "join", "member": "a", "host": "h", "facts": {}, "rounds": "many"},
        {"op": "return", "member": "a", "host": "h", "facts": {}, "epoch": [1, 2], "bound": 3},
        {"op": "return", "member": "a", "host": "h", "facts": {}, "epoch": ["x", [], [], {}], "bound": 3},
        {"op": "keys", "do": "set", "id": 1, "key": 3, "value": 4},
        {"op": "keys", "do": "add", "id": 1e999, "key": "a", "value": 1},
        {"op": "keys"},
        {"op": [{}]},
        {"op": "status"},
    ],
)
def test_a_member_that_sends_nonsense_is_shut_out(message, town):
    town.serve()
    line = Line(("127.0.0.1", town.port), town.token, 60)
    with line.socket:
        line.send(message)
        with suppress(ConnectionError):
            while True:
                line.receive()
    wait_until(lambda: "was closed" in town.registry.stdout, town.registry)
    assert town.status()["epoch"] == 0


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(town):
    """Two members in this process."""
    town.serve("--least", 2)
    crews = [Crew(town.where, town.token) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        assert len({*pool.map(lambda crew: crew.join({"rule": "dsgd"}), crews)}) == 1
    yield crews
    for crew in crews:
        crew.close()


def test_the_store_does_what_torchs_do(pair):
    one, two = (PrefixStore("some", crew.store) for crew in pair)
    value = bytes(range(256))
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(two.get, "a")
        one.set("a", value)
        assert waits.result() == value
    assert one.check(["a"])
    assert not one.check(["a", "b"])
    assert [two.add("n", 5), one.add("n", -2)] == [5, 3]
    with pytest.raises(RuntimeError, match=r"some/b: no answer within 0\.01 s"):
        one.wait(["b"], timedelta(seconds=0.01))


def test_waiting_for_the_key_of_one_that_is_gone_ends(pair):
    one, two = pair
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(one.store.wait, [f"edge/1/{one.member}-{two.member}/0/1"], timedelta(seconds=60))
        two.close()
        with pytest.raises(RuntimeError, match=f"{two.member} is out of the crew"):
            waits.result()


def test_without_a_registry_nothing_is_waited_for(pair, town):
    one, _ = pair
    town.registry.kill()
    with pytest.raises(RuntimeError, match="the registry is gone"):
        one.store.wait(["a"], timedelta(seconds=600))
    with pytest.raises(RuntimeError, match="the registry is gone"):
        one.store.set("a", "b")


def test_one_that_gives_up_without_a_registry_tells_the_next_one_who_it_was(pair, town, monkeypatch):
    """It asks to join while nobody hears it, and again once somebody does; else its place would have to time out."""
    one, two = pair
    before, sent, send = one.member, [], Line.send
    town.registry.kill()
    two.close()
    wait_until(lambda: one.alone)
    monkeypatch.setattr(Line, "send", lambda line, message: [sent.append(message), send(line, message)])
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(one.join, {"rule": "dsgd"}, 7)
        wait_until(lambda: one.member != before)
        town.serve("--least", 1)
        assert joined.result().members == (one.member,)
    assert [message["formers"][0] for message in sent if message.get("op") == "join"] == [before]


def test_one_that_leaves_while_it_waits_to_join_again_is_not_let_in(pair, town):
    one, two = pair
    two.close()
    town.registry.kill()
    wait_until(lambda: one.alone)
    with ThreadPoolExecutor() as pool:
        before = one.member
        joined = pool.submit(one.join, {"rule": "dsgd"})
        wait_until(lambda: one.member != before)
        one.leave()
        with pytest.raises(Dropped, match="it left before it was let in"):
            joined.result()
        town.serve("--least", 2)
        wait_until(lambda: not one.alone)
        with pytest.raises(Dropped, match="it left before it was let in"):
            one.join({"rule": "dsgd"})


def test_a_proposal_does_not_outlive_its_connection(pair, town):
    """An answer that came before the next registry's welcome would be a promise that the welcome ends."""
    one, _ = pair
    town.member()
    wait_until(lambda: one._proposal)  # which waits until its first round is begun
    town.registry.kill()
    wait_until(lambda: one.alone)
    assert one._proposal is None


def test_keys_do_not_outlive_their_epochs(pair, town):
    one, _ = pair
    one.store.set("old", b"x")
    end = threading.Event()

    def train(crew):  # there is one change at a time, once the last one is made
        for t in itertools.count(1):
            crew.before(t)
            if end.wait(0.005):
                return

    with ThreadPoolExecutor() as pool:
        for crew in pair:
            pool.submit(train, crew)
        for size in (3, 4, 5):
            town.member()
            wait_until(lambda size=size: len(town.status()["members"]) == size and not town.status()["waits_for"])
        wait_until(lambda: not one.store.check(["old"]))
        end.set()
