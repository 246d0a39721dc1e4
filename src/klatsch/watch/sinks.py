"""Where events go, by name: a folder, "terminal", "tensorboard:FOLDER", "wandb:PROJECT", trackio and MLflow."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from klatsch.extras import need
from klatsch.files import folder_for
from klatsch.units import size
from klatsch.watch.events import Event, Folder, Lines, Sink, is_number

if TYPE_CHECKING:
    from rich.table import Table

Run = Any  # of a library that may not be there
ENVIRONMENT = "KLATSCH_LOG"  # for scripts that say nothing themselves; several by commas
Given = str | Path | Sink | Sequence[str | Path | Sink] | None
ABOUT = ("event", "time", "member", "round")  # what numbers are about, and no numbers themselves
ROW = ("state", "host", "lost", "events", "last", "started", "saved")  # of a member, and no numbers of a round
SILENT = 60.0  # seconds after which a member that says nothing is not shown
PRINTED = 30.0  # seconds between two tables that are printed to what is no terminal


def sinks_of(given: Given) -> list[Sink]:
    """The sinks that a user names, or that the environment does."""
    if given is None:
        given = list(filter(None, map(str.strip, os.environ.get(ENVIRONMENT, "").split(","))))
    return [*map(_sink, given if isinstance(given, list | tuple) else [given])]


def _sink(given: str | Path | Sink) -> Sink:
    if callable(given):
        return given
    if not isinstance(given, str | Path) or not str(given):
        wanted = "a folder, a function of an event, or one of " + ", ".join(BY_NAME)
        raise ValueError(f"log = {given!r}; give {wanted}")
    name, colon, place = str(given).partition(":")
    if colon and name.isalpha() and name not in BY_NAME and not isinstance(given, Path):
        names = ", ".join(BY_NAME)
        raise ValueError(f"log = {given!r}: there is no {name}; give one of {names}, or a folder as ./{given}")
    try:
        return BY_NAME[name](place) if name in BY_NAME else Lines(given)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # of a tool that is not set up
        raise ValueError(f"log = {str(given)!r}: {str(error).partition(chr(10))[0] or type(error).__name__}") from None


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of a round by name; those by neighbour are waits/NEIGHBOUR."""
    if event["event"] != "round":
        return {}
    flat = event | {f"waits/{name}": seconds for name, seconds in event.get("waits", {}).items()}
    return {name: v for name, v in flat.items() if name not in ABOUT and isinstance(v, int | float)}


def words_of(event: Event) -> str:
    """An event in words: lost 3 (connection closed)."""
    facts = [str(event[name]) for name in ("neighbour", "epoch", "path") if name in event]
    return " ".join([event["event"], *facts, *([f"({event['why']})"] if event.get("why") else [])])


class Members:
    """How members are doing, by what they have told last: one row each."""

    def __init__(self) -> None:
        self.rows: dict[str, Event] = {}

    def take(self, event: Event) -> None:
        """Take in an event."""
        if (member := event.get("member")) is None:
            return
        row = self.rows.setdefault(member, {"member": member, "state": "trains", "round": 0, "lost": [], "events": 0})
        row |= {"events": row["events"] + 1, "last": event["time"]}
        row["state"] = "trains" if row["state"] == "gone" else row["state"]
        match event:
            case {"event": "round", **facts}:
                row |= {name: v for name, v in facts.items() if name not in ("time", "member", "waits", *ROW)}
            case {"event": "start", **facts}:
                row |= {"state": "trains", "lost": [], "host": facts.get("host", "")}
                row["started"] = row.get("started", 0) + 1
            case {"event": "epoch"}:
                row["epoch"] = event.get("epoch")
            case {"event": "lost", "neighbour": neighbour}:
                row["lost"] = [*row["lost"], str(neighbour)]
                other = self.rows.get(str(neighbour), {})
                other |= {"state": "gone"} if other.get("state") == "trains" else {}  # until it says something
            case {"event": "back", "neighbour": neighbour}:
                row["lost"] = [name for name in row["lost"] if name != str(neighbour)]
            case {"event": "checkpoint"}:
                row["saved"] = event.get("round")
            case {"event": "end"} if row["state"] == "trains":
                row["state"] = "ended"
            case {"event": "left" | "dropped" as state}:
                row["state"] = state

    def in_order(self) -> list[Event]:
        """The rows by member, 2 before 10."""
        return sorted(self.rows.values(), key=lambda row: (len(row["member"]), row["member"]))


def shown(rows: Iterable[Event]) -> list[dict[str, str]]:
    """Rows of members as texts, in the columns that some of them have."""

    def text(value: object) -> str:
        return "" if not is_number(value) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"

    lines = [
        {
            "member": row["member"],
            "host": str(row.get("host", "")),
            "address": str(row.get("address", "")),
            "state": row["state"],
            "round": text(row["round"]),
            "lag": text(row.get("lag")),
            "loss": text(row.get("loss")) if row.get("loss", "") is not None else "nan",
            "lr": text(row.get("lr")),
            "consensus": text(row.get("consensus")),
            "sent": size(int(row["bytes"])) if is_number(row.get("bytes")) else "",
            "waited": f"{row['waited']:.1f} s" if is_number(row.get("waited")) else "",
            "skipped": text(row.get("skipped")),
            "neighbours": ", ".join(map(str, row.get("neighbours", ()))),
            "lost": ", ".join(map(str, row.get("lost", ()))),
        }
        for row in rows
    ]
    used = {name for line in lines for name in line if line[name]}
    return [{name: cell for name, cell in line.items() if name in used} for line in lines]


class Terminal:
    """Shows a line for every member on this machine: one of their processes does, on a terminal or every 30 s in a log.

    Processes of one training tell each other through a folder of temporary files, which the last one removes.
    """

    def __init__(self, _: str = "") -> None:
        need("log = 'terminal'", "rich")
        from rich.console import Console
        from rich.live import Live

        crew, launcher = os.environ.get("KLATSCH_CREW"), f"{os.getppid()}-{os.environ.get('MASTER_PORT', os.getpid())}"
        name = re.sub(r"[^\w.-]", "-", f"klatsch-{os.getuid()}-{crew or launcher}")
        folder = Path(tempfile.gettempdir(), name)
        with suppress(OSError):
            folder.mkdir(0o700)  # whatever the umask is
        self._lines = Lines(folder)
        if (status := self._lines.folder.lstat()).st_uid != os.getuid() or status.st_mode & 0o22:
            raise ValueError(
                f"{self._lines.folder} belongs to another user; remove it, or set TMPDIR to your own folder"
            )
        self._folder, self._members = Folder(self._lines.folder), Members()
        self._console, self._open, self._printed = Console(stderr=True, emoji=False), ExitStack(), time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False)
        self._shows: bool | None = None if os.environ.get("LOCAL_RANK", "0") == "0" else False  # None: not yet
        self._there: TextIO | None = None  # a file that is locked while this process lives

    def __str__(self) -> str:
        return "terminal"

    def __call__(self, event: Event) -> None:
        """Tell the others of an event, and show what they tell, if it is this process's turn."""
        self._lines(event)
        if self._there is None:
            self._there = self._locked("there", fcntl.LOCK_SH)
        if self._shows is None:
            self._shows = self._takes_turn()
        if self._shows:
            self._show(event["event"] == "end")
        if event["event"] == "end":
            self._open.close()
            with self._there, suppress(BlockingIOError):  # others are there
                fcntl.flock(self._there, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._lines.folder, ignore_errors=True)

    def _show(self, is_over: bool) -> None:
        while events := self._folder.new():
            for told in events:
                self._members.take(told)
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)
        elif is_over or time.monotonic() > self._printed + PRINTED:
            self._printed = time.monotonic()
            self._console.print(self._table())

    def _locked(self, name: str, how: int) -> TextIO:
        file = (self._lines.folder / name).open("w")
        try:
            fcntl.flock(file, how)
        except OSError:
            file.close()
            raise
        return file

    def _takes_turn(self) -> bool | None:
        try:
            self._open.enter_context(self._locked("shows", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return None
        if self._console.is_terminal:
            self._open.enter_context(self._live)
        return True

    def _table(self) -> Table:
        from rich.table import Table

        now = time.time()
        lines = shown(row for row in self._members.in_order() if row["last"] > now - SILENT)
        table = Table(*(lines[0] if lines else ()), box=None, padding=(0, 2, 0, 0))
        for line in lines:
            table.add_row(*line.values())
        return table


class Runs:
    """Numbers of rounds for a tool that calls what it shows runs: one for every member."""

    def __init__(
        self,
        name: str,
        begin: Callable[[str, Event], Run],
        tell: Callable[[Run, Event], object],
        end: Callable[[Run], object],
    ) -> None:
        self._name, self._begin, self._tell, self._end = name, begin, tell, end
        self._runs: dict[str, Run] = {}

    def __str__(self) -> str:
        return self._name

    def __call__(self, event: Event) -> None:
        """Begin a run for a new member, tell it of an event, or end all."""
        if event["event"] == "end":
            while self._runs:
                self._end(self._runs.popitem()[1])
            return
        member = re.sub(r"[^\w-]", "-", str(event.get("member", "study")))
        if member not in self._runs:
            self._runs[member] = self._begin(member, event)
        self._tell(self._runs[member], event)


def tensorboard(folder: str) -> Sink:
    """Scalars of rounds and texts of other events for TensorBoard."""
    need("log = 'tensorboard:FOLDER'", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    place = folder_for("a log", folder or "runs")

    def tell(writer: Run, event: Event) -> None:
        step, when = event.get("round", 0), event["time"]
        if event["event"] != "round":
            writer.add_text("events", words_of(event), step, when)
        for name, value in numbers_of(event).items():
            writer.add_scalar(name, value, step, when)

    def begin(member: str, _: Event) -> SummaryWriter:
        return SummaryWriter(str(place / member), flush_secs=10)

    return Runs(f"tensorboard:{place}", begin, tell, SummaryWriter.close)


def tracker(library: str, project: str, **options: str) -> Sink:
    """W&B, or trackio, which is called in the same way."""
    need(f"log = '{library}:PROJECT'", library)
    init, project = import_module(library).init, project or "klatsch"

    def begin(member: str, event: Event) -> object:
        config = {name: v for name, v in event.items() if isinstance(v, str | int | float)}
        return init(project=project, name=member, config=config, **options)

    def tell(run: Run, event: Event) -> None:
        if numbers := numbers_of(event):
            run.log(numbers, step=event["round"])

    return Runs(f"{library}:{project}", begin, tell, lambda run: run.finish())


def mlflow(experiment: str) -> Sink:
    """MLflow."""
    need("log = 'mlflow:EXPERIMENT'", "mlflow")
    library, experiment = import_module("mlflow"), experiment or "klatsch"
    client, number = library.MlflowClient(), library.set_experiment(experiment).experiment_id

    def tell(run: str, event: Event) -> None:
        for name, value in numbers_of(event).items():
            client.log_metric(run, name, value, int(event["time"] * 1000), event["round"])

    def begin(member: str, _: Event) -> object:
        return client.create_run(number, run_name=member).info.run_id

    return Runs(f"mlflow:{experiment}", begin, tell, client.set_terminated)


BY_NAME: dict[str, Callable[[str], Sink]] = {
    "terminal": Terminal,
    "tensorboard": tensorboard,
    "wandb": partial(tracker, "wandb", reinit="create_new"),
    "trackio": partial(tracker, "trackio"),
    "mlflow": mlflow,
}
