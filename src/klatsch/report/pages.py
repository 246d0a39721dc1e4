"""`Page`: the figures, numbers and verdicts of one study or table, as files in a folder or part of an HTML report."""

from __future__ import annotations

import hashlib
import math
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from klatsch import files, pictures
from klatsch.clock import Clock
from klatsch.extras import VERSION
from klatsch.report import figures
from klatsch.report.selection import clock_of, options_of
from klatsch.report.sentences import STANDING, Race, Sentence, Verdict
from klatsch.study.cases import Case, Remembered
from klatsch.study.choices import BESIDE, Row, save_csv, screened, timed
from klatsch.study.spec import Options, Study, grouped
from klatsch.study.store import Store
from klatsch.units import compact, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Sequence[tuple[str, ...]]

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Page:
    """The content of one page: a study or table."""

    name: str
    title: str
    facts: tuple[str, ...]  # what was run
    figures: tuple[tuple[str, Figure], ...] = ()  # with the names of their files
    header: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    races: tuple[tuple[str, Lines], ...] = ()  # titles, and tables with their header
    standings: Lines = ()  # the same in numbers, with their header
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    flaw: str = ""  # why there is no more of it


def write(page: Page, folder: Path) -> list[Path]:
    """Write a page into a folder: every figure as PNG, SVG and PDF, its numbers as CSV, and all of it as Markdown.

    Who is first in its races is a CSV file of its own, NAME-race.csv.
    """
    drawn = {folder / f"{name}{suffix}": figure for name, figure in page.figures for suffix in FORMATS}
    for file, figure in drawn.items():
        pictures.save(figure, file, dpi=160)
    numbers, text = folder / f"{page.name}.csv", folder / f"{page.name}.md"
    save_csv((page.header, *page.table), numbers)
    files.save(text, as_markdown(page).encode(), "Markdown")
    if not page.standings:
        return [*drawn, numbers, text]
    save_csv(page.standings, race := folder / f"{page.name}-race.csv")
    return [*drawn, numbers, race, text]


def as_markdown(page: Page) -> str:
    """The whole page."""
    parts = [f"# {page.title}", "\n".join(page.facts)]
    parts += [f"    {page.command}"] if page.command else []
    parts += [f"![{page.title}]({name}.png)" for name, _ in page.figures]
    if page.verdicts:
        lines = [
            "\n  - ".join((f"- **{verdict.word}**: {verdict.claim} ({verdict.source})", *verdict.figures))
            for verdict in page.verdicts
        ]
        parts += ["## Verdicts", "\n".join(lines)]
    if page.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in page.notes)]
    for title, table in (*page.races, ("Numbers", (page.header, *page.table))):
        header, *rows = ("| " + " | ".join(row) + " |" for row in table)
        parts += [f"## {title}", "\n".join([header, "|---" * len(table[0]) + "|", *rows])]
    return "\n\n".join(parts) + "\n"


# --- of a study -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """What a study says about its page, checked: clocks, figures, tables and sentences."""

    clocks: dict[str, Clock]
    figures: list[figures.StudyFigure]
    sentences: list[Sentence]
    races: list[Race]

    @classmethod
    def of(cls, study: Study, cases: Sequence[Case]) -> Outline:
        """The outline of a study with these runs, whose options it may name."""
        clocks = {name: clock_of(options) for name, options in study.clocks.items()}
        known: dict[str, Options] = {"clock": dict(zip(clocks, clocks, strict=True))} if clocks else {}
        for name, value in (pair for case in cases for pair in options_of(case).items()):
            known.setdefault(name, {})[str(value)] = value
        drawings = figures.StudyFigure.read(study.figures, "figures")
        sentences = Sentence.read(study.sentences, "sentences")
        races = Race.read(study.tables, "tables")
        for place, words in (drawings | sentences | races).items():
            words.check_names(place, known, clocks)
        return cls(clocks, list(drawings.values()), list(sentences.values()), list(races.values()))

    def verdicts(self, rows: Sequence[Row]) -> list[Verdict]:
        return [verdict for sentence in self.sentences for verdict in sentence.check(rows, self.clocks)]

    def drawn(
        self, rows: Sequence[Row], name: str, title: str, style: str | Path | None = None
    ) -> list[tuple[str, Figure]]:
        """The figures, with the names of their files; those of any study, if it does not say."""
        largest = max(row.nodes for row in rows)  # all sizes would need too many panels
        usual = [figures.StudyFigure(name="rounds", where=({"nodes": largest},))]
        if len({row.nodes for row in rows}) > 1:
            usual.insert(0, figures.StudyFigure(name="nodes", across="nodes"))
        return [
            (f"{name}{f'-{each.name}' * bool(each.name)}", each.draw(rows, title, self.clocks, style))
            for each in self.figures or usual
        ]


def page_of(
    remembered: Remembered, store: Store, showing: str | None = None, clock: Clock | None = None, across: str = "rounds"
) -> Page:
    """The page of a study, from the runs that the store holds so far.

    Figures, numbers and verdicts are those of the mean of nodes, or of what is `showing`: "merged" or "worst". With a
    clock the numbers have seconds, too, and one more figure shows the course against seconds or bytes (`across`).
    """
    study, name = remembered.study, remembered.study.name
    runs, outline = screened(study, remembered.cases, store), Outline.of(study, remembered.cases)
    rows = timed(runs.rows(store), clock)
    if showing is not None:
        rows, name = [row.showing(showing) for row in rows], f"{name}-{showing}"
    facts = _facts(remembered, showing, runs.cases, store)
    page = Page(name, study.title or study.name, facts, command=remembered.command)
    if not rows:
        return page
    above = f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.choice}"
    drawn = outline.drawn(rows, name, above)
    if across != "rounds":
        most = [row for row in rows if row.nodes == max(row.nodes for row in rows)]
        drawn.append((f"{name}-{across}", figures.plot(most, across, above)))
    verdicts = outline.verdicts(rows)
    if runs.missing(store):
        verdicts = [replace(v, holds=None, figures=("not all of its runs are finished", *v.figures)) for v in verdicts]
    reasons = dict.fromkeys(item.reason.partition(";")[0] for item in remembered.left_out)  # without the remedy
    notes = (*edge_note(rows), *study.notes, *(f"Left out: {reason}" for reason in reasons))
    header, table = table_of(rows)
    run = [(race, race.run(rows, outline.clocks)) for race in outline.races]
    races = tuple((race.title, race.lines(standings)) for race, standings in run)
    lines = [line for _, standings in run for standing in standings for line in standing.numbers]
    numbers = replace(page, header=header, table=table, races=races, standings=(STANDING, *lines) if run else ())
    return replace(numbers, figures=tuple(drawn), verdicts=tuple(verdicts), notes=notes)


def _facts(remembered: Remembered, showing: str | None, cases: Sequence[Case], store: Store) -> tuple[str, ...]:
    """What was run, what is shown, and where and when it ran."""
    study = remembered.study
    grids = grouped(dict.fromkeys(study.grids), lambda of_rule: of_rule[1])
    rates = "; ".join(
        (f"{', '.join(rule for rule, _ in rules)}: " if len(grids) > 1 else "") + ", ".join(f"{lr:g}" for lr in grid)
        for grid, rules in grids.items()
    )
    headline = remembered.cases[0].headline
    best = f"largest mean final {headline.metric}" if headline.largest else "smallest mean final error"
    chosen_by = "over the seeds" if study.screen is None else f"of short runs ({study.screen.text})"
    chosen = f" The one with the {best} {chosen_by} is chosen for each rule, graph, size and setting."
    values = f"{headline.text[:1].upper()}{headline.text[1:]}" if headline.largest else f"Error: {headline.text}"
    letters = ["sigma is noise, zeta is heterogeneity"] if study.problem.name == "least-squares" else []
    bands = ["bands reach from the smallest to the largest seed"] if len(study.seeds) > 1 else []
    facts = [
        f"{study.problem.label}, {study.length}, {counted(len(study.seeds), 'seed')}, {study.dtype}. Learning rates "
        f"{rates}.{chosen * any(len(grid) > 1 for grid in grids)}",
        f"{'; '.join([values, *letters, *bands])}.",
    ]
    if showing is not None:
        facts.append(f"Shown is the {BESIDE[showing]}, at the learning rates that are chosen for the mean of nodes.")
    keys = {case.key for case in cases}
    runs = store.outcomes(keys, names=()).values()
    if not runs:
        return (*facts, f"None of its {len(cases):,} runs is finished.")
    places = sorted({f"{run.environment['processor']}, torch {run.environment['torch']}" for run in runs})
    done = f"{len(runs):,} runs" if len(runs) == len(cases) else f"{len(runs):,} of {len(cases):,} runs"
    seconds, last = sum(run.seconds for run in runs), max(run.finished for run in runs)
    return (*facts, f"{done} on {' and '.join(places)}: {seconds:,.0f} s of simulation, finished {_minute(last)}.")


def table_of(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The numbers of a study: the header and a line per row, with what a node sends over the run."""
    settings = list(dict.fromkeys(name for row in rows for name in row.setting))
    measured = [name for name in BESIDE if not all(math.isnan(row.beside(name)) for row in rows)]
    values = (rows[0].title, "from", "to", *measured)
    clocked = any(row.elapsed is not None for row in rows)
    header = ("topology", *settings, "M", "rule", *values, "lr", "lr at the edge", "MB sent", *["seconds"] * clocked)

    def line(row: Row) -> tuple[str, ...]:
        setting = (compact(row.setting.get(name, "-")) for name in settings)
        values = map(known, (row.value, row.low, row.high, *map(row.beside, measured)))
        edge = "yes" if row.at_edge else "no"
        costs = [known(row.megabytes)] + [known(row.elapsed[-1] if row.elapsed else math.nan)] * clocked
        return row.topology, *setting, str(row.nodes), row.rule, *values, f"{row.lr:g}", edge, *costs

    def known(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.4g}"

    return header, tuple(map(line, rows))


def edge_note(rows: Sequence[Row]) -> tuple[str, ...]:
    """A note on rules that may need a learning rate beyond the grid."""
    points, edges = Counter(row.rule for row in rows), Counter(row.rule for row in rows if row.at_edge)
    texts = [f"{rule} in {edges[rule]} of {count}" for rule, count in points.items() if edges[rule]]
    note = "The chosen learning rate is the smallest or largest of the grid, so that a better one may lie beyond: "
    return (f"{note}{', '.join(texts)} points.",) if texts else ()


def _minute(moment: str) -> str:
    return f"{moment[:16].replace('T', ' ')} UTC"


# --- HTML -----------------------------------------------------------------------------------------------------------


def report(
    store: Store, path: Path, title: str | None = None, clock: Clock | None = None, across: str = "rounds"
) -> list[Page]:
    """Write the report of everything in a store; returns its pages."""
    from jinja2 import Environment, PackageLoader

    studies = store.studies()
    if not studies:
        raise ValueError(f"{store.path} holds no study; klatsch run and klatsch reproduce put them there")
    drawn = [_drawn(study, store, clock, across) for study in studies]
    pages = [page for page, _ in drawn]
    if all(page.flaw for page in pages):
        raise ValueError(pages[0].flaw)
    runs = store.outcomes((key for key, _ in store.runs()), names=())
    needed = (screened(each.study, each.cases, store).cases for each in studies)
    keys = {case.key for cases in needed for case in cases}
    licence = f"/*\n{_text('watch/page/uPlot.LICENSE')}\n*/"
    script = "\n".join([licence, _text("watch/page/uPlot.iife.min.js"), _text("report/templates/report.js")])
    loader = PackageLoader("klatsch.report")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = templates.get_template("report.html").render(
        title=title or f"klatsch: {Path(store.path).name}",
        pages=pages,
        figures={page.name: shown for page, shown in drawn},
        script=script,
        seal=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        styles=_text("watch/page/uPlot.min.css") + _text("report/templates/report.css"),
        environments=list({str(run.environment): run.environment for run in runs.values()}.values()),
        runs=list(runs.values()),
        replaced=len(runs.keys() - keys),
        times=[_minute(run.finished) for run in runs.values()],
        engines=sorted({f"{run.engine} on {run.device}" for run in runs.values()}),
        version=VERSION,
    )
    files.save(path, html.encode(), "HTML")
    return pages


def _text(file: str) -> str:
    return resources.files("klatsch").joinpath(file).read_text()


def _drawn(
    remembered: Remembered, store: Store, clock: Clock | None, across: str
) -> tuple[Page, list[tuple[str, Options | None]]]:
    """The page of a study, its figures as pictures and in numbers; only a line where a store does not fit its runs."""
    name, title = remembered.study.name, remembered.study.title or remembered.study.name
    try:
        page = page_of(remembered, store, clock=clock, across=across)
        return page, [
            (inline_svg(pictures.render(figure, ".svg").decode(), f"{name}-{drawn}"), figures.values_of(figure))
            for drawn, figure in page.figures
        ]
    except ValueError as error:
        flaw = f"{name}: {error}"
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        flaw = f"{name}: what the store says of it does not fit its runs ({type(error).__name__}); run it again"
    return Page(name, title, (flaw,), flaw=flaw), []


def inline_svg(text: str, prefix: str) -> str:
    """An SVG file as part of a page: with unique ids, tooltips, and as wide as the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    svg = re.sub(rf'<g id="{figures.VALUE}([^"]*)">', r'<g class="value"><title>\1</title>', svg)
    prefix = re.sub(r"\W", "-", prefix)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\1{prefix}-", svg)
    tag, rest = svg.split(">", 1)
    width = re.search(r'width="([\d.]+)pt"', tag)
    # On a phone a figure scrolls instead of shrinking until it is illegible.
    least = f' style="min-width: {0.72 * float(width.group(1)):.0f}pt"' if width else ""
    tag = re.sub(r' (width|height)="[\d.]+pt"', "", tag)
    return f"{tag}{least}>{rest}"
