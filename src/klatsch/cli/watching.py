"""`klatsch watch` and `klatsch log`: a live page of a training or a study, and what a log tells."""

from __future__ import annotations

import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch.cli import terminal
from klatsch.cli.app import command
from klatsch.cli.crews import Token, outward
from klatsch.cli.terminal import AsJson, option, print_json, text, words
from klatsch.units import counted, duration

if TYPE_CHECKING:
    from klatsch.study.cases import Case
    from klatsch.study.store import Store
    from klatsch.watch.events import Event

REPORTED = ("round", "lag", "loss", "lr", "bytes", "waited", "waits", "consensus")  # of what members tell a registry


@command("log runs/a", "log runs/a --csv events.csv", "log runs/a --json")
def log(
    folder: Annotated[Path, typer.Argument(help="The folder of Gossip(..., log=FOLDER), or of KLATSCH_LOG.")],
    csv: Annotated[Path | None, text("Write the events to FILE.csv.", metavar="FILE")] = None,
    parquet: Annotated[Path | None, text("Write the events to FILE.parquet.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the members of a training did, by their log; also while they train."""
    from klatsch import files
    from klatsch.watch.events import Event, Folder
    from klatsch.watch.sinks import Members, shown

    outputs = [path for path in (csv, parquet) if path is not None]
    for path, kind in ((csv, "CSV"), (parquet, "Parquet")):
        if path is not None:
            files.check_output(path, kind, *(other for other in outputs if other is not path))
    content, members, events = Folder(folder), Members(), 0
    first, last, studies, kept = float("inf"), 0.0, dict[str, Event](), list[Event]()
    for event in content:
        members.take(event)
        events, first, last = events + 1, min(first, event["time"]), max(last, event["time"])
        if event["event"] == "run":
            studies[str(event.get("study"))] = event
        if outputs:
            kept.append(_flat(event))
    if not events:
        raise ValueError(f"there are no events in {folder}; give the folder of a log, with files such as 0.jsonl")
    if outputs:
        _export(kept, csv, parquet)
    if as_json:
        rows = [{"member": name} | row for name, row in members.rows.items()]
        return print_json({"members": rows, "events": events, "damaged": content.damaged})
    if lines := shown(members.rows):
        used = [name for name in lines[0] if any(line[name] for line in lines)]
        narrow = ["host", "lr", "consensus", "skipped", "waited"]
        terminal.print_table(str(folder), [{name: line[name] for name in used} for line in lines], narrow)
    for name, run in studies.items():
        print(f"study {name}: {run.get('done')} of {run.get('of')} runs")
    print(f"{counted(events, 'event')} in {duration(last - first)}")
    if content.damaged:
        terminal.note(f"{counted(content.damaged, 'line')} {'is' if content.damaged == 1 else 'are'} damaged", "yellow")
    for path in outputs:
        print(f"written to {path}")


def _flat(event: dict[str, object]) -> dict[str, object]:
    """An event as cells: waits by neighbour are waits/NEIGHBOUR, and lists are words."""
    cells: dict[str, object] = {}
    for name, value in event.items():
        if isinstance(value, dict):
            cells |= {f"{name}/{key}": each for key, each in value.items()}
        else:
            cells[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return cells


def _export(records: list[dict[str, object]], csv: Path | None, parquet: Path | None) -> None:
    from klatsch.study import choices

    columns = dict.fromkeys(("event", "time", "member", "round", *(name for record in records for name in record)))
    table = [{name: record.get(name) for name in columns} for record in records]
    if csv is not None:
        choices.to_csv(table, csv)
    if parquet is not None:
        choices.to_parquet(table, parquet)


# --- the live page ----------------------------------------------------------------------------------------------------


@command(
    "watch runs/a",
    "watch localhost:4711",
    "watch 10.0.0.1:4711 --token-file token",
    "watch results.sqlite --no-open",
    more="TARGET is a folder (Gossip(..., log=FOLDER)), the HOST:PORT of a crew's registry, or the store of a study.",
)
def watch(
    target: Annotated[str, typer.Argument(help="Folder of a log, HOST:PORT of a registry, or store of a study.")],
    host: Annotated[str, text("Address to listen on; beyond this machine, the page needs a token.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 for any.")] = 4712,
    token_file: Token = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
) -> None:
    """Show a training or a study while it runs, or what was recorded, on a page in the browser."""
    from klatsch.watch.server import PageServer

    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port}: give a port from 1 to 65535, or 0 for any")
    source = source_of(target, token_file)
    first = source()  # what is wrong with it is said now
    with PageServer(host, port, {"title": target}) as server:
        server.feed.add(first)
        url = server.url(outward() if host in ("0.0.0.0", "::") else "")
        print(f"{target} is shown at {url} until Ctrl-C", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        screen = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
        if not no_open and screen and sys.stdout.isatty():
            webbrowser.open(url)
        try:
            server.follow(source)
        except KeyboardInterrupt:
            print()


def source_of(target: str, token_file: Path | None) -> Callable[[], Sequence[Event]]:
    """A function that tells the events that are new since its last call."""
    from klatsch.files import token_of
    from klatsch.ranks.registry import address_of

    path = Path(target)
    if path.is_dir():
        from klatsch.watch.events import Folder

        return Folder(path).new
    if path.exists() or path.suffix in (".sqlite", ".db"):
        from klatsch.study.store import Store

        return StudyEvents(Store(path, read_only=True)).new
    try:
        addresses = [address_of(one) for one in words(target)]
        known = ":" in target  # else it is more likely a folder that is not there than a host
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"there is no folder or store {target}; give one, or the HOST:PORT of a crew's registry")
    return CrewEvents(addresses, token_of(token_file)).new


class CrewEvents:
    """What a registry tells of its members, as events."""

    def __init__(self, addresses: Sequence[tuple[str, int]], token: bytes) -> None:
        self._addresses, self._token = addresses, token
        self._rows: dict[str, Event] = {}  # as they were, by member
        self._epoch = -1

    def new(self) -> list[Event]:
        """What has changed since the last call."""
        from klatsch.ranks.registry import ask

        told = ask(self._addresses, self._token, {"op": "status"})
        rows = {str(row["member"]): row for row in told["members"]}
        members = [member for member, row in rows.items() if row["state"] != "waits"]
        events: list[Event] = []
        for member, row in rows.items():
            before = self._rows.get(member)
            if before is None:
                events.append({"event": "start", "member": member, "host": row["host"], **_rule(told["facts"])})
            was, neighbours = before or {}, row.get("neighbours", [])
            if member in members and (told["epoch"] != self._epoch or neighbours != was.get("neighbours", [])):
                epoch = {"epoch": told["epoch"], "round": told["start"], "members": members, "neighbours": neighbours}
                events.append({"event": "epoch", "member": member, **epoch})
            if "is away" in (row["state"], was.get("state")) and row["state"] != was.get("state"):
                events.append({"event": "away" if row["state"] == "is away" else "back", "member": member})
            gone = [other for other in row.get("lost", []) if other not in was.get("lost", [])]
            events += [{"event": "lost", "member": member, "neighbour": other, "round": row["round"]} for other in gone]
            if row != before and row["state"] != "is away":
                reported = {name: row[name] for name in REPORTED if row.get(name) is not None}
                events.append({"event": "round", "member": member, **reported})
        self._rows, self._epoch = rows, told["epoch"]
        return [{"time": time.time(), **event} for event in events]


def _rule(facts: dict[str, str]) -> Event:
    return {name: facts[name] for name in ("rule", "topology", "wire") if name in facts}


class StudyEvents:
    """The studies of a store and their runs, as events."""

    def __init__(self, store: Store) -> None:
        self._store, self._last = store, 0
        self._studies: list[tuple[str, ...]] = []
        self._cases: dict[str, dict[str, Case]] = {}  # of every study, by key
        self._seen: set[str] = set()  # keys of runs
        self._done: dict[str, int] = {}  # runs of every study

    def new(self) -> list[Event]:
        """What has come since the last call."""
        events: list[Event] = []
        runs = self._store.execute(
            "SELECT id, key, seconds, diverged, finished FROM runs WHERE id > ? ORDER BY id", [self._last]
        )
        studies = [tuple(row) for row in self._store.execute("SELECT name, spec, begun FROM studies ORDER BY begun")]
        if studies != self._studies or runs:
            events += self._begun({name: _seconds(begun) for name, _, begun in studies})
            self._studies = studies
        for number, key, seconds, diverged, finished in runs:
            self._last = number
            self._seen.add(key)
            for name, cases in self._cases.items():
                if (case := cases.get(key)) is not None:
                    self._done[name] += 1
                    run = {"event": "run", "time": _seconds(finished), "study": name, "key": key, "seconds": seconds}
                    place = {"topology": case.graph_label, "nodes": case.nodes, "lr": case.lr, "seed": case.seed}
                    state = {"state": "diverged" if diverged else "done", "done": self._done[name], "of": len(cases)}
                    events.append({**run, "label": case.label, **place, **state, "metrics": self._final(number, case)})
        return events

    def _final(self, number: int, case: Case) -> dict[str, float]:
        metric = case.headline.metric
        final = "SELECT name, value FROM metrics WHERE run = ? AND name = ? AND step = ?"
        return dict(self._store.execute(final, [number, metric, case.steps]))

    def _begun(self, begun: dict[str, float]) -> list[Event]:
        """Studies that are new, or have more runs than were known: after the short ones come the full ones."""
        from klatsch.study.choices import screened

        events: list[Event] = []
        for remembered in self._store.studies():
            name = remembered.study.name
            cases = {case.key: case for case in screened(remembered.study, remembered.cases, self._store).cases}
            if cases.keys() != self._cases.get(name, {}).keys():
                self._cases[name], self._done[name] = cases, len(cases.keys() & self._seen)
                path, rows = self._store.path, {"rows": len(cases), "done": self._done[name]}
                events.append({"event": "study", "time": begun.get(name, 0.0), "name": name, "path": path, **rows})
        return events


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
