"""`klatsch run` and `klatsch demo`: a study from a file, or rules side by side from a few options."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch import catalogue
from klatsch.cli import narration, terminal
from klatsch.cli.app import Settings, Timing, check_known, command, parameters_of, setting, split, typed
from klatsch.cli.data import use_folder
from klatsch.cli.rows import plain, print_rows, print_verdicts
from klatsch.cli.terminal import AsJson, Data, option, print_json, text, words

if TYPE_CHECKING:
    from klatsch.study import workers
    from klatsch.study.cases import Case
    from klatsch.study.spec import Study
    from klatsch.study.store import Store

GRID = "0.0001,0.0005,0.001,0.005,0.01,0.05,0.1"  # the paper's


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
        str | None, text("How learning rates change: constant, cosine, linear (constant).", metavar="NAMES")
    ] = None
    seeds: Annotated[int | None, option("Number of seeds: 0, 1, 2 (3).", "--seeds")] = None
    lazy: Annotated[bool, typer.Option("--lazy", help="Graphs mix with (I + P) / 2.")] = False
    any_graph: Annotated[bool, typer.Option("--any-graph", help="Run even where a rule refuses the graph.")] = False
    float32: Annotated[bool, typer.Option("--float32", help="Compute in float32: faster.")] = False

    def refuse_beside_a_file(self) -> None:
        """Refuse options that belong in the file."""
        given = [field.name for field in fields(self) if vars(self)[field.name] != field.default]
        if given:
            flag = {"settings": "set", "any_graph": "any-graph"}.get(given[0], given[0])
            raise ValueError(f"--{flag} does not go with a study file; write it into the file")

    def study(self) -> Study:
        """The study; an option goes to everything that has it, and what does not fit is left out."""
        from klatsch.own import label
        from klatsch.rules import WHY_NOT
        from klatsch.simulation import simulate
        from klatsch.study import spec

        rules, topologies = words(self.rules or "dat,dsgd"), words(self.topology or "ring")
        problem, given = self.problem or "least-squares", split(self.settings)
        owners = [("rule", name) for name in rules] + [("topology", name) for name in topologies]
        options = {(kind, name): dict(parameters_of(kind, name)) for kind, name in [*owners, ("problem", problem)]}
        for name in topologies:
            options["topology", name]["meets"] = inspect.signature(simulate).parameters["meets"]
        check_known(given, {label(name): known for (_, name), known in options.items()}, WHY_NOT)
        entry = {owner: {"name": owner[1], **typed(given, known)} for owner, known in options.items()}
        steps = 10_000 if self.steps is None and self.epochs is None else self.steps
        length = {"steps": steps, "epochs": self.epochs}
        content = {
            "problem": entry["problem", problem],
            "nodes": [terminal.whole(word) for word in words(self.nodes or "16")],
            "lr": [terminal.number(word) for word in words(self.lr or GRID)],
            **({"schedule": words(self.schedule)} if self.schedule else {}),
            **{name: count for name, count in length.items() if count is not None},
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
class Crew:
    """Where runs are computed and kept."""

    device: Annotated[str | None, text("cpu or cuda.")] = None
    store: Annotated[Path | None, text("File for the results (beside the study file).", metavar="PATH")] = None
    processes: Annotated[int | None, option("Worker processes (one per core).", "--workers")] = None
    dask: Annotated[str | None, text("Run on the Dask cluster at ADDRESS.", metavar="ADDRESS")] = None
    data: Data = None

    def executor(self, device: str, in_memory: bool = False) -> workers.Open | None:
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

    def check(self, study: Study, cases: list[Case], store: Store) -> None:
        """Refuse what cannot run before anything is written; finished runs can be shown anywhere."""
        from klatsch.study import workers
        from klatsch.study.execute import check_ready, is_unfinished

        if self.dask is None:
            check_ready(study, cases, store)
        elif is_unfinished(study, cases, store):
            with workers.dask(self.dask):
                pass


@command(
    "run study.toml --plot errors.svg",
    "run --rules dat,dsgd --topology ring,torus -n 4,9 --steps 1000",
    "run --rules dat -t ring/8 --set late=7 --set wire=float32,int8",
    "run --problem logistic --set batch=8 --rules dat,gt --lr 0.1,0.5 -n 8",
    more="Each rule gets the best learning rate of the grid on each graph and size. "
    f"Rules: {', '.join(catalogue.RULES)}. Problems: {', '.join(catalogue.PROBLEMS)}. "
    "Names and numbers in lists are separated by commas; topology ring/8 gossips in every 8th round only; "
    "late and wire say how messages travel. "
    "FILE.py:NAME is a rule, topology or problem of your own; the file is executed.",
)
def run(
    comparison: Comparison,
    crew: Crew,
    timing: Timing,
    file: Annotated[Path | None, typer.Argument(help="A study file, instead of options that say what to run.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to FILE.png, .svg or .pdf.")] = None,
    style: Annotated[Path | None, text("With --plot: a style file of matplotlib.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a study: FILE is a TOML file, or the options name rules, topologies and a grid to compare."""
    from klatsch import pictures
    from klatsch.report import figures
    from klatsch.report.pages import Script
    from klatsch.study import spec
    from klatsch.study.cases import expand
    from klatsch.study.choices import timed
    from klatsch.study.execute import run_study
    from klatsch.study.store import Store
    from klatsch.units import counted

    use_folder(crew.data)
    clock = timing.clock()
    if file is not None and file.exists():  # load names one that does not
        comparison.refuse_beside_a_file()
    study = comparison.study() if file is None else spec.load(file)
    study = study if crew.device is None else study.model_copy(update={"device": crew.device})
    try:
        expanded = expand(study)
        script = Script.of(study, expanded[0])
    except ValueError as refusal:
        raise ValueError(f"{file}: {refusal}" if file is not None else str(refusal)) from None
    if plot is not None:
        pictures.check_path(plot)
    elif style is not None:
        raise ValueError("--style is for a figure; give --plot FILE as well")
    place = crew.store if crew.store is not None or file is None else file.with_suffix(".sqlite")
    executor = crew.executor(study.device, in_memory=place is None)
    with Store(":memory:" if place is None else place) as opened, narration.shown() as told:
        crew.check(study, expanded[0], opened)
        with narration.interruptible(opened):
            found = run_study(
                study, opened, executor=executor, told=told, expanded=expanded, command=terminal.command_line()
            )
    rows = timed(found.rows, clock)
    if as_json:
        verdicts = script.verdicts(found.rows)
        said = {"verdicts": [asdict(verdict) for verdict in verdicts]} if verdicts else {}
        left_out = [item._asdict() for item in found.left_out]
        print_json({"rows": [plain(row) for row in rows], "left_out": left_out, **said})
    else:
        print_rows(rows, found.left_out, title_of(study), study.device, clocked=clock is not None)
        print_verdicts(script.verdicts(found.rows))
        if place is None:
            terminal.note("the results are not kept; --store results.sqlite keeps them")
        else:
            damaged = found.progress.damaged
            again = f" ({damaged:,} {'was' if damaged == 1 else 'were'} damaged)" if damaged else ""
            print(f"{counted(found.progress.runs_done, 'run')} new{again}, results in {place}")
    if plot is not None:
        across = "nodes" if len(study.nodes) > 1 and timing.against == "rounds" else timing.against
        pictures.save(figures.plot(rows, across, title_of(study), style=style), plot, dpi=160)
        if not as_json:
            print(f"drawn to {plot}")


@command("demo", "demo --full", "demo --steps 2000")
def demo(
    out: Annotated[Path, text("Folder for the figure.", metavar="FOLDER")] = Path(),
    steps: Annotated[int | None, option("Rounds (10,000; 20,000 with --full).", "--steps")] = None,
    seeds: Annotated[int | None, option("Number of seeds (1; 2 with --full).", "--seeds")] = None,
    full: Annotated[bool, typer.Option("--full", help="Up to 49 machines, as in README: minutes.")] = False,
) -> None:
    """DAT-SGD against D-SGD and others on three graphs: how many machines help? In a minute."""
    from klatsch import pictures
    from klatsch.report.installed import content_of
    from klatsch.report.pages import Script
    from klatsch.study import spec, workers
    from klatsch.study.cases import expand
    from klatsch.study.execute import run_study

    changes = {name: value for name, value in (("steps", steps), ("seeds", seeds)) if value is not None}
    study = spec.parse(content_of("demo", "full" if full else "quick") | changes)
    files = [out / f"klatsch-demo{suffix}" for suffix in (".png", ".svg")]
    for file in files:
        pictures.check_path(file)
    cases, left_out = expand(study)
    with narration.shown() as told:
        rows = run_study(study, executor=workers.threads, told=told, expanded=(cases, left_out)).rows
    script = Script.of(study, cases)
    # The remedies that follow a reason are options of klatsch run, which the demo does not have.
    print_rows(rows, [item._replace(reason=item.reason.partition(";")[0]) for item in left_out], title_of(study))
    print_verdicts(script.verdicts(rows))
    ((_, figure),) = script.drawn(rows, study.name, title_of(study))
    for file in files:
        pictures.save(figure, file, dpi=160)
    print(f"drawn to {' and '.join(map(str, files))}")


def title_of(study: Study) -> str:
    """What the errors of a study are."""
    from klatsch import problems

    measured = problems.declared(study.problem.name).headline.text
    return f"{study.problem.label}: {measured}, {study.length}, {study.choice}"
