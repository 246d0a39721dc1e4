"""`klatsch data`: the data set of the image study, and how it is split over nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from klatsch.cli import terminal
from klatsch.cli.app import Group, app, command, examples, show_help
from klatsch.cli.terminal import AsJson, Data, number, option, print_json

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
