"""One stream of events: what ranks tell, where it goes, and what readers make of it."""

import json
import math
import os
import re
import signal
import sys
import time
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import klatsch
from klatsch.optim.watched import Diary
from klatsch.ranks.membership import Membership
from klatsch.watch.events import KEPT, Folder, Lines, Log, read, sinks_of
from tests.ranks.test_changes import Crew
from tests.support.rank_watched import KILLED, POISONED, ROUNDS
from tests.support.waiting import HANG, wait_until


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of(events, kind, member=None):
    return [event for event in events if event["event"] == kind and member in (None, event["member"])]


# --- ranks ----------------------------------------------------------------------------------------------------------


def test_ranks_tell_what_happens_to_them(launch, tmp_path, monkeypatch, run_cli):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("KLATSCH_LOG", f"{tmp_path / 'log'}, tensorboard:{tmp_path / 'board'}")
    ranks = launch(4, "rank_watched.story", preload=("torch.utils.tensorboard",))
    assert ranks.codes() == [0, 0, 0, -9], [ranks.errors(rank) for rank in range(4)]
    told = [*read(tmp_path / "log")]
    assert [event["time"] for event in told] == sorted(event["time"] for event in told)

    for member, near in {"0": ["1", "3"], "1": ["0", "2"], "2": ["1", "3"], "3": ["0", "2"]}.items():
        (start,), (epoch,) = of(told, "start", member), of(told, "epoch", member)
        assert (start["rule"], start["topology"], start["size"], start["parameters"]) == ("dat", "ring", 4, 5)
        assert (epoch["epoch"], epoch["members"], epoch["neighbours"]) == (1, ["0", "1", "2", "3"], near)
        rounds, done = of(told, "round", member), KILLED - 1 if member == "3" else ROUNDS
        assert [event["round"] for event in rounds] == [*range(1, done + 1)]
        assert all(later["bytes"] > sooner["bytes"] for sooner, later in pairwise(rounds))
        assert all(event["loss"] >= 0 and event["lr"] == 1e-3 for event in rounds)
        assert [*rounds[-1]["waits"]] == near
        assert rounds[-1]["waited"] > 0
        assert [event["round"] for event in of(told, "checkpoint", member)][:1] == [0]
        assert rounds[-1]["consensus"] > 0
        assert ("own" in rounds[0]) == (member != "0")
    assert [(event["member"], event["round"]) for event in of(told, "skipped")] == [("2", POISONED)]
    lost = {(event["member"], event["neighbour"], event["round"]) for event in of(told, "lost")}
    assert lost == {("0", "3", KILLED), ("2", "3", KILLED)}
    assert sorted(event["member"] for event in of(told, "end")) == ["0", "1", "2"]

    last = of(told, "round", "1")[-1]
    board = EventAccumulator(str(tmp_path / "board" / "1")).Reload()
    assert [(v.step, v.value) for v in board.Scalars("loss")][-1] == (ROUNDS, pytest.approx(last["loss"]))
    assert {"bytes", "waited", "consensus", "waits/0", "own"} <= {*board.Tags()["scalars"]}
    assert {path.name for path in (tmp_path / "board").iterdir()} == {"0", "1", "2", "3"}

    (tmp_path / "log" / "9.jsonl").write_text('garbage\n{"event": "round", "time": "now"}\n')
    code, out, err = run_cli("log", tmp_path / "log", "--csv", tmp_path / "a.csv", "--parquet", tmp_path / "a.parquet")
    assert code == 0, err
    assert "2 lines are damaged" in out
    rows = {row.split()[0]: row.split() for row in out.splitlines() if row.split()[2:3] in (["ended"], ["gone"])}
    assert rows["2"][2:4] == ["ended", "24"]
    assert rows["2"][-2:] == ["1", "3"]  # skipped and lost
    assert rows["3"][2] == "gone"  # who is killed says nothing, but others do
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert len(lines) == 1 + len(told)
    assert lines[0].startswith("event,time,member,round")


def test_a_rank_tells_for_whom_it_waits_long_once_a_round(launch, tmp_path):
    ranks = launch(2, "rank_watched.one_is_late")
    assert ranks.codes() == [0, 0], [ranks.errors(rank) for rank in range(2)]
    late = of(read(tmp_path / "log"), "late")
    assert {(event["member"], event["neighbour"]) for event in late} == {("0", "1")}
    assert [event["round"] for event in late].count(3) == 1


def test_members_of_a_crew_tell_who_comes_and_goes(prepared, tmp_path):
    crew = Crew(prepared, tmp_path, rule="dsgd", node=0, options={"log": str(tmp_path / "log")})
    first = crew.begin(4)
    where = ["127.0.0.1:" + str(crew.port), "--token-file", crew.token_file]

    def reported():
        status = json.loads(prepared.klatsch("crew", "status", *where, "--json").done().stdout)["members"]
        return [row for row in status if all(row.get(fact) for fact in ("loss", "bytes", "waits", "neighbours"))]

    wait_until(lambda: len(reported()) == 4)  # told some times a second; nothing was sent before the first round
    first[3].process.send_signal(signal.SIGTERM)
    first[0].trains(3)
    first[2].process.kill()
    first[0].trains(2)
    late = crew.join()
    late.trains(3)
    crew.end()
    told, ids = [*read(tmp_path / "log")], {}
    for start in of(told, "start"):
        ids[start["pid"]] = start["member"]
    gone, killed, newcomer = (ids[member.process.pid] for member in (first[3], first[2], late))
    assert [event["why"] for event in of(told, "left", gone)] == ["signal"]
    assert of(told, "end", gone)
    assert not of(told, "end", killed)
    assert {event["neighbour"] for event in of(told, "lost")} >= {killed}
    (epoch,) = of(told, "epoch", newcomer)
    assert newcomer in epoch["members"]
    assert {gone, killed}.isdisjoint(epoch["members"])
    assert of(told, "round", newcomer)[0]["round"] >= epoch["round"] > 5
    seen = [event["epoch"] for event in of(told, "epoch", ids[first[0].process.pid])]
    assert seen == sorted(set(seen))
    assert len(seen) >= 4


def test_a_script_that_logs_nothing_pays_nothing_and_may_still_say_so():
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = klatsch.optim.GossipSGD([x], lr=0.1)
    optimizer.log(loss=torch.tensor(0.5))
    assert optimizer._diary is None
    for wrong, why in (({"loss": "low"}, "give a number"), ({"a": torch.ones(2)}, "with one"), ({"lr": 1}, "a fact")):
        with pytest.raises(ValueError, match=why):
            optimizer.log(**wrong)
    for name in ("members", "metrics", "neighbours", "lost", "state"):  # readers take them for something else
        with pytest.raises(ValueError, match=f"{name} is a fact of every round; give your number another name"):
            optimizer.log(**{name: 1.0})


def one_node(log, closure=None, steps=3):
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = klatsch.optim.GossipSGD([x], lr=0.1, log=log)
    for _ in range(steps):
        x.grad = torch.ones(3)
        optimizer.step(closure)
    return optimizer


def test_numbers_reach_a_function_in_order_and_the_last_round_is_always_told(monkeypatch):
    for pause in ("OFTEN", "SELDOM"):  # no round is due any more after the first
        monkeypatch.setattr(f"klatsch.watch.events.{pause}", HANG)
    events = []
    optimizer = one_node(events.append, lambda: torch.tensor(2.0), steps=50)
    assert optimizer.counts() | {"waited": 0} == {"lr": 0.1, "consensus": 0.0, "bytes": 0, "waited": 0, "lost": 0}
    optimizer.log(accuracy=0.75)
    diary = optimizer._diary
    del optimizer
    assert [event["event"] for event in events] == ["start", "epoch", "round", "round", "end"]
    assert [event["round"] for event in events[2:]] == [1, 50, 50]
    assert events[-2]["accuracy"] == 0.75
    assert not diary.log._thread.is_alive()


def test_waiting_is_told_of_members_that_are_there():
    """In a crew that lives long, those who have been there are ever more."""
    diary = Diary([])
    links = [SimpleNamespace(membership=Membership(klatsch.topology.ring(3), 0), lost={}, failure=None) for _ in "abc"]
    for near, one in zip(("bc", "cd", "cb"), links, strict=True):
        one.waits = {1: 1.0, 2: 0.5}
        diary.stand("a", ["a", *near], 1, one)
    assert diary.waits() == {"c": 0.5 + 1.0 + 1.0, "b": 0.5}
    diary.close()


def test_two_optimizers_with_one_log_are_two_members(tmp_path):
    first, second = (one_node(tmp_path / "log", steps=steps) for steps in (1, 2))
    apart = one_node(tmp_path / "other")
    del first
    third = one_node(tmp_path / "log", steps=3)
    del second, third, apart
    told = [*read(tmp_path / "log")]
    assert [event["round"] for event in of(told, "end", "0-2")] == [2]
    assert [event["round"] for event in of(told, "end", "0")] == [1, 3]  # the third has the name of the first
    assert {(event["member"], *event["members"]) for event in of(told, "epoch")} == {("0", "0"), ("0-2", "0-2")}
    assert os.listdir(tmp_path / "other") == ["0.jsonl"]


@pytest.mark.parametrize("value", [None, "text", (torch.ones(1), 2), torch.ones(3), torch.tensor(1j)])
def test_a_closure_may_return_anything(value):
    events = []
    one_node(events.append, lambda: value)
    assert all("loss" not in event for event in events)
    assert [event["round"] for event in events[-2:]] == [3, 3]  # the last round, and the end


def test_a_simulation_tells_of_what_it_records(tmp_path):
    problem, graph = klatsch.problems.LeastSquares(4), klatsch.topology.ring(4)
    rule = klatsch.rules.make("dat", lr=[0.01, 0.02])
    result = klatsch.simulate(problem, rule, graph, 20, record=[5, 20], log=tmp_path)
    told = [*read(tmp_path)]
    rounds = of(told, "round", "column 1")
    assert [event["round"] for event in rounds] == [5, 20]
    assert [event["Gamma"] for event in rounds] == result.metrics["Gamma"][:, 1].tolist()
    assert of(told, "start", "column 0")[0]["size"] == 4


def test_a_study_tells_of_every_run(tmp_path, run_cli):
    words = (
        "run",
        "--rules",
        "dat,dsgd",
        "-t",
        "ring",
        "-n",
        "4",
        "--steps",
        "20",
        "--lr",
        "0.01,0.02",
        "--seeds",
        "1",
        "--set",
        "noise=2",
    )
    code, _, err = run_cli(*words, "--log", tmp_path / "log")
    assert code == 0, err
    study, *runs, _ = read(tmp_path / "log")
    assert (study["event"], study["rows"]) == ("study", 4)
    assert [(run["event"], run["state"], run["nodes"], run["of"]) for run in runs] == [("run", "done", 4, 4)] * 4
    assert [run["done"] for run in runs] == [1, 2, 3, 4]
    assert all(run["metrics"]["distance"] > 0 and run["label"] and run["key"] for run in runs)
    assert {(run["topology"], run["lr"], run["setting"]) for run in runs} == {
        ("ring", lr, "noise 2") for lr in (0.01, 0.02)
    }
    code, out, _ = run_cli("log", tmp_path / "log")
    assert ": 4 of 4 runs" in out


# --- sinks that fail ------------------------------------------------------------------------------------------------


def test_a_sink_that_fails_is_left_out_with_one_warning():
    events = []

    def broken(event):
        raise OSError(28, "No space left on device")

    with pytest.warns(RuntimeWarning, match=r"log = broken has failed \(No space left on device\)") as caught:
        one_node([broken, events.append])
    assert len(caught) == 1
    assert of(events, "end")


def test_training_outlives_a_full_disk(tmp_path):
    (tmp_path / "0.jsonl").symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="No space left on device.; it goes on without this log") as caught:
        one_node(tmp_path, steps=20)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "log, why",
    [
        ("{file}/log", "cannot use .* for a log: Not a directory; choose another folder"),
        ("tensorboard:{file}/log", "cannot use .* for a log: Not a directory"),
        (3, "log = 3; give a folder"),
        (["{file}/log"], "cannot use .* for a log"),
        ("", "log = ''; give a folder"),
        ("tensorbord:runs", "log = 'tensorbord:runs': there is no tensorbord; give one of .*, or a folder as ./tens"),
    ],
)
def test_what_cannot_be_a_log_is_refused_at_once(tmp_path, log, why):
    (tmp_path / "file").touch()
    if isinstance(log, str) and log.startswith("tensorboard"):
        pytest.importorskip("tensorboard")
    fill = lambda text: text.format(file=tmp_path / "file") if isinstance(text, str) else text  # noqa: E731
    with pytest.raises(ValueError, match=why):
        sinks_of([*map(fill, log)] if isinstance(log, list) else fill(log))


def test_a_tool_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("klatsch.extras.find_spec", lambda name: None)
    for name, install in (("wandb:a", "wandb"), ("tensorboard", "klatsch.tensorboard."), ("terminal", "klatsch.cli.")):
        with pytest.raises(ValueError, match=f"pip install '{install}'"):
            sinks_of(name)


class FakeTracker:
    """W&B and trackio: `init` begins a run, which has `log` and `finish`."""

    def __init__(self):
        self.told = []

    def init(self, *, project, name, config, **options):
        self.told.append(("init", project, name, config["host"], options))
        say = partial(self._say, name)
        return SimpleNamespace(log=partial(say, "log"), finish=partial(say, "finish"))

    def _say(self, name, what, *words, **more):
        self.told.append((name, what, *words, *more.items()))


class FakeMlflow:
    """Runs are known to the client by their ids, which are the only thing it is given."""

    def __init__(self):
        self.told = []

    def set_experiment(self, name):
        return SimpleNamespace(experiment_id=f"id of {name}")

    def MlflowClient(self):
        return self

    def create_run(self, experiment, run_name):
        self.told.append(("create", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run {run_name}"))

    def log_metric(self, run, name, value, timestamp, step):
        self.told.append((run, name, value, timestamp, step))

    def set_terminated(self, run):
        self.told.append((run, "end"))


def tell_of_two_members(sink):
    for time_, member in enumerate("ab"):
        sink({"event": "start", "time": time_, "member": member, "host": "north", "rule": "dat"})
        facts = {"loss": 0.5, "waits": {"c": 2.0}, "why": "text"}
        sink({"event": "round", "time": time_ + 0.25, "member": member, "round": 7, **facts})
    sink({"event": "lost", "time": 2, "member": "a", "round": 8, "neighbour": "c"})
    sink({"event": "end", "time": 3, "member": "a", "round": 8})


@pytest.mark.parametrize("library, options", [("wandb", {"reinit": "create_new"}), ("trackio", {})])
def test_trackers_get_a_run_for_every_member(library, options, monkeypatch):
    fake = FakeTracker()
    monkeypatch.setattr("klatsch.extras.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, library, fake)
    (sink,) = sinks_of(f"{library}:project")
    tell_of_two_members(sink)
    told = [("log", {"loss": 0.5, "waits/c": 2.0}, ("step", 7)), ("finish",)]
    for name in "ab":
        begun = ("init", "project", name, "north", options)
        assert [words for words in fake.told if name in words] == [begun, *((name, *words) for words in told)]
    assert len(fake.told) == 6


def test_mlflow_gets_a_run_for_every_member(monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setattr("klatsch.extras.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    (sink,) = sinks_of("mlflow")
    tell_of_two_members(sink)
    for name, when in (("a", 250), ("b", 1250)):
        run = f"run {name}"
        assert ("create", "id of klatsch", name) in fake.told
        told = [(run, "loss", 0.5, when, 7), (run, "waits/c", 2.0, when, 7), (run, "end")]
        assert [words for words in fake.told if words[0] == run] == told
    assert len(fake.told) == 8


# --- the terminal ---------------------------------------------------------------------------------------------------


@pytest.fixture
def terminals(monkeypatch, tmp_path):
    """Two members of a crew on this machine, whose user's files are open to a group."""
    before = os.umask(0o002)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("klatsch.watch.events.SILENT", HANG)
    monkeypatch.setenv("KLATSCH_CREW", "127.0.0.1:1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield [sinks_of("terminal")[0] for _ in "ab"]
    os.umask(before)


def test_a_member_shows_all_and_another_one_after_it(terminals, tmp_path, capsys):
    def tell(which, kind, **facts):
        terminals[which]({"event": kind, "member": "ab"[which], "time": time.time(), **facts})

    for k in (0, 1):
        tell(k, "start", host="here")
        tell(k, "round", round=7 + k)
    assert [one._shows for one in terminals] == [True, None]
    tell(0, "end", round=7)
    assert re.search(r"a +here +ended +7 *\nb +here +trains +8", capsys.readouterr().err)
    tell(1, "round", round=9)
    assert terminals[1]._shows
    tell(1, "end", round=9)
    assert re.search(r"a +here +ended +7 *\nb +here +ended +9", capsys.readouterr().err)
    assert not [*tmp_path.glob("klatsch-*")]


def test_other_processes_of_a_machine_are_quiet(terminals, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    (quiet,) = sinks_of("terminal")
    quiet({"event": "start", "member": "c", "time": time.time(), "host": "here"})
    quiet({"event": "round", "member": "c", "time": time.time(), "round": 3})
    terminals[0]({"event": "end", "member": "a", "time": time.time(), "round": 5})
    assert re.search(r"^ *c +here +trains +3", capsys.readouterr().err, re.M)  # the first one shows it
    quiet({"event": "end", "member": "c", "time": time.time(), "round": 3})  # though nobody else does any more
    assert capsys.readouterr().err == ""


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_while_it_is_written_and_rotated(tmp_path):
    log, folder, heard = Log([Lines(tmp_path, largest=2000)]), Folder(tmp_path), []

    def has_heard(count):
        heard.extend(folder.new())
        return len(heard) >= count

    for t in range(400):
        log.emit("round", "a b/c", round=t, loss=math.inf if t % 2 else 0.5)
        wait_until(partial(has_heard, t - 10))  # half a file: who reads is not slower than who writes
    log.close("a b/c", round=400)
    has_heard(401)
    assert [event["round"] for event in sorted(heard, key=lambda event: event["round"])] == [*range(401)]
    assert [event["loss"] for event in heard if event["round"] < 2] == [0.5, None]
    assert folder.new() == []
    assert {path.name for path in tmp_path.iterdir()} >= {"a-b-c.jsonl"}
    assert len(list(tmp_path.iterdir())) == KEPT
    assert [event["round"] for event in read(tmp_path)][-3:] == [398, 399, 400]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())


def test_torn_and_garbage_lines_are_left_out_and_counted(tmp_path):
    event = {"event": "round", "time": 1.0, "member": "0", "round": 1}
    wrong = [event | {"time": None}, event | {"round": "one"}, event | {"waits": 3}, event | {"member": 0}, [], 7]
    wrong += [event | {"time": 10**400}, event | {"loss": 10**400}]
    lines = [json.dumps(each) for each in (event, *wrong)]
    (tmp_path / "0.jsonl").write_bytes("\n".join([*lines, "[" * 5000, "NaN", '{"torn": '][:]).encode() + b"\n\xff\n\n{")
    os.mkfifo(tmp_path / "1.jsonl")  # has no end
    folder = Folder(tmp_path)
    assert folder.new() == [event]
    assert folder.damaged == len(wrong) + 4
    Lines(tmp_path)(event | {"time": 2.0})  # after a line that is torn
    assert [each["time"] for each in folder.new()] == [2.0]
    assert [each["time"] for each in Folder(tmp_path)] == [1.0, 2.0]


def test_numbers_that_are_named_like_facts_of_a_member_do_not_replace_them(tmp_path, run_cli):
    numbers = dict.fromkeys(("state", "host", "lost", "events", "last", "saved"), 2.0)
    (tmp_path / "0.jsonl").write_text(json.dumps(numbers | {"event": "round", "time": 1.0, "member": "0", "round": 1}))
    code, out, err = run_cli("log", tmp_path)
    assert code == 0, err
    assert " trains " in out


def test_a_restart_goes_on_in_the_same_file(tmp_path):
    for _ in range(2):
        one_node(tmp_path / "log")
    told = [*read(tmp_path / "log")]
    assert [len(of(told, kind)) for kind in ("start", "end")] == [2, 2]
    assert os.listdir(tmp_path / "log") == ["0.jsonl"]
