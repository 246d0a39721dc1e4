"""`klatsch list`, `topology` and `data`: what runs are made of."""

from __future__ import annotations

import os
from collections import ChainMap
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.app import (
    Group,
    Settings,
    app,
    assigned,
    chosen,
    command,
    examples,
    parameters_of,
    setting,
    show_help,
    split,
)
from klatsch.cli.terminal import AsJson, Data, number, option, print_json
from klatsch.units import size

if TYPE_CHECKING:
    from klatsch.topology import Summary

COMPARED = (
    *("topology", "edges", "degree", "period", "symmetric", "doubly stochastic", "rho", "rounds to halve"),
    *("exact after", "messages", "bytes, DAT-SGD"),
)
VECTORS = {"dsgd": 1, "dat": 2}  # that a rule sends; importing torch to ask takes longer than the rest
EXPENDABLE = ("doubly stochastic", "symmetric", "edges", "messages", "period", "exact after", "degree")


@command("list", "run --rules gt,dat-gt --set momentum=0.9", name="list")
def list_names() -> None:
    """List the rules, topologies and problems, each with the options that --set takes and their defaults."""
    tables = {
        "rules, each a product of parts": catalogue.rules(),
        "parts of rules, and their options": catalogue.parts(),
        "topologies": catalogue.topologies(),
        "problems": catalogue.problems(),
    }
    for title, entries in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        table.add_column(style="dim")
        for name, entry in entries.items():
            table.add_row(name, *entry)
        terminal.console().print(table, "")
    terminal.note(catalogue.CHANNEL)


@command(
    "topology ring -n 16",
    "topology torus --set rows=3 --set cols=5 --draw torus.svg",
    "topology ring/8 -n 16 --set late=7 --set wire=int8",
    "topology --compare -n 16",
    more=f"NAME is one of {', '.join(catalogue.TOPOLOGIES)}; ring/8 gossips only in every 8th round; late and wire "
    "set how messages travel.",
)
def topology(
    name: Annotated[str | None, typer.Argument(help="The graph to show.")] = None,
    nodes: Annotated[int | None, option("Number of nodes.", "-n", "--nodes")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All topologies side by side, sorted by rho.")] = False,
    settings: Annotated[Settings, setting("An option of the graph: rows=3 of torus, k=2 of base_graph")] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Mix with (I + P) / 2.")] = False,
    params: Annotated[int, option("Parameters of the model, for the message size.")] = 1_000_000,
    draw: Annotated[Path | None, typer.Option(help="Draw the rounds with messages to FILE.svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how fast a communication graph mixes and what a round of it costs."""
    from klatsch import topology as topologies
    from klatsch.topology.comparison import beyond_solvers

    if compare:
        refused = {f"the topology {name!r}": name, "--lazy": lazy, "--draw": draw}
        refused |= {f"--set {side}": side in split(settings) for side in ("rows", "cols")}
        if wrong := [text for text, value in refused.items() if value]:
            raise ValueError(f"--compare looks at all topologies and does not go with {wrong[0]}; leave one out")
        if nodes is None:
            raise ValueError("--compare needs the number of nodes, for example -n 16")
        families = ChainMap(*(dict(parameters_of("topology", family)) for family in topologies.TOPOLOGIES))
        (choices,) = assigned(settings, {("", "topologies"): families}).values()
        summaries, left_out = topologies.compare(nodes, params, **choices)
        if as_json:
            return print_json({"topologies": [_plain(s) for s in summaries], "left_out": left_out})
        return _print_comparison(summaries, left_out)
    if name is None:
        raise ValueError("name a topology, for example klatsch topology ring -n 16, or give --compare")
    choices = chosen(settings, "topology", name)
    if nodes is None and not {"rows", "cols"} & choices.keys():
        raise ValueError(f"{name} needs the number of nodes, for example -n 16")
    from_sides = prod(side for side in (choices.get("rows"), choices.get("cols")) if isinstance(side, int))
    closed = beyond_solvers(name, from_sides if nodes is None else nodes, lazy, choices)
    graph = topologies.make(name, nodes, **choices)
    graph = topologies.lazy(graph) if lazy else graph
    if draw is not None:  # first, since a wrong file name shows at once
        topologies.draw(graph, draw)
    rho = topologies.spectral_gap(name, graph.size, **choices) if closed else None
    summary = topologies.summarize(graph, params, rho=rho)
    if as_json:
        return print_json(_plain(summary))
    known = _cells(summary).items()
    lines = [{"property": name, "value": cell, "meaning": meaning} for name, (cell, meaning) in known]
    terminal.print_table(f"{summary.name}, {summary.nodes:,} nodes", lines)
    if draw is not None:
        print(f"drawn to {draw}")


def _cells(s: Summary) -> dict[str, tuple[str, str]]:
    """What is known of a graph, and what that means, by its name."""
    from klatsch.topology.comparison import GAMMA

    sent, period = _bytes(s), "one period" if s.period else "time"
    held = {"copies": (f"{s.copies:,}", f"vectors held for each one sent, {size(4 * s.params)} each")}
    return {
        "nodes": (f"{s.nodes:,}", ""),
        "edges": (f"{s.edges:,}", f"distinct links over {period}" + ("" if s.symmetric else ", one way each")),
        "degree": (f"{s.degree:,}", "most neighbours in one round"),
        **({"every": (f"{s.every:,}", "rounds from one with messages to the next")} if s.every > 1 else {}),
        **({"late": (f"{s.late:,}", "rounds that a message may travel")} if s.late else {}),
        **({"wire": (s.wire, "how numbers travel")} if s.wire != "float32" else {}),
        **(held if s.copies else {}),
        "period": (_number(s.period), "rounds until the graphs repeat" if s.period else "drawn anew in every round"),
        "symmetric": ("yes" if s.symmetric else "no", ""),
        "doubly stochastic": ("yes" if s.doubly_stochastic else "no", "keeps the network mean"),
        "rho": (f"{s.rho:.6g}", "spectral gap per round" + ("" if s.period else ", in the mean square")),
        "rounds to halve": (_number(s.rounds_to_halve), "the disagreement, from the worst start"),
        "exact after": (_number(s.exact_after, "never"), "rounds until all hold the mean"),
        "smallest eigenvalue": (_number(s.smallest_eigenvalue), "D2 as published needs more than -1/3"),
        "outer momentum": (_number(s.momentum_limit), "at most; beyond, disagreement grows by itself"),
        "effective neighbours": (_number(s.effective_neighbors), f"for memory gamma = {GAMMA}"),
        "messages": (f"{s.messages_per_round:,.4g}", "sent per node and round, on average"),
        "bytes, D-SGD": (size(sent["dsgd"]), f"per node and round, {s.params:,} parameters"),
        "bytes, DAT-SGD": (size(sent["dat"]), f"the same; DAT sends {VECTORS['dat']} vectors"),
    }


def _print_comparison(summaries: list[Summary], left_out: dict[str, str]) -> None:
    known = [{"topology": (s.name, ""), **_cells(s)} for s in summaries]
    lines = [{heading.replace(" ", "\n"): cells[heading][0] for heading in COMPARED} for cells in known]
    expendable = [heading.replace(" ", "\n") for heading in EXPENDABLE]
    terminal.print_table(f"{summaries[0].nodes:,} nodes, largest spectral gap rho first", lines, expendable)
    terminal.note(
        f"per node, with {summaries[0].params:,} parameters as {summaries[0].wire}; bytes for DAT-SGD, which sends "
        f"{VECTORS['dat']} vectors where D-SGD sends {VECTORS['dsgd']}"
    )
    for why in left_out.values():
        terminal.note(f"left out: {why}")


def _plain(s: Summary) -> dict[str, object]:
    return asdict(s) | {f"bytes_per_round_{rule}": sent for rule, sent in _bytes(s).items()}


def _bytes(s: Summary) -> dict[str, int]:
    """What a node sends in a round, by rule."""
    return {rule: round(vectors * s.bytes_per_vector) for rule, vectors in VECTORS.items()}


def _number(value: float | None, unknown: str = "-") -> str:
    return unknown if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# --- data -------------------------------------------------------------------------------------------------------------

SHOW = "data show -n 8 --alpha 0.1 --draw classes.png"
data = typer.Typer(
    cls=Group,
    help="Fashion-MNIST: where it is, and how it is split over nodes.",
    epilog=examples("data fetch", SHOW),
)
app.add_typer(data, name="data")
data.callback(invoke_without_command=True)(show_help)


def use_folder(folder: Path | None) -> None:
    """Have this process and its workers read the data set from a folder."""
    from klatsch.problems import fashion_mnist

    if folder is not None:
        fashion_mnist.load(folder, download=False)  # a wrong folder fails at once
        os.environ[fashion_mnist.VARIABLE] = str(folder.resolve())


@command("data fetch", "data fetch --data ~/fashion-mnist", to=data)
def fetch(folder: Data = None) -> None:
    """Find Fashion-MNIST, download it if it is missing, and verify it."""
    from klatsch.problems import fashion_mnist

    place = fashion_mnist.find(folder)
    images = fashion_mnist.load(place)
    print(f"{len(images.labels):,} images to learn from, {len(images.test_labels):,} to test on, verified, in {place}")


@command("data show", SHOW, to=data)
def show(
    nodes: Annotated[int, option("Number of nodes.", "-n", "--nodes")] = 8,
    alpha: Annotated[float, option("Dirichlet label skew: small is skewed.", parser=number)] = 0.1,
    seed: Annotated[int, option("Seed of the partition.")] = 0,
    folder: Data = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the histogram to FILE.png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many images of each class every node gets, as a table or, with --draw, also as a picture."""
    import numpy as np

    from klatsch import pictures, problems
    from klatsch.problems import FashionMNIST, fashion_mnist

    if draw is not None:
        pictures.check_path(draw)
    labels, classes = fashion_mnist.load(folder).labels.numpy(), fashion_mnist.CLASSES
    FashionMNIST.check(nodes, alpha=alpha, batch=1, seed=seed)
    shards = problems.dirichlet(labels, nodes, alpha, seed)
    counts = np.stack([np.bincount(labels[shard], minlength=len(classes)) for shard in shards])
    title = f"Fashion-MNIST over {nodes} nodes, alpha = {alpha:g}, seed {seed}: {shards.shape[1]:,} images each"
    if draw is not None:
        pictures.save(pictures.classes_of_nodes(counts, classes, title), draw, dpi=160)
    if as_json:
        return print_json({"classes": list(classes), "counts": counts.tolist()})
    lines = [
        {"node": str(node)}
        | {name: f"{count:,}" if count else "." for name, count in zip(classes, images, strict=True)}
        | {"classes": str(np.count_nonzero(images))}
        for node, images in enumerate(counts)
    ]
    terminal.print_table(title, lines)
    if draw is not None:
        print(f"drawn to {draw}")
