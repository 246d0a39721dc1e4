"""`klatsch data`: the data set of the image study, and how it is split over nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.terminal import number, option, print_json

data = typer.Typer(help="Fashion-MNIST: where it is, and how it is split over nodes.")
app.add_typer(data, name="data")


@data.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Fashion-MNIST: where it is, and how it is split over nodes."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def use_folder(folder: Path | None) -> None:
    """Have this process and its workers read the data set from a folder."""
    from klatsch.problems.images import fashion_mnist

    if folder is not None:
        fashion_mnist.load(folder, download=False)  # a wrong one shows at once
        os.environ[fashion_mnist.VARIABLE] = str(folder.resolve())


@data.command(help="Look for Fashion-MNIST, download it where it is nowhere, and verify it.")
def fetch(
    folder: Annotated[Path | None, typer.Option("--data", help="Folder of its four files.", metavar="FOLDER")] = None,
) -> None:
    """Fetch and verify the data set."""
    from klatsch.problems.images import fashion_mnist

    place = fashion_mnist.find(folder)
    images = fashion_mnist.load(place)
    print(f"{len(images.labels):,} images to learn from, {len(images.test_labels):,} to test on, verified, in {place}")


@data.command(help="Show how many images of each class every node gets, as a table and, with --draw, as a picture.")
def show(
    nodes: Annotated[int, option("Number of nodes.", "-n", "--nodes")] = 8,
    alpha: Annotated[float, option("Dirichlet label skew: small is skewed.", parser=number)] = 0.1,
    seed: Annotated[int, option("Seed of the partition.")] = 0,
    folder: Annotated[Path | None, typer.Option("--data", help="Folder of its four files.", metavar="FOLDER")] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the histogram to FILE.png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show the class histogram of every node."""
    import numpy as np

    from klatsch import pictures, problems
    from klatsch.paper import histogram
    from klatsch.problems.images import fashion_mnist
    from klatsch.problems.images.classification import check_sizes

    if draw is not None:
        pictures.check_path(draw)
    labels = fashion_mnist.load(folder).labels.numpy()
    check_sizes(nodes, 1, len(labels))
    shards = problems.dirichlet(labels, nodes, alpha, seed)
    counts = np.stack([np.bincount(labels[shard], minlength=len(fashion_mnist.CLASSES)) for shard in shards])
    title = f"Fashion-MNIST over {nodes} nodes, alpha = {alpha:g}, seed {seed}: {shards.shape[1]:,} images each"
    if draw is not None:
        pictures.save(histogram.draw(counts, fashion_mnist.CLASSES, title), draw, dpi=160)
    if as_json:
        print_json({"classes": list(fashion_mnist.CLASSES), "counts": counts.tolist()})
        return
    console = terminal.console()
    columns = {"node": lambda k: str(k)} | {
        name: (lambda k, c=c: f"{counts[k, c]:,}" if counts[k, c] else ".")
        for c, name in enumerate(fashion_mnist.CLASSES)
    }
    columns["classes"] = lambda k: str(int((counts[k] > 0).sum()))
    terminal.print_table(console, title, columns, range(nodes), (), lambda k: 0)
    if draw is not None:
        print(f"drawn to {draw}")
