"""`klatsch run`, `demo` and `reproduce`: studies from a few options, from a file, and those that come with klatsch."""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch import catalogue, pictures
from klatsch.cli import terminal
from klatsch.cli.app import Plotting, Settings, assigned, command, parameters_of, setting
from klatsch.cli.parts import use_folder
from klatsch.cli.results import plain, print_rows, print_verdicts
from klatsch.cli.terminal import AsJson, Data, option, print_json, text, words
from klatsch.files import folder_for
from klatsch.units import counted, duration

if TYPE_CHECKING:
    from klatsch.report.pages import Page
    from klatsch.study import workers
    from klatsch.study.cases import Case, LeftOut
    from klatsch.study.execute import Progress, StudyResult, Told
    from klatsch.study.spec import Study
    from klatsch.study.store import Store

GRID = "0.0001,0.0005,0.001,0.005,0.01,0.05,0.1"  # the paper's
LONG = 60.0  # seconds from which a study is worth a line in a log
TENTHS = 10  # lines in the log of a long study
ELSEWHERE = "choose another with --out"


@dataclass(frozen=True)
class Comparison:
    """What to run, if no file is given."""

    rules: Annotated[str | None, text("Rules to compare (dat,dsgd).", metavar="NAMES")] = None
    topology: Annotated[str | None, text("Topologies (ring).", "-t", "--topology", metavar="NAMES")] = None
    nodes: Annotated[str | None, text("Numbers of nodes (16).", "-n", "--nodes", metavar="N,...")] = None
    problem: Annotated[str | None, text("Problem to solve (least-squares).")] = None
    settings: Annotated[
        Settings, setting("An option of a rule, topology or problem: momentum=0.9, or noise=1,10 for both values")
    ] = None
    steps: Annotated[int | None, option("Rounds (10,000).", "--steps")] = None
    epochs: Annotated[int | None, option("Epochs, instead of rounds (fashion-mnist).")] = None
    lr: Annotated[str | None, text("Learning rates to choose from (the paper's seven).", metavar="X,...")] = None
    schedule: Annotated[
        str | None, text("Learning rate schedules: constant, cosine, linear (constant).", metavar="NAMES")
    ] = None
    seeds: Annotated[int | None, option("Number of seeds: 0, 1, 2 (3).", "--seeds")] = None
    lazy: Annotated[bool, typer.Option("--lazy", help="Mix with (I + P) / 2.")] = False
    any_graph: Annotated[bool, typer.Option("--any-graph", help="Run even if a rule refuses the graph.")] = False
    float32: Annotated[bool, typer.Option("--float32", help="Compute in float32, which is faster.")] = False

    def refuse_beside_a_file(self) -> None:
        """Refuse options that belong in the file."""
        given = [field.name for field in fields(self) if vars(self)[field.name] != field.default]
        if given:
            flag = {"settings": "set"}.get(given[0], given[0]).replace("_", "-")
            raise ValueError(f"--{flag} does not go with a study file; write it into the file")

    def study(self) -> Study:
        """The study; an option goes to everything that has it, and what does not fit is left out."""
        from klatsch.own import label
        from klatsch.rules import WHY_NOT
        from klatsch.simulation import simulate
        from klatsch.study import spec

        rules, topologies = words(self.rules or "dat,dsgd"), words(self.topology or "ring")
        owners = [("rule", name) for name in rules] + [("topology", name) for name in topologies]
        owners.append(("problem", self.problem or "least-squares"))
        options = {owner: dict(parameters_of(*owner)) for owner in owners}
        for name in topologies:
            options["topology", name]["meets"] = inspect.signature(simulate).parameters["meets"]
        chosen = assigned(self.settings, options, WHY_NOT)
        entry = {owner: {"name": owner[1], **chosen[owner]} for owner in owners}
        steps = 10_000 if self.steps is None and self.epochs is None else self.steps
        content = {
            "problem": entry[owners[-1]],
            "nodes": [terminal.whole(word) for word in words(self.nodes or "16")],
            "lr": [terminal.number(word) for word in words(self.lr or GRID)],
            **({"schedule": words(self.schedule)} if self.schedule else {}),
            **{name: n for name, n in (("steps", steps), ("epochs", self.epochs)) if n is not None},
            "seeds": 3 if self.seeds is None else self.seeds,
            "dtype": "float32" if self.float32 else "float64",
            "any_graph": self.any_graph,
            "rules": [entry["rule", name] for name in rules],
            "topologies": [entry["topology", name] | {"lazy": self.lazy} for name in topologies],
            "leave_out": True,
        }
        # Two comparisons in one store are two studies, whatever they have in common.
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
        title = f"{' '.join(map(label, rules))} on {' '.join(map(label, topologies))}"
        return spec.parse({**content, "name": f"{title[:90]} ({digest})"})


@dataclass(frozen=True)
class Workplace:
    """Where runs are computed and kept."""

    device: Annotated[str | None, text("cpu or cuda.")] = None
    store: Annotated[Path | None, text("File for the results (beside the study file).", metavar="PATH")] = None
    processes: Annotated[int | None, option("Worker processes (one per core).", "--workers")] = None
    dask: Annotated[str | None, text("Run on the Dask cluster at ADDRESS.", metavar="ADDRESS")] = None
    data: Data = None
    log: Annotated[str | None, text("Folder for events, for klatsch log and watch.", metavar="FOLDER")] = None

    @contextmanager
    def finished(
        self, study: Study, expanded: tuple[list[Case], list[LeftOut]], place: Path | None, folder: Path | None = None
    ) -> Iterator[tuple[StudyResult, Store]]:
        """Run what is missing of a study; the result, and the store in a file or in memory.

        What cannot run is refused before anything is written; then the folder is made.
        """
        from klatsch.study import workers
        from klatsch.study.execute import check_ready, is_unfinished, run_study
        from klatsch.study.store import Store

        executor = self._executor(study.device, in_memory=place is None)
        unmade = folder is not None and not folder.is_dir() and place is not None and place.parent == folder
        with Store(":memory:" if place is None or unmade else place) as store:
            if self.dask is None:
                check_ready(study, expanded[0], store)
            elif is_unfinished(study, expanded[0], store):  # finished runs can be shown without the cluster
                with workers.dask(self.dask):
                    pass
        if folder is not None:
            folder_for("results", folder, ELSEWHERE)
        with Store(":memory:" if place is None else place) as store:
            command = shlex.join(["klatsch", *sys.argv[1:]])
            with narrated(store) as told:
                done = run_study(
                    study, store, executor=executor, told=told, expanded=expanded, command=command, log=self.log
                )
            yield done, store

    def _executor(self, device: str, in_memory: bool) -> workers.Open | None:
        """What runs the batches."""
        from klatsch.study import workers

        count, dask = self.processes, self.dask
        if count is not None and not 1 <= count <= workers.MOST_WORKERS:
            raise ValueError(f"--workers {count}: give a number from 1 to {workers.MOST_WORKERS:,}")
        if count is not None and (dask is not None or device != "cpu"):
            raise ValueError(f"--workers {count}: leave it out; a cluster and a GPU have their own")
        if dask is not None:
            return lambda: workers.dask(dask)
        if device == "cpu" and in_memory:
            return lambda: workers.threads(count)  # which start at once
        return None if count is None else lambda: workers.processes(count)


@contextmanager
def narrated(store: Store) -> Iterator[Told]:
    """A function to call with the progress of a study: a bar on a terminal, a few lines in the log of a long one.

    On Ctrl-C it says what is saved and how to continue.
    """
    printed: list[int] = []

    def log(progress: Progress) -> None:
        left = progress.seconds_left
        if left is None or progress.seconds + left < LONG:
            return
        if not printed:
            total = duration(progress.seconds + left)
            print(f"projected: {total} for {progress.runs:,} runs in {progress.batches:,} batches", file=sys.stderr)
        if (tenth := TENTHS * progress.work_done // max(progress.work, 1)) not in printed:
            print(_facts(progress), file=sys.stderr, flush=True)
            printed.append(tenth)

    try:
        with terminal.bar() as bar:
            yield log if bar is None else lambda p: bar(_facts(p), p.work_done / max(p.work, 1))
    except KeyboardInterrupt:
        if store.path != ":memory:":
            done = len(store.done())
            print(f"stopped; {store.path} holds {done:,} runs; the same command continues from here", file=sys.stderr)
        raise


def _facts(progress: Progress) -> str:
    """Batches done, runs per second, time left, best so far."""
    parts = [f"{progress.batches_done}/{progress.batches} batches"]
    if progress.runs_done:
        parts.append(f"{progress.runs_per_second:.3g} runs/s")
    if (left := progress.seconds_left) is not None and left > 0:
        parts.append(f"{duration(left)} left")
    if progress.elsewhere:
        parts.append(f"waiting for {progress.elsewhere} that other processes run")
    if progress.best is not None:
        error, case = progress.best
        parts.append(f"best {error:.2g} ({case.label}, {case.graph_label}, M={case.nodes}, lr {case.lr:g})")
    return ", ".join(parts)


@command(
    "run study.toml --plot errors.svg",
    "run --rules dat,dsgd --topology ring,torus -n 4,9 --steps 1000",
    "run --rules dat -t ring/8 --set late=7 --set wire=float32,int8",
    "run --problem logistic --set batch=8 --rules dat,gt --lr 0.1,0.5 -n 8",
    more="For each rule, topology and size, the best learning rate of the grid is shown. "
    f"Rules: {', '.join(catalogue.RULES)}. Problems: {', '.join(catalogue.PROBLEMS)}. "
    "Separate names and numbers by commas. Topology ring/8 gossips only in every 8th round; "
    "late and wire set how messages travel. "
    "FILE.py:NAME is your own rule, topology or problem; the file is executed.",
)
def run(
    comparison: Comparison,
    workplace: Workplace,
    figure: Plotting,
    file: Annotated[Path | None, typer.Argument(help="A study file; without one, options say what to run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a study from a TOML file, or compare rules on topologies by a few options."""
    from klatsch.report.pages import Outline
    from klatsch.study import spec
    from klatsch.study.cases import expand
    from klatsch.study.choices import timed

    use_folder(workplace.data)
    clock = figure.clock()
    if file is not None and file.exists():  # load names one that does not
        comparison.refuse_beside_a_file()
    study = comparison.study() if file is None else spec.load(file)
    study = study if workplace.device is None else study.model_copy(update={"device": workplace.device})
    try:
        expanded = expand(study)
        outline = Outline.of(study, expanded[0])
    except ValueError as refusal:
        raise ValueError(f"{file}: {refusal}" if file is not None else str(refusal)) from None
    place = workplace.store if workplace.store is not None or file is None else file.with_suffix(".sqlite")
    with workplace.finished(study, expanded, place) as (done, _):
        rows = timed(done.rows, clock)
    if as_json:
        content: dict[str, object] = {"rows": list(map(plain, rows)), "left_out": [i._asdict() for i in done.left_out]}
        try:
            if verdicts := outline.verdicts(done.rows):
                content["verdicts"] = list(map(asdict, verdicts))
        finally:  # rows are told whatever can be said of them
            print_json(content)
    else:
        print_rows(rows, done.left_out, title_of(study), study.device, clocked=clock is not None)
        print_verdicts(outline.verdicts(done.rows))
        if place is None:
            terminal.note("the results are not kept; --store results.sqlite keeps them")
        else:
            damaged = done.progress.damaged
            again = f" ({damaged:,} {'was' if damaged == 1 else 'were'} damaged)" if damaged else ""
            print(f"{counted(done.progress.runs_done, 'run')} new{again}, results in {place}")
    across = "nodes" if len(study.nodes) > 1 and figure.against == "rounds" else ""
    figure.draw(rows, title_of(study), across, outline)


@command("demo", "demo --full", "demo --steps 2000")
def demo(
    out: Annotated[Path, text("Folder for the figure.", metavar="FOLDER")] = Path(),
    steps: Annotated[int | None, option("Rounds (10,000; 20,000 with --full).", "--steps")] = None,
    seeds: Annotated[int | None, option("Number of seeds (1; 2 with --full).", "--seeds")] = None,
    full: Annotated[bool, typer.Option("--full", help="Up to 49 machines, as in the README; takes minutes.")] = False,
) -> None:
    """Compare DAT-SGD with D-SGD and others on three graphs: how many machines help? Takes a minute."""
    from klatsch.report.pages import Outline
    from klatsch.study import spec
    from klatsch.study.cases import expand

    changes = {name: value for name, value in (("steps", steps), ("seeds", seeds)) if value is not None}
    study = spec.parse(spec.content_of("demo", "full" if full else "quick") | changes)
    files = [out / f"klatsch-demo{suffix}" for suffix in (".png", ".svg")]
    for file in files:
        pictures.check_path(file)
    expanded = expand(study)
    outline = Outline.of(study, expanded[0])
    with Workplace().finished(study, expanded, None) as (done, _):
        # The remedies that follow a reason are options of klatsch run, which the demo does not have.
        left_out = [item._replace(reason=item.reason.partition(";")[0]) for item in done.left_out]
    print_rows(done.rows, left_out, title_of(study))
    print_verdicts(outline.verdicts(done.rows))
    ((_, figure),) = outline.drawn(done.rows, study.name, title_of(study))
    for file in files:
        pictures.save(figure, file, dpi=160)
    print(f"drawn to {' and '.join(map(str, files))}")


def title_of(study: Study) -> str:
    """What the errors of a study are."""
    from klatsch import problems

    measured = problems.declared(study.problem.name).headline.text
    return f"{study.problem.label}: {measured}, {study.length}, {study.choice}"


@command(
    "reproduce table1",
    "reproduce fig1 --out results",
    "reproduce fig2 --scale paper --device cuda --data ~/fashion-mnist",
    "reproduce fig2 --of worst",
    more=f"TARGET is one of {', '.join(catalogue.TARGETS)}. "
    "Runs what the store does not hold yet, draws PNG, SVG and PDF, writes the numbers as CSV and Markdown, and checks "
    "each sentence. `beyond` adds rules, beta and decay to figure 1. `averages` tries weights and query "
    "points, `schedules` compares the best of them and baselines with and without decay, `orders` mixes after or "
    "before the step, `local-steps` is accuracy against bytes; `schedule-free` is averages, schedules and beyond. "
    "`channels` (least squares) and `images-channels`, together `slow-networks`, show what fewer bytes, late messages "
    "and local steps cost and save. `stragglers` compares ways not to wait for slow nodes. `language` trains small "
    "GPTs with Adam: all rules, then links and sizes.",
)
def reproduce(
    target: Annotated[str, typer.Argument(help="What to reproduce.")],
    workplace: Workplace,
    scale: Annotated[str, text("quick: minutes on two cores; paper: all sizes and rounds, 3 seeds.")] = "quick",
    out: Annotated[Path, text("Folder for figures and tables.", metavar="FOLDER")] = Path("klatsch-paper"),
    dtype: Annotated[str | None, text("float32 (the default on a CPU) or float64 (on a GPU).")] = None,
    epochs: Annotated[int | None, option("Epochs of the image studies (50 at paper scale).")] = None,
    of: Annotated[str, text("What to show: mean (of the nodes), merged (model) or worst (node).")] = "mean",
    as_json: AsJson = False,
) -> None:
    """Reproduce a figure or table of the paper, or a study of ours."""
    from klatsch.arguments import named
    from klatsch.report import pages
    from klatsch.report.tables import TABLES
    from klatsch.study import spec
    from klatsch.study.cases import expand
    from klatsch.study.choices import BESIDE

    named("target", target, dict.fromkeys(catalogue.TARGETS))
    named("--of", of, dict.fromkeys(("mean", *BESIDE)))
    named("scale", scale, dict.fromkeys(("quick", "paper")))
    parts = catalogue.GROUPS.get(target, (target,))
    if target in TABLES and (epochs is not None or workplace.data is not None or of != "mean"):
        raise ValueError(f"{target} trains nothing; leave --epochs, --data and --of out")
    if len(parts) > 1 and (epochs is not None or dtype is not None):
        raise ValueError(f"{target} is {', '.join(parts)}; leave --epochs and --dtype out, or give one of these")
    use_folder(workplace.data)
    made: list[tuple[Page, float]] = []
    if target in TABLES:
        folder_for("results", out, ELSEWHERE)
        made.append((TABLES[target](), 0.0))
    else:
        for study in [spec.study_of(part, scale, workplace.device or "cpu", dtype, epochs) for part in parts]:
            place = out / "results.sqlite" if workplace.store is None else workplace.store
            with workplace.finished(study, expand(study), place, out) as (done, store):
                page = pages.page_of(done.remembered, store, None if of == "mean" else of)
            made.append((page, done.progress.seconds))
    written = [(page, seconds, pages.write(page, out)) for page, seconds in made]
    if as_json:
        kept = ("title", "facts", "verdicts", "notes", "header", "table")
        contents = [
            {name: vars(page)[name] for name in kept}
            | {"verdicts": list(map(asdict, page.verdicts)), "files": list(map(str, paths))}
            for page, _, paths in written
        ]
        return print_json(contents[0] if len(contents) == 1 else {"pages": contents})
    for page, seconds, paths in written:
        _print(page, paths, seconds, with_table=target in TABLES)  # those of studies are long


def _print(page: Page, paths: list[Path], seconds: float, with_table: bool) -> None:
    terminal.note(page.title, "bold")
    for fact in page.facts:
        terminal.note(fact)
    if with_table:
        lines = [dict(zip(page.header, line, strict=True)) for line in page.table]
        terminal.print_table("", lines, expendable=page.header[-1:])
    print_verdicts(page.verdicts)
    for note in page.notes:
        terminal.note(f"note: {note}")
    if seconds:
        print(f"{duration(seconds)} of running")
    print(f"written: {', '.join(map(str, paths))}")
