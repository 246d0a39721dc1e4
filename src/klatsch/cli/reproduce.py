"""`klatsch reproduce`: the paper's figures and tables, with verdicts on what the paper says of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch import catalogue
from klatsch.cli import narration as progress
from klatsch.cli import terminal
from klatsch.cli.app import app
from klatsch.cli.data import use_folder
from klatsch.cli.run import check_first, crew
from klatsch.cli.terminal import option, print_json

if TYPE_CHECKING:
    from klatsch.paper.pages import Page

COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow"}


@app.command(
    help=f"Reproduce a figure or table of the paper: TARGET is one of {', '.join(catalogue.TARGETS)}.\n\n"
    "Runs what the store does not hold yet, draws PNG, SVG and PDF, writes the numbers as "
    "CSV and Markdown, and says of each sentence of the paper whether it holds. `beyond` adds gt, d2, dat-gt, dat-d2, "
    "dat in cta order and averaged outputs; `images-beyond` adds such rules to the image study."
)
def reproduce(
    target: Annotated[str, typer.Argument(help="What to reproduce.")],
    scale: Annotated[
        str, typer.Option(help="quick: minutes on two cores; paper: all sizes and rounds, 3 seeds.", metavar="NAME")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for figures and tables.", metavar="FOLDER")] = Path("klatsch-paper"),
    store: Annotated[
        Path | None, typer.Option(help="File for the results (results.sqlite in the folder).", metavar="PATH")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", metavar="NAME")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (the default on a CPU) or float64 (on a GPU).", metavar="NAME")
    ] = None,
    epochs: Annotated[int | None, option("Epochs of the image studies (50 at paper scale).")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST's four files (else looked for).", metavar="FOLDER")
    ] = None,
    processes: Annotated[int | None, option("Worker processes (one per core).", "--workers")] = None,
    dask: Annotated[str | None, typer.Option(help="Run on the Dask cluster at ADDRESS.", metavar="ADDRESS")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Reproduce a figure or table of the paper."""
    from klatsch.arguments import named
    from klatsch.paper import pages
    from klatsch.paper import targets as paper
    from klatsch.paper.reproduce import TABLES, TARGETS, page_of
    from klatsch.study.cases import expand
    from klatsch.study.execute import run_study
    from klatsch.study.store import Origin, Store

    named("target", target, dict.fromkeys(TARGETS))
    named("scale", scale, paper.SCALES)
    if target in TABLES:
        if epochs is not None or data is not None:
            raise ValueError(f"{target} trains nothing; leave --epochs and --data out")
        page = TABLES[target]()
        seconds = 0.0
        _make_folder(out)
    else:
        use_folder(data)
        study = paper.study_of(target, scale, device, dtype, epochs)
        executor = crew(device, processes, dask)
        expanded = expand(study)
        place = out / "results.sqlite" if store is None else store
        new = store is None and not out.is_dir()  # then there is nothing to look at yet
        with Store(":memory:" if new else place) as opened:
            check_first(study, expanded[0], opened, dask)
        _make_folder(out)
        with Store(place) as opened:
            origin = Origin(terminal.command_line(), target, scale)
            with progress.shown() as told, progress.interruptible(opened):
                found = run_study(study, opened, executor=executor, told=told, expanded=expanded, origin=origin)
            seconds = found.progress.seconds
            page = page_of(next(s for s in opened.studies() if s.study.name == study.name), opened, expanded)
    files = pages.write(page, out)
    if as_json:
        print_json(_plain(page, files))
    else:
        _print(page, files, seconds)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}; choose another with --out") from None


def _print(page: Page, files: list[Path], seconds: float) -> None:
    console = terminal.console()
    console.print(page.title, style="bold", markup=False, highlight=False)
    for fact in page.facts:
        console.print(fact, style="dim", markup=False, highlight=False)
    for verdict in page.verdicts:
        console.print(f"[{COLOURS[verdict.word]}]{verdict.word}[/]: ", end="")
        console.print(verdict.claim, markup=False, highlight=False)
        for line in verdict.figures:
            console.print(f"    {line}", style="dim", markup=False, highlight=False)
    for note in page.notes:
        console.print(f"note: {note}", style="dim", markup=False, highlight=False)
    if seconds:
        print(f"{progress.words(seconds)} of running")
    print(f"written: {', '.join(str(file) for file in files)}")


def _plain(page: Page, files: list[Path]) -> dict[str, object]:
    return {
        "title": page.title,
        "facts": list(page.facts),
        "verdicts": [
            {"claim": v.claim, "source": v.source, "holds": v.holds, "figures": list(v.figures)} for v in page.verdicts
        ],
        "notes": list(page.notes),
        "header": list(page.header),
        "table": [list(row) for row in page.table],
        "files": [str(file) for file in files],
    }
