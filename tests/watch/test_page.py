"""The live page in a real Chromium: what it shows of logs, crews and studies, and that everybody can use it."""

import json
import math
import re
import signal
from time import time as now

import pytest

from klatsch.cli.training import StudyEvents
from klatsch.study import Store, execute, expand, parse, run_study, workers
from tests.ranks.test_crew import Town
from tests.support.waiting import HANG, wait_until

ROWS = """Object.fromEntries([...document.querySelectorAll('#rows tr:not([hidden])')].map(
    row => [row.querySelector('button').textContent, [...row.querySelectorAll('td')].map(cell => cell.innerText)]))"""
LINKS = """Object.fromEntries([...document.querySelectorAll('#graph [data-link]')].map(
    half => [half.dataset.link, half.getAttribute('class')]))"""
WORST = "document.querySelector('#links th')?.textContent"
WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture
def watch(start, tab):
    """Run `klatsch watch TARGET` and open its page."""

    def show(target, *options, **window):
        process = start("watch", target, "--port", 0, "--no-open", *options)
        url = wait_until(lambda: re.search(r"http://\S+", process.stdout), process)[0]
        tab.open(url, **window)
        tab.process_of_page = process
        return url

    return show


def recorded(folder, size=8, count=100, slow=(2, 3), killed=None, name=str, began=1e9):
    """A log of ranks on a ring, of 0.2 s a round: one link takes long, and one rank dies in the middle."""
    folder.mkdir(exist_ok=True)
    lines = {k: [] for k in range(size)}
    waits = {k: {name((k - 1) % size): 0.0, name((k + 1) % size): 0.0} for k in range(size)}

    def tell(k, kind, time, **facts):
        lines[k].append(json.dumps({"event": kind, "time": began + time, "member": name(k), **facts}) + "\n")

    for k in range(size):
        tell(k, "start", 0, host=f"host{k}", rule="dat", topology="ring", wire="float32", size=size, parameters=1000)
        tell(k, "epoch", 0, epoch=1, round=1, members=[*map(name, range(size))], neighbours=[*waits[k]])
    for t in range(1, count + 1):
        for k in range(size):
            if k == killed and t > count / 2:
                continue
            for other in ((k - 1) % size, (k + 1) % size):
                waits[k][name(other)] += 0.2 * (0.6 if {k, other} == {*slow} else 0.03)
            facts = {"loss": math.exp(-t / 50) + 0.01 * k, "consensus": 1 / t, "bytes": 1000 * t, "waits": waits[k]}
            tell(k, "round", 0.2 * t, round=t, waited=sum(waits[k].values()), lag=7 * (k == 4), **facts)
    if killed is not None:
        for k in ((killed - 1) % size, (killed + 1) % size):
            tell(k, "lost", 0.1 * count + 0.1, round=count // 2, neighbour=name(killed), why="connection reset")
    for k, own in lines.items():
        stem = re.sub(r"[^\w-]", "-", name(k))
        (folder / f"{stem}.jsonl").write_text("".join(own))
    return folder


def test_a_log_is_shown(watch, tab, tmp_path):
    watch(recorded(tmp_path / "log", killed=6))
    assert tab.until(WORST) == "2 – 3"
    assert {link: kind for link, kind in tab.value(LINKS).items() if "wait" in kind} == {
        "2 3": "half wait3",
        "3 2": "half wait3",
    }
    assert {link for link, kind in tab.value(LINKS).items() if "lost" in kind} == {"5 6", "6 5", "6 7", "7 6"}
    rows = tab.value(ROWS)
    assert [*rows] == [str(k) for k in range(8)]
    state, rounds, behind, loss, consensus, sent, waited = rows["0"]
    assert (rounds, behind, loss, consensus, sent, waited) == ("100", "–", "0.1353", "0.01000", "100 kB", "1.2 s")
    assert state == tab.text("#status") == "stopped"  # it is a record
    assert tab.text("#tile-members") == "7of 8 stopped"
    assert not tab.value("document.querySelector('#rows .bad')?.textContent === 'stopped'")
    assert (rows["6"][0], rows["4"][2]) == ("lost", "7")
    assert tab.value("document.querySelectorAll('#graph circle.node.lag2').length") == 1
    assert "−7" in tab.text("#graph")
    assert "5: lost 6 in round 50: connection reset" in tab.text("#events")
    assert tab.text("#facts") == "dat · ring · float32 · 1,000 parameters"
    links = tab.value("[...document.querySelectorAll('#links tr')].map(row => row.children[1].innerText)")
    assert len(links) == 8
    assert links[-2:] == ["lost", "lost"]  # whatever was waited for them
    tab.value("document.getElementById('members').scrollIntoView()")  # what cannot be seen is not drawn
    tab.until("document.querySelectorAll('#rows path[d]').length === 32")
    tab.until("document.querySelectorAll('#chart canvas').length === 1")


@pytest.mark.parametrize("window", [{"width": 390}, {"width": 1280}, {"width": 1280, "dark": True}])
def test_everybody_can_read_it(window, watch, tab, tmp_path):
    watch(recorded(tmp_path / "log", killed=6), **window)
    tab.until(WORST)
    assert tab.violations() == []
    assert tab.value(WIDE) <= 0  # nothing sticks out: tables scroll by themselves


def test_a_crew_that_has_ended_keeps_its_numbers(watch, tab, tmp_path):
    log, end = recorded(tmp_path / "log", size=4, slow=(0, 1)), 1e9 + 20

    def tell(k, kind, time, **facts):
        with (log / f"{k}.jsonl").open("a") as file:
            file.write(json.dumps({"event": kind, "time": end + time, "member": str(k), "round": 101, **facts}) + "\n")

    tell(3, "left", 0.1, why="leave")
    for k in range(3):
        others = [str(other) for other in range(3) if other != k]
        tell(k, "epoch", 0.2, epoch=2, members=["0", "1", "2"], neighbours=others)
        tell(k, "left", 0.3, why="leave")
    watch(log)
    assert tab.until(WORST) == "0 – 1"
    assert [tab.text(f"#tile-{name}") for name in ("members", "loss", "bytes")] == [
        "3of 3 ended, epoch 2",
        f"{math.exp(-2) + 0.01:.4f}mean",
        "400 kB",  # also of the one who left before
    ]
    assert not [kind for kind in tab.value(LINKS).values() if "lost" in kind]


def test_a_recorded_run_is_replayed_by_keys(watch, tab, tmp_path):
    watch(recorded(tmp_path / "log", killed=6))
    tab.until(WORST)
    for _ in range(100):
        tab.press("Tab")
        if tab.value("document.activeElement.id") == "when":
            break
    tab.press("Home")
    tab.until(f"{ROWS}[0]?.[1] === '0'")
    assert tab.text("#status") == "paused"
    tab.value("document.getElementById('when').value = 300")
    tab.value("document.getElementById('when').dispatchEvent(new Event('input'))")
    tab.until(f"{ROWS}[0]?.[1] === '30'")
    assert tab.value(f"{ROWS}[6][0]") == "training"  # it dies later
    tab.value("document.getElementById('speed').value = '1'; document.getElementById('play').focus()")
    tab.press("Enter")
    tab.until("document.getElementById('status').textContent === 'replaying'")  # for 14 s, if nobody hurries it
    tab.value("document.getElementById('speed').value = '64'")
    tab.until("document.getElementById('status').textContent === 'paused'")  # at the end
    assert tab.value(f"{ROWS}[6][0]") == "lost"
    assert tab.value(WORST) == "2 – 3"
    tab.value("document.getElementById('live').click()")
    tab.until("document.getElementById('live').getAttribute('aria-pressed') === 'true'")


def test_members_are_sorted_and_chosen(watch, tab, tmp_path):
    watch(recorded(tmp_path / "log"))
    tab.until(WORST)
    tab.value("document.querySelector('[data-sort=loss]').click()")
    first = "document.querySelector('#rows button')"
    assert tab.value(f"{first}.textContent") == "7"
    assert tab.value("document.querySelector('[aria-sort]').innerText.trim()").startswith("Loss")
    tab.value(f"{first}.focus()")
    tab.press(" ")
    tab.until("document.querySelector('#graph .chosen title')?.textContent.startsWith('7:')")
    tab.until(f"{first}.getAttribute('aria-pressed') === 'true'")


def test_skipped_gradients_and_checkpoints_are_among_the_events(watch, tab, tmp_path):
    log = recorded(tmp_path / "log", size=2, count=5, slow=(0, 1))
    told = [
        {"event": "skipped", "round": 3, "why": "a gradient is nan"},
        {"event": "late", "round": 4, "neighbour": "1"},
        {"event": "checkpoint", "round": 5, "path": "runs/a"},
    ]
    with (log / "0.jsonl").open("a") as file:
        for k, event in enumerate(told):
            file.write(json.dumps({"time": 1e9 + 2 + k, "member": "0", **event}) + "\n")
    watch(log)
    rows = "[...document.querySelectorAll('#events li')].map(row => [row.className, row.lastChild.textContent])"
    tab.until(f"{rows}.length === 4")
    assert tab.value(rows)[:3] == [
        ["", "0: wrote a checkpoint in round 5: runs/a"],
        ["", "0: waits for 1, which is late, in round 4"],
        ["alarm", "0: skipped its gradient in round 3: a gradient is nan"],
    ]


def test_who_has_said_nothing_for_an_hour_is_silent(watch, tab, tmp_path):
    watch(recorded(tmp_path / "log", size=2, count=5, slow=(0, 1), began=now() - 3600))
    tab.until(WORST)
    assert re.fullmatch(r"silent for \d+ min", tab.value(ROWS)["0"][0])
    assert tab.value("document.querySelectorAll('#rows .bad').length") == 2


@pytest.mark.parametrize("size", [20, 64])
def test_the_share_of_a_slow_link_does_not_cover_it(size, watch, tab, tmp_path):
    watch(recorded(tmp_path / "log", size=size, count=5, slow=(size // 4, size // 4 + 1)))
    shown = "[...document.querySelectorAll('#graph .half.wait3, #graph .share')].map(e => e.getBoundingClientRect())"
    tab.until(f"{shown}.length === 3")
    *halves, (left, right, top, bottom) = tab.value(f"{shown}.map(box => [box.left, box.right, box.top, box.bottom])")
    assert not any(left < r and a < right and top < b and t < bottom for a, r, t, b in halves)


def test_two_optimizers_of_the_same_ranks_are_two_graphs(watch, tab, tmp_path):
    recorded(tmp_path / "log", size=3, slow=(0, 1))
    watch(recorded(tmp_path / "log", size=3, count=20, slow=(1, 2), name="{}-2".format))
    tab.until(f"{ROWS}['2-2']?.[1] === '20'")
    assert [*tab.value(LINKS)] == ["0 1", "1 0", "1-2 2-2", "2-2 1-2"]
    rows = tab.value(ROWS)
    assert [*rows] == ["0", "1", "2", "0-2", "1-2", "2-2"]
    assert {row[2] for row in rows.values()} == {"–"}  # nobody is behind the other one's rounds


def test_what_events_say_is_never_markup(watch, tab, tmp_path):
    evil = "<img src=x onerror='document.title=1'>{}".format
    folder = recorded(tmp_path / "log", size=3, count=10, slow=(0, 1), killed=2, name=evil)
    (folder / "x.jsonl").write_text(
        '{"event": "<b>", "time": 1000000001, "member": "__proto__", "why": "<script>alert(1)</script>"}\n'
        '{"event": "epoch", "time": 1000000001, "member": "x", "members": [[], {}, null], "neighbours": [1, {}]}\n'
        '{"event": "round", "time": 1000000002, "member": "y", "waits": {"a": "b"}, "loss": null}\n'
        '{"event": "back", "time": 1e300, "member": "x"}\n'
        '{"event": "study", "time": 1}\n{"event": "run", "time": 2}\n{"event": "lost", "time": 3, "member": "z"}\n'
        '{"torn'
    )
    watch(folder)
    tab.until(f"{ROWS}['y']")
    assert tab.value("document.querySelectorAll('img, b, main script').length") == 0
    assert "<img src=x" in tab.text("#events")
    assert tab.value(f"{ROWS}['y'][3]") == "not finite"
    assert tab.value("document.title") == f"{folder} – klatsch watch"


def test_what_comes_is_shown_and_a_page_outlives_its_server(watch, tab, tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    watch(folder)
    tab.until("document.getElementById('status').textContent === 'waiting'")
    assert "Nothing has come yet" in tab.text("#content")
    recorded(folder, size=4, count=5)
    tab.until(f"{ROWS}[3]?.[1] === '5'")
    tab.process_of_page.kill()
    tab.until("document.getElementById('status').textContent === 'no connection'")
    assert tab.value(f"{ROWS}[3][1]") == "5"
    tab.errors.clear()  # the browser tells of the connection


def test_a_link_on_another_site_opens_a_page_that_needs_its_token(watch, tab, tmp_path):
    url = watch(recorded(tmp_path / "log", size=3, count=5, slow=(0, 1)), "--host", "0.0.0.0")
    tab.ask("Network.enable")
    tab.ask("Network.clearBrowserCookies")
    tab.open(f"data:text/html,<a href={url}>the training</a>")
    tab.value("document.querySelector('a').click()")
    tab.until("location.protocol === 'http:' && document.readyState === 'complete'")
    assert tab.value("location.search") == ""  # the token is in the cookie
    assert "with its token" not in tab.text("body")
    tab.until(WORST)


# --- ranks and crews ------------------------------------------------------------------------------------------------


def test_a_slow_link_is_the_worst_within_20_rounds_and_a_killed_rank_is_seen(watch, tab, launch, tmp_path):
    (tmp_path / "log").mkdir()
    watch(tmp_path / "log")
    ranks = launch(6, "rank_watched.slow_link")
    for rank in range(6):
        ranks.has_stopped(rank)  # after 20 rounds
    tab.until(f"{WORST} === '2 – 3'")
    worst = tab.until(f"(links => links['2 3'] === 'half wait3' && links['3 2'] === 'half wait3' && links)({LINKS})")
    assert not any(
        worst.get(f"{a} {b}") == worst.get(f"{b} {a}") == "half wait3" for a, b in ("01", "12", "34", "45", "50")
    )
    for rank in range(6):
        ranks.go_on(rank)
    tab.until(f"Object.values({ROWS}).every(row => Number(row[1]) > 20)")
    ranks.kill(5)
    tab.until(f"{ROWS}[5][0] === 'lost'")
    tab.until(f"{LINKS}['4 5'] === 'half lost' && {LINKS}['0 5'] === 'half lost'")
    assert re.search(r"^(4|0): lost 5 in round \d+", tab.text("#events"), re.M)
    assert "lost 5" in tab.text("#announcer")  # to screen readers


def test_a_crew_is_shown_by_its_registry(watch, tab, prepared, tmp_path):
    town = Town(prepared, tmp_path)
    members = town.crew(3, timeout=HANG)
    ids = {member.id for member in members}
    watch(town.where, "--token-file", town.token_file)
    assert {*tab.until(f"(rows => Object.values(rows).every(row => Number(row[1]) > 5) && rows)({ROWS})")} == ids
    assert "of 3 training" in tab.text("#tile-members")
    assert tab.value(f"{ROWS}['{members[0].id}'][5]").endswith("B")
    members[0].process.send_signal(signal.SIGSTOP)  # without its answer the crew does not change
    members[1].process.kill()
    events = "document.getElementById('events').innerText"
    tab.until(f"{events}.includes('{members[1].id}: is away')")
    members[0].process.send_signal(signal.SIGCONT)
    tab.until(f"{events}.includes('2 members; {members[1].id} left')")
    newcomer = town.member().id
    tab.until(f"{events}.includes('3 members; {newcomer} joined')")
    assert tab.value(f"{ROWS}['{newcomer}'][0]") in ("training", "waiting to begin")
    town.registry.kill()
    tab.until("!document.getElementById('trouble').hidden")
    assert "no registry answers" in tab.text("#trouble")


# --- studies --------------------------------------------------------------------------------------------------------


def test_a_study_is_shown_while_it_runs(watch, tab, tmp_path):
    content = {
        "name": "small",
        "steps": 20,
        "nodes": [4, 9],
        "rules": ["dat", "dsgd"],
        "topologies": ["ring"],
        "seeds": 1,
    }
    half, whole = (parse({**content, "lr": rates}) for rates in ([0.01], [0.01, 0.02, 1e30]))
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.remember(whole)
        execute(expand(half)[0], store, executor=workers.threads)
        watch(path, width=390)
        progress = "document.querySelector('.study progress')"
        tab.until(f"{progress}?.value === 4 && {progress}.max === 12")
        assert tab.value("document.querySelectorAll('.study tbody tr').length") == 4
        assert tab.text(".study tbody tr").split()[1] == "ring"
        run_study(whole, store, executor=workers.threads)
    tab.until(f"{progress}.value === 12 && document.getElementById('status').textContent === 'ended'")
    assert tab.text(".study p").startswith("12 of 12 runs · 4 diverged · ")
    assert tab.value("document.querySelectorAll('.study tbody tr').length") == 12
    assert tab.violations() == []
    assert tab.value(WIDE) <= 0


def test_runs_of_all_studies_of_a_store_are_told(tmp_path):
    content = {
        "steps": 20,
        "nodes": 4,
        "rules": ["dat", "dsgd"],
        "topologies": ["ring"],
        "seeds": 1,
        "lr": [0.01, 0.02],
    }
    screened = {**content, "name": "screened", "screen": {"steps": 10}}
    with Store(tmp_path / "s.sqlite") as store:
        run_study(parse({**content, "name": "plain"}), store, executor=workers.threads)
        source = StudyEvents(Store(tmp_path / "s.sqlite", read_only=True))
        events = source.new()
        assert [(e["event"], e.get("study", e.get("name"))) for e in events] == [
            ("study", "plain"),
            *[("run", "plain")] * 4,
        ]
        assert [e["done"] for e in events[1:]] == [1, 2, 3, 4]
        assert source.new() == []
        store.remember(parse(screened))
        (event,) = source.new()
        assert (event["name"], event["rows"]) == ("screened", 4)
        run_study(parse(screened), store, executor=workers.threads)
    last = [event for event in source.new() if event["event"] == "run"]
    assert {event["study"] for event in last} == {"screened"}
    assert (last[-1]["done"], last[-1]["of"]) == (6, 6)  # two are run in full, which the other study has done
    assert all(math.isfinite(value) for event in last for value in event["metrics"].values())
