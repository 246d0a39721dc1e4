"""`klatsch crew`, `log`, `watch` and `checkpoint`: trainings on ranks, their members, events and files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import files
from klatsch.cli import terminal
from klatsch.cli.app import Exports, Group, app, command, examples, show_help
from klatsch.cli.terminal import AsJson, number, option, print_json, text, words
from klatsch.files import token_of
from klatsch.units import counted, duration, size

if TYPE_CHECKING:
    from klatsch.study.cases import Case
    from klatsch.study.store import Store
    from klatsch.watch.events import Event

KIND = "safetensors"
FINAL = "SELECT name, value FROM metrics WHERE run = ? AND name = ? AND step = ?"
REPORTED = ("round", "lag", "loss", "lr", "bytes", "waited", "waits", "consensus")  # of what members tell a registry
EXPENDABLE = ("neighbours", "address", "lr", "consensus", "skipped", "waited", "host", "lost")

# --- crews ------------------------------------------------------------------------------------------------------------

crew = typer.Typer(
    cls=Group,
    help="A crew that changes while it trains: its registry, joining it, and what it does.",
    epilog=examples("crew serve --token-file token", "crew join 10.0.0.1:4711 --token-file token -- python train.py"),
)
app.add_typer(crew, name="crew")
crew.callback(invoke_without_command=True)(show_help)

Where = Annotated[str, typer.Argument(help="Of the registry, and of others that may replace it.", metavar="HOST:PORT")]
Token = Annotated[Path | None, text("File with the crew's token.", "--token-file", metavar="FILE")]


@command("crew serve", "crew serve --token-file token", "crew serve --token-file token --port 5000", to=crew)
def serve(
    host: Annotated[str | None, text("Address to listen on (all with a token, else 127.0.0.1).")] = None,
    port: Annotated[int, option("Port to listen on.")] = 4711,
    token_file: Annotated[
        Path | None, text("File with the crew's token; made if there is none.", "--token-file", metavar="FILE")
    ] = None,
    least: Annotated[int, option("Begin as soon as N members are there (after 3 s with those there).")] = 0,
    timeout: Annotated[float, option("Seconds of silence after which a member is out.", parser=number)] = 10.0,
    quorum: Annotated[float, option("Share of an epoch that the next one must keep.", parser=number)] = 0.5,
) -> None:
    """Run the registry of a crew; no training stops if it ends, and a new one takes over."""
    from klatsch.ranks.registry import Coordinator, Registry

    for flag, value, holds, wanted in (
        ("port", port, 0 <= port < 1 << 16, "a port from 1 to 65535, or 0 for any"),
        ("least", least, least >= 0, "a number of members from 0 up"),
        ("timeout", timeout, 0.1 <= timeout <= 3600, "seconds from 0.1 to 3600"),
        ("quorum", quorum, 0 <= quorum <= 1, "a share from 0 to 1"),
    ):
        if not holds:
            raise ValueError(f"--{flag} {value:g}: give {wanted}")
    host = host or ("0.0.0.0" if token_file else "127.0.0.1")
    if token_file is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"--host {host}: without a token anyone could join; give --token-file FILE, which is made")
    token = token_of(token_file, make=True)

    def ready(bound: str, bound_port: int) -> None:
        own = outward() if bound == "0.0.0.0" else f"[{bound}]" if ":" in bound else bound
        _say(f"the registry of a crew listens on {bound}:{bound_port}; members join with")
        flag = f" --token-file {token_file}" if token_file else ""
        _say(f"    klatsch crew join {own}:{bound_port}{flag} -- python train.py")
        if not token_file:
            _say("from this machine only: it has no token (--token-file FILE makes one)")

    coordinator = Coordinator(timeout=timeout, least=least, quorum=quorum, tell=_say)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        asyncio.run(Registry(token, coordinator).serve(host, port, ready))
    except OSError as error:
        why = str(error.strerror).rpartition(": ")[2]  # without what asyncio says before it
        raise ValueError(f"cannot listen on {host}:{port}: {why}; give another --host or --port") from None


@command(
    "crew join 10.0.0.1:4711 --token-file token -- python train.py --lr 0.1",
    more="The command replaces this one and has KLATSCH_CREW and KLATSCH_CREW_TOKEN_FILE in its environment.",
    to=crew,
)
def join(
    address: Where,
    program: Annotated[list[str], typer.Argument(help="The command, after --.", metavar="-- COMMAND")],
    token_file: Token = None,
) -> None:
    """Run a training script as a member of a crew, at any time."""
    from klatsch.ranks.registry import address_of, connect

    addresses = [address_of(one) for one in words(address)]
    with suppress(OSError):  # no registry is there yet: the script waits for it
        connect(addresses, token_of(token_file), 1.0).socket.close()
    environment = os.environ | {"KLATSCH_CREW": address}
    if token_file is not None:
        environment["KLATSCH_CREW_TOKEN_FILE"] = str(token_file.resolve())
    sys.stdout.flush()
    try:
        os.execvpe(program[0], program, environment)  # so that signals and the exit code are the command's
    except OSError as error:
        raise ValueError(f"cannot run {program[0]!r}: {error.strerror}; give a command after --") from None


@command("crew status 10.0.0.1:4711 --token-file token", "crew status localhost:4711 --links --watch", to=crew)
def status(
    address: Where,
    token_file: Token = None,
    links: Annotated[bool, typer.Option("--links", help="Show how fast its links are.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who is in a crew, in which round, and how they are doing."""
    from klatsch.ranks.registry import address_of, ask

    addresses, token = [address_of(one) for one in words(address)], token_of(token_file)
    while True:
        told = ask(addresses, token, {"op": "status", "links": links or as_json})
        if watch and sys.stdout.isatty():
            terminal.console().clear()
        content = {name: told[name] for name in ("epoch", "start", "waits_for", "members", "facts")}
        if as_json:
            print_json(content)
        else:
            _show(content)
            if links:
                _show_links(content["members"])
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(1.0)


@command("crew drop 3fa9c1d2 10.0.0.1:4711 --token-file token", to=crew)
def drop(
    member: Annotated[str, typer.Argument(help="Its id, or how it begins, as klatsch crew status shows it.")],
    address: Where,
    token_file: Token = None,
) -> None:
    """Go on without a member, at once; it does not come back by itself."""
    from klatsch.ranks.registry import address_of, ask

    ask([address_of(one) for one in words(address)], token_of(token_file), {"op": "drop", "member": member})
    print(f"{member} was dropped")


def _show(content: dict[str, Any]) -> None:
    from klatsch.watch.events import shown

    if lines := shown(content["members"]):
        terminal.print_table(f"epoch {content['epoch']} from round {content['start']:,}", lines, EXPENDABLE)
    else:
        print("nobody trains yet")
    if content["waits_for"]:
        terminal.note(f"no change yet: {content['waits_for']}", "yellow")


def _show_links(members: list[dict[str, Any]]) -> None:
    lines = [
        {
            "from": row["member"],
            "to": other,
            "there and back": duration(trip),
            "a second": f"{size(rate)} or more" if rate else "",
        }
        for row in members
        for other, (trip, rate) in row.get("links", {}).items()
    ]
    if lines:
        terminal.print_table("links", lines)
    else:
        print("no links are known")


def _say(line: str) -> None:
    with suppress(OSError):  # whoever read it is gone; the crew is not
        print(line, flush=True)


def outward() -> str:
    """The address of this machine that others see; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # there is no way out of its network
            return socket.gethostname()


# --- logs -------------------------------------------------------------------------------------------------------------


@command("log runs/a", "log runs/a --csv events.csv", "log runs/a --json")
def log(
    folder: Annotated[Path, typer.Argument(help="The folder of Gossip(..., log=FOLDER), or of KLATSCH_LOG.")],
    exports: Exports,
    as_json: AsJson = False,
) -> None:
    """Show how the members of a training did, by their log; also while they train."""
    from klatsch.watch.events import Event, Folder, Members, shown

    exports.check()
    content, members, events = Folder(folder), Members(), 0
    first, last, studies, kept = float("inf"), 0.0, dict[str, Event](), list[Event]()
    for event in content:
        members.take(event)
        events, first, last = events + 1, min(first, event["time"]), max(last, event["time"])
        if event["event"] == "run":
            studies[str(event.get("study"))] = event
        if exports.files:
            kept.append(_flat(event))
    if not events:
        raise ValueError(f"there are no events in {folder}; give the folder of a log, with files such as 0.jsonl")
    if exports.files:
        columns = dict.fromkeys(("event", "time", "member", "round", *(name for record in kept for name in record)))
        exports.write([{name: record.get(name) for name in columns} for record in kept])
    if as_json:
        return print_json({"members": [*members.rows.values()], "events": events, "damaged": content.damaged})
    if lines := shown(members.in_order()):
        terminal.print_table(str(folder), lines, EXPENDABLE)
    for name, run in studies.items():
        print(f"study {name}: {run.get('done')} of {run.get('of')} runs")
    print(f"{counted(events, 'event')} in {duration(last - first)}")
    if content.damaged:
        terminal.note(f"{counted(content.damaged, 'line')} {'is' if content.damaged == 1 else 'are'} damaged", "yellow")
    for path in exports.files:
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
        from klatsch.ranks.registry import ask

        told = ask(self._addresses, self._token, {"op": "status"})
        rows = {str(row["member"]): row for row in told["members"]}
        members = [member for member, row in rows.items() if row["state"] != "waits"]
        events: list[Event] = []
        for member, row in rows.items():
            before = self._rows.get(member)
            if before is None:
                rule = {name: v for name, v in told["facts"].items() if name in ("rule", "topology", "wire")}
                events.append({"event": "start", "member": member, "host": row["host"], **rule})
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


class StudyEvents:
    """The studies of a store and their runs, as events."""

    def __init__(self, store: Store) -> None:
        self._store, self._last = store, 0
        self._studies: list[tuple[str, ...]] = []
        self._cases: dict[str, dict[str, Case]] = {}  # of every study, by key
        self._seen: set[str] = set()  # keys of runs
        self._done: dict[str, int] = {}  # runs of every study

    def new(self) -> list[Event]:
        events: list[Event] = []
        runs = self._store.execute(
            "SELECT id, key, seconds, diverged, finished FROM runs WHERE id > ? ORDER BY id", [self._last]
        )
        studies = [tuple(row) for row in self._store.execute("SELECT name, spec, begun FROM studies ORDER BY begun")]
        if studies != self._studies or runs:
            events += self._begun({name: _seconds(begun) for name, _, begun in studies})
            self._studies = studies
        for row, key, seconds, diverged, finished in runs:
            self._last = row
            self._seen.add(key)
            for name, cases in self._cases.items():
                if (case := cases.get(key)) is not None:
                    self._done[name] += 1
                    run = {"event": "run", "time": _seconds(finished), "study": name, "key": key, "seconds": seconds}
                    place = {"topology": case.graph_label, "nodes": case.nodes, "lr": case.lr, "seed": case.seed}
                    state = {"state": "diverged" if diverged else "done", "done": self._done[name], "of": len(cases)}
                    final = dict(self._store.execute(FINAL, [row, case.headline.metric, case.steps]))
                    events.append({**run, "label": case.label, **place, **state, "metrics": final})
        return events

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


# --- checkpoints ------------------------------------------------------------------------------------------------------


@command(
    "checkpoint checkpoints",
    "checkpoint checkpoints --export model.safetensors",
    "checkpoint checkpoints --json",
    more="If every machine has a folder of its own, copy them into one first. Only an export compares checksums.",
)
def checkpoint(
    folder: Annotated[Path, typer.Argument(help="The folder of a klatsch.Checkpointer.")],
    export: Annotated[
        Path | None, text("Write the merged model of the newest complete round, by parameter names.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the checkpoints of a training, or export the merged model, without the training script."""
    from klatsch.ranks import saved
    from klatsch.ranks.failures import shown

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that klatsch.Checkpointer writes to")
    if export is not None and export.suffix != f".{KIND}":
        raise ValueError(f"--export {export}: give a name that ends in .{KIND}, such as model.{KIND}")
    held = saved.files(folder)
    if not held:
        raise ValueError(f"{folder} holds no checkpoints of klatsch.Checkpointer, such as {saved.name(0, None, 100)}")
    if export is not None:
        files.check_output(export, KIND, *(file.path for file in held))
    sound = [file for file in held if not file.error]
    rounds = saved.rounds_of(file.seen for file in sound)
    best = next((each for each in rounds if each.lacks() <= 0), None)
    lines = []
    for each in sorted(rounds, key=lambda each: (each.training[0], each.rounds, len(each.training))):
        of_round = [file for file in sound if (file.seen.training, file.seen.rounds) == each[:2]]
        state = "complete" if each.lacks() <= 0 else f"lacks {shown(sorted(each.crew - each.held))}"
        lines.append(
            {
                "training": each.training[0][:8],
                "round": f"{each.rounds:,}",
                "rule": str(of_round[0].header["run"].get("rule")),
                "topology": of_round[0].header["topology"].rpartition(" ")[0],
                "ranks": shown(sorted(each.held)).partition(" ")[2],
                "gone": shown(gone).partition(" ")[2] if (gone := sorted({*range(each.size)} - each.crew)) else "",
                "size": size(sum(file.path.stat().st_size for file in of_round)),
                "state": state + " (newest)" * (each is best),
            }
        )
    errors = [file.error for file in held if file.error]
    if as_json:
        print_json({"rounds": lines, "errors": errors, "newest": None if best is None else best.rounds})
    elif lines:
        terminal.print_table(f"{folder}", lines, ["training", "topology", "gone", "size"])
    for error in errors:
        terminal.note(error, "yellow")
    if export is None:
        if best is not None:
            terminal.note(f"klatsch checkpoint {folder} --export model.{KIND} writes the model of round {best.rounds}")
        return
    from safetensors.torch import save

    from klatsch.optim.checkpointer import merged_of

    if best is None:
        raise ValueError(f"no round in {folder} is complete; bring the files of all its ranks together first")
    model, ranks = merged_of(held, best), sorted(best.crew & best.held)
    facts = {"rounds": best.rounds, "ranks": ranks, "training": best.training[0]}
    files.save(export, save(model, {"format": "pt", "klatsch": json.dumps(facts)}), KIND)
    numbers = f"{len(model)} tensors with {sum(v.numel() for v in model.values()):,} numbers"
    print(f"written to {export}: {numbers}, the mean of {len(ranks)} ranks after round {best.rounds}")
