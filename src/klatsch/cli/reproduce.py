"""`klatsch reproduce`: the studies that come with klatsch, with verdicts on what is said about them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klatsch import catalogue
from klatsch.cli import narration, terminal
from klatsch.cli.app import command
from klatsch.cli.data import use_folder
from klatsch.cli.rows import print_verdicts
from klatsch.cli.run import Crew
from klatsch.cli.terminal import AsJson, option, print_json, text

if TYPE_CHECKING:
    from klatsch.report.pages import Page
    from klatsch.study.spec import Study


@command(
    "reproduce table1",
    "reproduce fig1 --out results",
    "reproduce fig2 --scale paper --device cuda --data ~/fashion-mnist",
    "reproduce fig2 --of worst",
    more=f"TARGET is one of {', '.join(catalogue.TARGETS)}. "
    "Runs what the store does not hold yet, draws PNG, SVG and PDF, writes the numbers as CSV and Markdown, and checks "
    "each sentence of the paper. `beyond` adds rules, beta and decay to figure 1. `averages` tries weights and query "
    "points, `schedules` compares the best of them and baselines with and without decay, `orders` mixes after or "
    "before the step, `local-steps` is accuracy against bytes; `schedule-free` is averages, schedules and beyond. "
    "`channels` (least squares) and `images-channels`, together `slow-networks`, tell what few bytes, late messages "
    "and local steps cost and save. `stragglers` compares ways not to wait for slow nodes. `language` trains small "
    "GPTs with Adam: all rules, then links and sizes.",
)
def reproduce(
    target: Annotated[str, typer.Argument(help="What to reproduce.")],
    crew: Crew,
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
    from klatsch.report.installed import GROUPS, study_of
    from klatsch.report.tables import TABLES
    from klatsch.study.choices import BESIDE

    named("target", target, dict.fromkeys(catalogue.TARGETS))
    named("--of", of, dict.fromkeys(("mean", *BESIDE)))
    named("scale", scale, dict.fromkeys(("quick", "paper")))
    parts = GROUPS.get(target, (target,))
    if target in TABLES and (epochs is not None or crew.data is not None or of != "mean"):
        raise ValueError(f"{target} trains nothing; leave --epochs, --data and --of out")
    if len(parts) > 1 and (epochs is not None or dtype is not None):
        raise ValueError(f"{target} is {', '.join(parts)}; leave --epochs and --dtype out, or give one of these")
    use_folder(crew.data)
    if target in TABLES:
        _make_folder(out)
        made = [(TABLES[target](), 0.0)]
    else:
        studies = [study_of(part, scale, crew.device or "cpu", dtype, epochs) for part in parts]
        made = [_run(study, crew, out, None if of == "mean" else of) for study in studies]
    written = [(page, seconds, pages.write(page, out)) for page, seconds in made]
    if as_json:
        kept = ("title", "facts", "verdicts", "notes", "header", "table")
        plain = [(asdict(replace(page, figures=())), paths) for page, _, paths in written]  # those are in the files
        content = [{name: page[name] for name in kept} | {"files": list(map(str, paths))} for page, paths in plain]
        return print_json(content[0] if len(content) == 1 else {"pages": content})
    for page, seconds, paths in written:
        _print(page, paths, seconds, with_table=target in TABLES)  # those of studies are long


def _run(study: Study, crew: Crew, out: Path, showing: str | None) -> tuple[Page, float]:
    """Run what the store lacks of a study; its page, and the seconds that it took."""
    from klatsch.report.pages import page_of
    from klatsch.study.cases import expand
    from klatsch.study.execute import run_study
    from klatsch.study.store import Store

    executor, expanded = crew.executor(study.device), expand(study)
    place = out / "results.sqlite" if crew.store is None else crew.store
    new = crew.store is None and not out.is_dir()  # then there is nothing to look at yet
    with Store(":memory:" if new else place) as opened:
        crew.check(study, expanded[0], opened)
    _make_folder(out)
    with Store(place) as opened:
        command = terminal.command_line()
        with narration.shown() as told, narration.interruptible(opened):
            done = run_study(study, opened, executor=executor, told=told, expanded=expanded, command=command)
        return page_of(done.remembered, opened, showing), done.progress.seconds


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}; choose another with --out") from None


def _print(page: Page, paths: list[Path], seconds: float, with_table: bool) -> None:
    terminal.note(page.title, "bold")
    for fact in page.facts:
        terminal.note(fact)
    if with_table:
        lines = [dict(zip(page.header, line, strict=True)) for line in page.table]
        if terminal.print_table("", lines, expendable=page.header[-1:]) != list(page.header):
            terminal.note(terminal.WIDER)
    print_verdicts(page.verdicts)
    for note in page.notes:
        terminal.note(f"note: {note}")
    if seconds:
        print(f"{narration.words(seconds)} of running")
    print(f"written: {', '.join(map(str, paths))}")
