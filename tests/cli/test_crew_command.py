"""`klatsch crew`: what its commands print and refuse."""

import json
import os
import re
import signal
import stat
import sys

import numpy as np
import pytest

from klatsch.cli.plan import Machines
from klatsch.ranks.edges import DESCRIPTORS
from tests.ranks.test_changes import Crew
from tests.ranks.test_crew import Town
from tests.support.waiting import wait_until


@pytest.fixture
def town(prepared, tmp_path):
    return Town(prepared, tmp_path)


@pytest.mark.parametrize(
    "words, message",
    [
        ("serve --port 70000", "--port 70000: give a port from 1 to 65535, or 0 for any"),
        ("serve --least -1", "--least -1: give a number of members from 0 up"),
        ("serve --timeout 0", "--timeout 0: give seconds from 0.1 to 3600"),
        ("serve --quorum 2", "--quorum 2: give a share from 0 to 1"),
        ("serve --host 0.0.0.0", "--host 0.0.0.0: without a token anyone could join; give --token-file FILE"),
        ("serve --token-file short", "the token in short has 3 characters; give it at least 16"),
        ("serve --token-file none/token", "cannot make the token file none/token: No such file or directory; choose"),
        ("serve --host 192.0.2.1 --token-file token", "cannot listen on 192.0.2.1:4711: "),
        ("join here:port -- true", "'here:port' is not the address of a registry; give HOST:PORT"),
        ("join ::1:4711 -- true", "'::1:4711' is not the address of a registry"),
        ("join a:1 --token-file none -- true", "there is no token file none; copy the one of klatsch crew serve"),
        ("join a:1 -- no-such-program", "cannot run 'no-such-program': No such file or directory"),
        ("join a:1", "Missing argument '-- COMMAND'"),
        ("status 127.0.0.1:1", "no registry answers (127.0.0.1:1: Connection refused); check the address"),
        ("drop m1 127.0.0.1:1,127.0.0.1:2", "no registry answers (127.0.0.1:1: Connection refused; 127.0.0.1:2: "),
    ],
)
def test_what_is_refused(words, message, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abc\n")
    code, out, err = run_cli("crew", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_registry_tells_how_to_join_and_what_happens(town):
    served = town.serve()
    assert stat.S_IMODE(town.token_file.stat().st_mode) == 0o600
    assert len(town.token) == 64
    join = f"    klatsch crew join {town.where} --token-file {town.token_file} -- python train.py\n"
    assert served.stdout == f"the registry of a crew listens on {town.where}; members join with\n{join}"
    member = town.member()
    member.sees(1)
    wait_until(lambda: "epoch 1 from round 1: 1 member (" in served.stdout)
    assert f"{member.id} on " in served.stdout
    os.kill(served.pid, signal.SIGTERM)
    assert (served.done().returncode, served.stderr) == (0, "")
    before = town.token
    served = town.serve()  # the token stays
    assert town.token == before
    wait_until(lambda: "epoch 1 from round 1 is adopted: 1 member" in served.stdout)
    os.kill(served.pid, signal.SIGINT)
    assert (served.done().returncode, served.stderr) == (130, "")


def test_without_a_token_only_this_machine_may_join(town):
    served = town.prepared.klatsch("crew", "serve", "--port", town.port)
    wait_until(lambda: served.stdout.count("\n") == 3, served)
    assert served.stdout.endswith("from this machine only: it has no token (--token-file FILE makes one)\n")
    assert f"listens on 127.0.0.1:{town.port};" in served.stdout


PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.environ["KLATSCH_CREW"], os.environ["KLATSCH_CREW_TOKEN_FILE"], sys.argv[1:], flush=True)
signal.pause()
"""


def test_join_runs_the_command_in_its_place(town):
    town.serve()
    words = ("crew", "join", "a:1,b:2", "--token-file", town.token_file, "--", sys.executable, "-c", PROGRAM, "--lr")
    joined = town.prepared.klatsch(*words)
    wait_until(lambda: joined.stdout, joined)
    assert joined.stdout == f"a:1,b:2 {town.token_file} ['--lr']\n"
    os.kill(joined.pid, signal.SIGTERM)
    assert joined.done().returncode == 7


def test_join_refuses_a_wrong_token_before_it_becomes_the_command(town):
    town.serve()
    (town.folder / "other").write_text("x" * 64)
    join = town.prepared.klatsch("crew", "join", town.where, "--token-file", town.folder / "other", "--", "true")
    assert (join.done().returncode, join.stdout, join.stderr.count("\n")) == (2, "", 1)
    assert f"the registry at {town.where} is not ours: its token is another one; give a copy" in join.stderr


def test_status_shows_the_members(town, run_cli):
    members = town.crew(2)
    for member in members:
        member.trains_on()
    wait_until(lambda: all("loss" in row for row in town.status()["members"]))
    code, out, _ = run_cli("crew", "status", town.where, "--token-file", town.token_file)
    assert code == 0
    assert "epoch 1 from round 1 " in out
    for member in members:
        assert f" {member.id} " in out
    code, out, _ = run_cli("crew", "status", town.where, "--token-file", town.token_file, "--json")
    told = json.loads(out)
    assert (told["epoch"], told["start"], told["waits_for"], told["facts"]) == (1, 1, "", {"rule": "dsgd"})
    assert [row["member"] for row in told["members"]] == members[0].of("epoch")[0][1]
    for row in told["members"]:
        assert row["state"] == "trains"
        assert {"host", "address", "round", "lag", "loss", "bytes", "neighbours"} <= row.keys()


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="links are seen on Linux alone")
def test_a_crew_knows_how_fast_its_links_are(prepared, tmp_path, run_cli):
    """On a ring of four each sees those to two others; a plan knows them all."""
    crew = Crew(prepared, tmp_path, rule="dsgd", dim=300)
    crew.begin(4)
    given = ("--token-file", crew.token_file)

    def links():
        rows = json.loads(run_cli("crew", "status", crew.where, *given, "--json")[1])["members"]
        seen = {(row["member"], other): link for row in rows for other, link in row.get("links", {}).items()}
        return seen if len(seen) == 8 and all(rate > 0 for _, rate in seen.values()) else None

    seen = wait_until(links)
    _, out, _ = run_cli("crew", "status", crew.where, *given, "--links")
    assert all(re.search(rf" {one} +{other} +[\d.]+ \w+ +[\d.]+ .?B", out) for one, other in seen)
    known = Machines(network=crew.where, token_file=crew.token_file).links()
    pairs = np.array([(i, j) for i in range(4) for j in range(4) if i != j]).T
    rates, delays = known.between(*pairs)
    assert known.nodes == 4
    assert (min(rates) > 0, min(delays) > 0, max(delays) <= sum(trip for trip, _ in seen.values())) == (True,) * 3
    crew.end()


def test_a_crew_may_know_no_links(town, run_cli):
    """Its members have not trained for long, or are not on Linux."""
    town.crew(2)
    code, out, _ = run_cli("crew", "status", town.where, "--token-file", town.token_file, "--links")
    assert (code, out.splitlines()[-1]) == (0, "no links are known")
    for words, message in [
        (("--network", town.where, "--token-file", town.token_file), f"{town.where} knows no links: members on Linux"),
        (("--network", town.where, "--latency", 0.1), f"{town.where} knows its links; leave --latency 0.1 out"),
        (("--network", "10.0.0.1"), "--network '10.0.0.1': a crew is HOST:PORT; give 10.0.0.1:4711"),
        (("--network", "wan", "--token-file", town.token_file), "is for a crew; give --network HOST:PORT, too"),
        (("--network", "127.0.0.1:1"), "no registry answers (127.0.0.1:1: Connection refused); check the address"),
    ]:
        code, out, err = run_cli("plan", "least-squares", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_watch_shows_it_again(town):
    town.serve()
    watch = town.prepared.klatsch("crew", "status", town.where, "--token-file", town.token_file, "--watch")
    wait_until(lambda: watch.stdout.count("nobody trains yet") >= 2, watch)
    os.kill(watch.pid, signal.SIGINT)
    assert (watch.done().returncode, watch.stderr) == (130, "")
