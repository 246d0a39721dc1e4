"""`klatsch run` and `klatsch demo`: a study from a file, or rules side by side from a few options."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klatsch import catalogue
from klatsch.cli import narration as progress
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.data import use_folder
from klatsch.cli.rows import plain, print_rows
from klatsch.cli.terminal import number, option, print_json

if TYPE_CHECKING:
    from klatsch.study import workers
    from klatsch.study.cases import Case
    from klatsch.study.spec import Study
    from klatsch.study.store import Store

GRID = "0.0001,0.0005,0.001,0.005,0.01,0.05,0.1"  # the paper's


@app.command(
    help="Run a study: FILE is a TOML file, or the options name rules, topologies and a grid to compare.\n\n"
    "Each rule gets the best learning rate of the grid on each graph and size. "
    f"Rules: {', '.join(catalogue.RULES)}. Problems: {', '.join(catalogue.PROBLEMS)}. "
    "Names of rules, topologies and numbers in lists are separated by commas; topology ring/8 gossips in every 8th "
    "round only. FILE.py:NAME is a rule, topology or problem of your own; the file is executed."
)
def run(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="A study, instead of the options that say what to run.")] = None,
    rules: Annotated[str, typer.Option(help="Rules to compare.", metavar="NAMES")] = "dat,dsgd",
    topology: Annotated[str, typer.Option("-t", "--topology", help="Topologies.", metavar="NAMES")] = "ring",
    nodes: Annotated[str, typer.Option("-n", "--nodes", help="Numbers of nodes.", metavar="N,...")] = "16",
    steps: Annotated[int | None, option("Rounds (10,000).", "--steps")] = None,
    epochs: Annotated[int | None, option("Epochs, instead of rounds (fashion-mnist).")] = None,
    lr: Annotated[str, typer.Option(help="Learning rates to choose from.", metavar="X,...")] = GRID,
    seeds: Annotated[int, option("Number of seeds: 0, 1, 2...", "--seeds")] = 3,
    problem: Annotated[str, typer.Option(help="Problem to solve.", metavar="NAME")] = "least-squares",
    dim: Annotated[int | None, option("Parameters of the problem.")] = None,
    noise: Annotated[float | None, option("Gradient noise sigma (least-squares).", parser=number)] = None,
    heterogeneity: Annotated[
        float | None, option("How far the nodes' own optima scatter (least-squares).", parser=number)
    ] = None,
    batch: Annotated[int | None, option("Size of a mini-batch (logistic, fashion-mnist).")] = None,
    alpha: Annotated[float | None, option("Dirichlet label skew (logistic, fashion-mnist).", parser=number)] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST's four files (else looked for).", metavar="FOLDER")
    ] = None,
    averaging: Annotated[
        str | None, typer.Option(help="Anytime weights: constant, linear, polynomial(2), fixed(0.9).", metavar="NAME")
    ] = None,
    beta: Annotated[
        str | None, typer.Option(help="Where dat rules take gradients, from w (0) to x (1).", metavar="X,...")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Order of dat and dsgd: atc or cta.", metavar="NAME")] = None,
    momentum: Annotated[str | None, typer.Option(help="Local momentum.", metavar="X,...")] = None,
    average: Annotated[
        str | None, typer.Option(help="Average of the iterates that other rules give out.", metavar="NAME")
    ] = None,
    k: Annotated[int | None, option("Largest degree of base_graph.")] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Graphs mix with (I + P) / 2.")] = False,
    any_graph: Annotated[bool, typer.Option("--any-graph", help="Run also where a rule refuses the graph.")] = False,
    float32: Annotated[bool, typer.Option("--float32", help="Compute in float32: faster.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", metavar="NAME")] = None,
    store: Annotated[
        Path | None, typer.Option(help="File for the results (FILE.sqlite for a study).", metavar="PATH")
    ] = None,
    processes: Annotated[int | None, option("Worker processes (one per core).", "--workers")] = None,
    dask: Annotated[str | None, typer.Option(help="Run on the Dask cluster at ADDRESS.", metavar="ADDRESS")] = None,
    engine: Annotated[
        str, typer.Option(help="stacked (simulation), or ranks: one process per node, under torchrun.", metavar="NAME")
    ] = "stacked",
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to FILE.png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Run a study."""
    from klatsch import pictures
    from klatsch.arguments import named
    from klatsch.paper import figures
    from klatsch.study import on_ranks, spec
    from klatsch.study.cases import expand
    from klatsch.study.execute import run_study
    from klatsch.study.store import Origin, Store

    use_folder(data)
    if named("engine", engine, {"stacked": False, "ranks": True}) and on_ranks.join() != 0:
        return on_ranks.serve()
    if file is not None:
        _refuse_with_file(context)
        study = spec.load(file)
    else:
        study = _from_options(
            rules=terminal.words(rules),
            rule_options=_given(
                averaging=averaging, order=order, average=average, beta=_numbers(beta), momentum=_numbers(momentum)
            ),
            topologies=terminal.words(topology),
            topology_options=_given(k=k),
            lazy=lazy,
            problem={
                "name": problem,
                **_given(dim=dim, noise=noise, heterogeneity=heterogeneity, batch=batch, alpha=alpha),
            },
            nodes=[terminal.whole(word) for word in terminal.words(nodes)],
            lr=[terminal.number(word) for word in terminal.words(lr)],
            **_given(steps=10_000 if steps is None and epochs is None else steps, epochs=epochs),
            seeds=seeds,
            dtype="float32" if float32 else "float64",
            any_graph=any_graph,
        )
    study = study if device is None else study.model_copy(update={"device": device})
    try:
        expanded = expand(study)
    except ValueError as refusal:
        raise ValueError(f"{file}: {refusal}" if file is not None else str(refusal)) from None
    if plot is not None:
        pictures.check_path(plot)
    place = store if store is not None or file is None else file.with_suffix(".sqlite")
    executor = crew(study.device, processes, dask, file is None and store is None)
    if engine == "ranks":
        executor = on_ranks.ranks_for(study.nodes, processes, dask)
    with Store(":memory:" if place is None else place) as opened, progress.shown() as told:
        origin = Origin(terminal.command_line())
        check_first(study, expanded[0], opened, dask)
        with progress.interruptible(opened):
            found = run_study(study, opened, executor=executor, told=told, expanded=expanded, origin=origin)
    if as_json:
        print_json({"rows": [plain(row) for row in found.rows], "left_out": [i._asdict() for i in found.left_out]})
    else:
        print_rows(found.rows, found.left_out, title_of(study), study.device)
        if place is not None:
            damaged = found.progress.damaged
            again = f" ({damaged:,} {'was' if damaged == 1 else 'were'} damaged)" if damaged else ""
            print(f"{found.progress.runs_done:,} runs new{again}, results in {place}")
    if plot is not None:
        draw = figures.error_against_nodes if len(study.nodes) > 1 else figures.error_against_rounds
        pictures.save(draw(found.rows, title_of(study)), plot, dpi=160)
        if not as_json:
            print(f"drawn to {plot}")


@app.command(help="DAT-SGD against D-SGD on three graphs: how many machines help? About a minute.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure.", metavar="FOLDER")] = Path(),
    steps: Annotated[int, option("Rounds.", "--steps")] = 20_000,
    seeds: Annotated[int, option("Number of seeds.", "--seeds")] = 2,
) -> None:
    """Run the demo."""
    from klatsch.paper import demo as demos

    study = demos.plan(steps, seeds)
    with progress.shown() as told:
        found = demos.demo(study, out, told)
    print_rows(found.rows, found.left_out, title_of(study))
    print(found.sentence)
    print(f"drawn to {' and '.join(str(file) for file in found.files)}")


def crew(device: str, count: int | None, dask: str | None, in_memory: bool = False) -> workers.Open | None:
    """What runs the batches, as the options say."""
    from klatsch.study import workers

    if count is not None and not 1 <= count <= workers.MOST_WORKERS:
        raise ValueError(f"--workers {count}: give a number from 1 to {workers.MOST_WORKERS:,}")
    if count is not None and (dask is not None or device != "cpu"):
        raise ValueError(f"--workers {count}: leave it out: a cluster and a GPU have their own")
    if dask is not None:
        return lambda: workers.dask(dask)
    if device == "cpu" and in_memory:
        return lambda: workers.threads(count)  # start at once, which suits a quick look
    return None if count is None else lambda: workers.processes(count)


def check_first(study: Study, cases: list[Case], store: Store, dask: str | None) -> None:
    """Refuse what cannot run before anything is written; what is done already can be shown anywhere.

    Raises:
        ValueError: the device, the data or the cluster is not there.
    """
    from klatsch.study import workers
    from klatsch.study.execute import check_ready

    if dask is None:
        check_ready(study, cases, store)
    elif not {case.key for case in cases} <= store.done():
        workers.check_dask(dask)


def title_of(study: Study) -> str:
    """What the errors of a study are."""
    from klatsch import problems

    return f"{study.problem.label}: {problems.headline(study.problem.name).text}, {study.length}, {study.choice}"


def _from_options(
    rules: list[str],
    rule_options: dict[str, Any],
    topologies: list[str],
    topology_options: dict[str, Any],
    lazy: bool,
    **rest: Any,
) -> Study:
    """A study from the command line, where an option goes to all that have it, and what does not fit is left out."""
    from klatsch.rules import names as named_rules
    from klatsch.study import spec
    from klatsch.topology import options as topologies_options

    entries: dict[str, list[dict[str, Any]]] = {"rules": [], "topologies": []}
    for kind, names, options, known in (
        ("rules", rules, rule_options, named_rules.options),
        ("topologies", topologies, topology_options, topologies_options),
    ):
        for name in names:
            entries[kind].append({"name": name, **{o: v for o, v in options.items() if o in known(name)}})
        for option_ in options:
            if not any(option_ in known(name) for name in names):
                why = f": {named_rules.WHY_NOT[option_]}" if option_ in named_rules.WHY_NOT else "; leave it out"
                raise ValueError(f"none of {', '.join(names)} has an option {option_!r}{why}")
    for entry in entries["topologies"]:
        entry["lazy"] = lazy
    content = {**rest, **entries, "leave_out": True}
    # Two comparisons in one store are two studies, whatever they have in common.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
    return spec.parse({**content, "name": _names(rules, topologies)[:90] + f" ({digest})"})


def _names(rules: list[str], topologies: list[str]) -> str:
    from klatsch import own

    return f"{' '.join(map(own.label, rules))} on {' '.join(map(own.label, topologies))}"


def _refuse_with_file(context: typer.Context) -> None:
    allowed = {"file", "data", "engine", "device", "store", "processes", "dask", "plot", "as_json"}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{parameter.opts[-1]} does not go with a study file; write it into the file")


def _numbers(text: str | None) -> Any:
    """A number, or a grid of them."""
    if text is None:
        return None
    found = [terminal.number(word) for word in terminal.words(text)]
    return found[0] if len(found) == 1 else found


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
