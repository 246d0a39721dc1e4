"""Sentences about the rows of a study, and whether they hold: comparisons, and trends over the number of machines.

A sentence is checked in every panel (setting of the problem), and holds if it holds in all of them. Values are means
over the seeds at the chosen learning rate. "Ahead" and "behind" are by more than the tolerance and by more than the
seeds scatter (their ranges are apart); "level" is no worse than by the tolerance, whatever the seeds.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from statistics import mean, median
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from klatsch.arguments import named, shown
from klatsch.clock import Clock
from klatsch.report import selection
from klatsch.report.selection import Selection, Selections, best_of, distinct, in_words, options_of, selected
from klatsch.study.choices import BESIDE, Row
from klatsch.study.spec import Options, grouped
from klatsch.units import duration

CHANGE = 1.25  # what a trend changes an error by, at least
EARLY = 0.1  # of the rounds
FEW = 12  # points that are told one by one

Answer = tuple[bool | None, str]  # whether it holds in a panel (None: unknown), and the numbers that decide
Points = dict[int, Row]  # one rule on one graph, by number of machines


@dataclass(frozen=True)
class Verdict:
    """A sentence, whether it holds, and the numbers that decide."""

    claim: str
    source: str
    holds: bool | None  # None: these runs do not decide
    figures: tuple[str, ...]

    @property
    def word(self) -> str:
        """The verdict in words."""
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


class Tolerance(NamedTuple):
    """How far apart two values may be: in units of the metric, or as a share of the better one."""

    value: float
    is_share: bool = False

    def gap(self, one: Row, other: Row) -> float:
        """By how much a row is behind another; negative if it is ahead."""
        return self.between(*((one.value, other.value) if one.largest else (other.value, one.value)))

    def between(self, low: float, high: float) -> float:
        """How far apart two values are."""
        if self.is_share:
            return high / low - 1 if low else math.inf
        return high - low

    def told(self, gap: float) -> str:
        """A gap in words."""
        return f"{factor(1 + gap)} times" if self.is_share else f"{round(gap, 4) + 0.0:+.4g}"  # + 0 turns -0 into 0


ERRORS, OTHERS = Tolerance(0.05, is_share=True), Tolerance(0.01)  # by default: of errors, of accuracies and bits


def usual(row: Row) -> Tolerance:
    """The tolerance of its metric."""
    return OTHERS if row.largest or selection.in_bits(row) else ERRORS


def _tolerance(given: object) -> Tolerance | None:
    """From 0.01, or "5%"."""
    if given is None or isinstance(given, Tolerance):
        return given
    text = str(given)
    is_share = text.endswith("%")
    try:
        value = float(text[:-1]) / 100 if is_share else float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ValueError(f'tolerance = {shown(given)}; give a number such as 0.01, or a share such as "5%"')
    return Tolerance(value, is_share)


class Moment(selection.Words):
    """When rows are compared: at the end, after a share of the rounds, or at equal cost.

    Args:
        share: of the rounds.
        bytes: "doubled" (what the cheapest run sends, then twice as much, and so on; a run that sends more counts with
            what it had by then), or rows whose bytes are the budgets (a run that sends more does not count; where none
            of ours sends so little, they have lost).
        seconds: the name of a clock of the study; budgets are doubled.
        first_done: the name of a clock: when the first run is done, at the learning rates that are best for then.
        reach: with `seconds`, no moment: compared are the seconds until all seeds have this share of the best accuracy.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    bytes: Literal["doubled"] | Selection | None = None
    seconds: str = ""
    first_done: str = ""
    reach: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _has_a_clock(self) -> Moment:
        if self.reach is not None and not self.seconds:
            raise ValueError(f"reach = {self.reach:g} needs a clock; give seconds = the name of one of the study's")
        return self

    @property
    def clock(self) -> str:
        return self.seconds or self.first_done

    def moments(self, rows: Sequence[Row], clock: Clock | None) -> Iterator[tuple[str, list[Row]]]:
        """Each moment in words, with the rows as they are then."""
        rows = selection.timed(rows, self.clock, clock) if clock is not None else list(rows)
        if self.reach is not None:
            yield f"to {self.reach:.0%}", selection.reaching(rows, self.reach)
        elif isinstance(self.bytes, dict):
            for budget in sorted({row.megabytes for row in selected(rows, self.bytes)}):
                yield f"{budget:,.0f} MB", [row for row in rows if row.megabytes <= budget]
        elif self.first_done and rows:
            seconds = selection.first_done(rows)
            known = [(row, points) for row, points in (selection.chosen_for(row, seconds) for row in rows) if points]
            yield f"after {seconds:,.0f} s", [row.stopped(row.steps[n - 1] / row.steps[-1]) for row, n in known]
        elif self.bytes or self.seconds:
            costs = [row.elapsed[-1] if self.seconds and row.elapsed else row.megabytes for row in rows]
            budget = min((cost for cost in costs if cost > 0), default=math.inf) / 2
            while budget < max(costs, default=0.0):
                budget *= 2
                cut = [_within(row, budget / cost if cost else 1.0) for row, cost in zip(rows, costs, strict=True)]
                yield f"{factor(budget)} {'s' if self.seconds else 'MB'}", [row for row in cut if row is not None]
        else:
            yield "", [row.stopped(self.share) for row in rows] if self.share < 1 else rows


def _within(row: Row, share: float) -> Row | None:
    """A row as if stopped at the last recorded round within a share of them; None before the first."""
    done = [step for step in row.steps if 0 < step <= share * row.steps[-1] * (1 + 1e-9)]
    return row.stopped(done[-1] / row.steps[-1]) if done else None


class Needs(selection.Words):
    """What runs must have to decide a sentence."""

    rounds: int = 1
    epochs: int = 0
    seeds: int = 1
    nodes: tuple[int, ...] = ()

    def missing(self, rows: Sequence[Row]) -> list[str]:
        """What these rows lack, in words."""
        epochs, seeds = min(row.epochs or 0 for row in rows), min(len(row.curves) for row in rows)
        rounds, nodes = min(row.steps[-1] for row in rows), {row.nodes for row in rows}
        if epochs < self.epochs or seeds < self.seeds:
            needed, run = (f"{self.epochs} epochs and ", f"{epochs} and ") if self.epochs else ("", "")
            return [f"needs {needed}{self.seeds} seeds, these are {run}{seeds}"]
        if rounds < self.rounds:
            return [f"needs {self.rounds:,} rounds, these are {rounds:,}"]
        return [f"needs M = {M}, which was not run" for M in self.nodes if M not in nodes]


class Sentence(selection.Words):
    """A sentence about the rows of a study: `ours` compared with `theirs`, or a trend of `ours`.

    Args:
        claim: the sentence; {most} is the largest number of machines, {options} or {clock} what `each` names.
        source: who says so.
        where: the rows it is about.
        each: an option: one sentence for each of its values. With "clock", `at` names "{clock}".
        of: what is compared: the "mean" of nodes, the "merged" model or the "worst" node.
        needs: rounds, epochs, seeds and numbers of machines without which nothing is decided.
        ours, theirs: selections of rows, each a table or a list of tables; `of` in `theirs` as above.
        by: options; ours are compared with theirs that have the same ones, the best with the best. An option that
            `theirs` fixes may differ.
        at: when; see `Moment`.
        is: "level" (or ahead), "ahead", "behind", "not ahead" or "not behind".
        tolerance: a number, or a share such as "5%"; by default 5% of errors, 0.01 of others.
        over: whether this has to hold at "all" points, in their "median" or in their "mean".
        trend: a name in TRENDS, over the number of machines `from` ... `to`.
        relative: whether courses are compared in relation to where they start.
    """

    claim: str
    source: str = "the study"
    where: Selections = ({},)
    each: str = ""
    of: Literal["mean", "merged", "worst"] = "mean"
    needs: Needs = Needs()
    ours: Selections = ({},)
    theirs: Selections = ()
    by: tuple[str, ...] = ()
    at: Moment = Moment()
    is_: Annotated[Literal["level", "ahead", "behind", "not ahead", "not behind"], Field(alias="is")] = "level"
    tolerance: Annotated[Tolerance | None, BeforeValidator(_tolerance)] = None
    over: Literal["all", "median", "mean"] = "all"
    trend: str = ""
    from_: Annotated[int | None, Field(alias="from")] = None
    to: int | None = None
    relative: bool = False

    @model_validator(mode="after")
    def _says_something(self) -> Sentence:
        if self.trend and self.trend not in TRENDS:
            raise ValueError(f"trend = {self.trend!r}; there are {', '.join(TRENDS)}")
        if not self.trend and not self.theirs:
            raise ValueError("it compares nothing; give theirs, or a trend")
        list(string.Formatter().parse(self.claim))  # which refuses a single brace
        for table in self.theirs:
            named("of", table.get("of", "mean"), dict.fromkeys(("mean", *BESIDE)))
        if self.over != "all" and self.is_.startswith("not"):
            raise ValueError(f"is = {self.is_!r} for a {self.over}; give level, ahead or behind")
        return self

    def check_names(self, place: str, known: Mapping[str, Options], clocks: Mapping[str, Clock]) -> None:
        """Refuse options that no run has, values that none can have, and a clock that the study does not have."""
        theirs = [{name: value for name, value in table.items() if name != "of"} for table in self.theirs]
        tables = [*self.where, *self.ours, *theirs, *([self.at.bytes] if isinstance(self.at.bytes, dict) else [])]
        selection.check_tables(place, tables, known)
        told = [(name, form, how) for _, name, form, how in string.Formatter().parse(self.claim) if name is not None]
        names = {*self.by, self.each, *(name for name, _, _ in told if name != "most")} - {""}
        selection.check_names(place, names, known)
        for name, form, how in told:
            if name not in ("most", self.each or "most") or form or how:
                raise ValueError(f"{place}: the claim has a {{{name}}}; write {{most}}, or {{rule}} with each = 'rule'")
        if self.at.clock and (self.at.clock, self.each) != ("{clock}", "clock"):
            selection.check_names(place, [self.at.clock], clocks, "clock")

    def check(self, rows: Sequence[Row], clocks: Mapping[str, Clock] | None = None) -> list[Verdict]:
        """Its verdicts: one, or one for each value of an option."""
        clocks, rows = clocks or {}, selected(rows, self.where)
        if not self.each:
            return [self._verdict(rows, clocks, {})]
        if self.each == "clock" and clocks:
            return [self._verdict(rows, clocks, {"clock": name}) for name in clocks]
        values = distinct(selected(rows, self.ours), lambda row: options_of(row).get(self.each))
        if not values:
            return [self._verdict([], clocks, {self.each: self.each})]
        return [self._verdict(selected(rows, {self.each: value}), clocks, {self.each: value}) for value in values]

    def _verdict(self, rows: Sequence[Row], clocks: Mapping[str, Clock], told: Options) -> Verdict:
        claim = self.claim.format(most=max((row.nodes for row in rows), default="most"), **told)
        if not rows:
            return Verdict(claim, self.source, None, ("was not run",))
        name = told["clock"] if self.at.clock == "{clock}" else self.at.clock
        clock = clocks[name] if name else None
        names = selection.varying(rows)
        panels = grouped(rows, lambda row: ", ".join(in_words(name, row.setting.get(name)) for name in names))
        answers = {panel: self._answer(of_panel, clock) for panel, of_panel in panels.items()}
        known = [holds for holds, _ in answers.values() if holds is not None]
        words = {None: "", True: "yes, ", False: "no, "}
        figures = [f"{panel}{': ' * bool(panel)}{words[holds]}{text}" for panel, (holds, text) in answers.items()]
        missing = self.needs.missing(rows)
        if missing or (all(known) and len(known) < len(answers)):  # nothing contradicts it, but not all is known
            return Verdict(claim, self.source, None, (*missing, *figures))
        if 0 < sum(known) < len(answers):
            figures.insert(0, f"yes in {sum(known)} of {len(answers)} panels")
        return Verdict(claim, self.source, all(known), tuple(figures))

    def _answer(self, rows: Sequence[Row], clock: Clock | None) -> Answer:
        """Whether it holds in one panel."""
        if self.of != "mean":
            if any(math.isnan(row.beside(self.of)) for row in rows):
                return None, f"{self.of} was not measured"
            rows = [row.showing(self.of) for row in rows]
        if not self.trend:
            return self._compared(rows, clock)
        lines = grouped(selected(rows, self.ours), lambda row: f"{row.rule} on {row.topology}")
        answers = {line: self._course({row.nodes: row for row in of_line}, rows) for line, of_line in lines.items()}
        holds = [answer for answer, _ in answers.values()]
        texts = [text if len(lines) == 1 else f"{line} {text}" for line, (_, text) in answers.items()]
        return None if None in holds or not holds else all(holds), "; ".join(texts) or "was not run"

    def _compared(self, rows: Sequence[Row], clock: Clock | None) -> Answer:
        """Compare ours with theirs. Theirs that diverged decide nothing; ours that did are behind.

        Between numbers of machines ours that diverged decide nothing either.
        """
        at, tolerance = self.at, self.tolerance
        met, gaps, texts, rivals = list[bool](), list[float](), list[str](), Counter[str]()
        for when, known in at.moments(rows, clock):
            pairs = list(self._pairs(known))
            if (
                not pairs
                and (at.bytes or (at.seconds and at.reach is None))
                and selected(rows, self.ours)
                and self._rivals(known)
            ):
                met.append(False)
                texts.append(f"{when}: none of ours has a value by then")
            for place, group, other in pairs:
                tolerance, one = tolerance or usual(other), best_of(group)
                gap = tolerance.gap(one, other)
                if one.diverged and one.nodes != other.nodes and self.over == "all":  # as in a trend
                    return None, f"{told(one)} at M = {one.nodes}"
                behind = self.is_ in ("behind", "not ahead")
                met.append(behind if one.diverged else any(RELATIONS[self.is_](row, other, tolerance) for row in group))
                gaps += [gap] if math.isfinite(gap) else []
                rivals[other.rule] += 1
                words = [f"{told(one)} against {told(other)}", *([tolerance.told(gap)] if math.isfinite(gap) else [])]
                texts.append(": ".join(filter(None, (", ".join(filter(None, (when, *place))), ", ".join(words)))))
        if tolerance is None or not met:
            return None, "was not run"
        if not gaps:
            text = "; ".join(texts) if at.reach else "all diverged"
            return (all(met) if self.over == "all" else None), text
        middle, low, high = (tolerance.told(gap) for gap in (median(gaps), min(gaps), max(gaps)))
        summary = f"{middle} in the median, {tolerance.told(mean(gaps))} in the mean, from {low} to {high}"
        if self.over == "all":
            best = ", ".join(f"{rule} at {count}" for rule, count in rivals.most_common())
            text = "; ".join(texts) if len(met) <= FEW else f"{summary}; the best of theirs is {best}"
            return all(met), f"in {sum(met)} of {len(met)}: {text}"
        value, most = median(gaps) if self.over == "median" else mean(gaps), tolerance.value
        return {"level": value <= most, "ahead": value < -most, "behind": value > most}[self.is_], summary

    def _pairs(self, rows: Sequence[Row]) -> Iterator[tuple[list[str], list[Row], Row]]:
        """Where ours are compared, in words, ours there, and the best of theirs."""
        rivals = self._rivals(rows)
        fixed = {name for table in self.theirs for name in table}
        fixed |= {whole for part, whole in (("rule", "options"), ("topology", "graph")) if part in fixed}
        groups = grouped(selected(rows, self.ours), lambda row: tuple(options_of(row).get(name) for name in self.by))
        for values, group in groups.items():
            place = dict(zip(self.by, values, strict=True))
            if against := selected(rivals, {name: value for name, value in place.items() if name not in fixed}):
                words = [in_words(name, value) for name, value in place.items()]
                yield words, [row for row in group if not row.diverged] or group, best_of(against)

    def _rivals(self, rows: Sequence[Row]) -> list[Row]:
        """Theirs that did not diverge (never to reach an accuracy is to be late), each showing what is asked for."""
        rivals = []
        for table in self.theirs:
            of = table.get("of", "mean")
            chosen = selected(rows, {name: value for name, value in table.items() if name != "of"})
            rivals += chosen if of == "mean" else [row.showing(of) for row in chosen if of in row.others]
        return [row for row in rivals if self.at.reach or not row.diverged]

    def _course(self, points: Points, rows: Sequence[Row]) -> Answer:
        """Whether one rule on one graph has the trend; `rows` are all of the panel."""
        if len(points) < 2 or any(row.diverged for row in points.values()):
            return None, "has no finite value at two sizes or more"
        first, last = self.from_ or min(points), self.to or max(points)
        if not {first, last} <= points.keys():
            return None, f"the sentence is about other sizes than {', '.join(map(str, sorted(points)))}"
        others = selected(selected(rows, self.theirs), {"graph": points[first].topology})
        trend = Trend(points, first, last, self.tolerance or usual(points[first]), self.relative, others)
        holds, text = TRENDS[self.trend](trend)
        form = ".1%" if points[first].largest else ".3g"
        course = ", ".join(f"{M}: {points[M].value:{form}}" for M in sorted(points))
        return holds, "; ".join(filter(None, (text, course)))


def is_behind(one: Row, other: Row, tolerance: Tolerance | None = None) -> bool:
    """Whether a row is behind another by more than the tolerance, and by more than the seeds scatter."""
    tolerance = tolerance or usual(one)
    apart = one.high < other.low if one.largest else one.low > other.high
    return apart and tolerance.gap(one, other) > tolerance.value


RELATIONS: dict[str, Callable[[Row, Row, Tolerance], bool]] = {
    "level": lambda one, other, tolerance: tolerance.gap(one, other) <= tolerance.value,
    "ahead": lambda one, other, tolerance: is_behind(other, one, tolerance),
    "behind": lambda one, other, tolerance: is_behind(one, other, tolerance),
    "not ahead": lambda one, other, tolerance: not is_behind(other, one, tolerance),
    "not behind": lambda one, other, tolerance: not is_behind(one, other, tolerance),
}


def told(row: Row) -> str:
    """A row and its value, with the range of its seeds and what else is known of it."""
    form = ".1%" if row.largest else ".3f" if selection.in_bits(row) else ".3g"
    seeds = [f"{row.low:{form}} to {row.high:{form}}"] if len(row.curves) > 1 else []
    beside = {name: row.beside(name) for name in BESIDE if row.largest}
    more = [*seeds, *(f"{name} {value:{form}}" for name, value in beside.items() if not math.isnan(value))]
    value = f"{row.value:{form}}" + (f" ({', '.join(more)})" if more else "")
    if row.metric == "seconds":
        return f"{row.rule} on {row.topology} {spread(row)}"
    return f"{row.rule} on {row.topology} {'diverged' if row.diverged else value}"


def spread(row: Row) -> str:
    """Seconds until all seeds are there in words, with those of the first seed if it is earlier."""
    first, last = ("never" if math.isinf(one) else duration(one) for one in (row.low, row.value))
    return f"{last} (from {first})" if row.low < row.value else last


def factor(times: float) -> str:
    """A factor in words: 1.13, 2,290, 4.5e+06."""
    if times < 100:
        return f"{times:.3g}"
    return f"{times:,.0f}" if times < 1e6 else f"{times:.2g}"


# --- seconds to an accuracy ------------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """Who has a share of the best accuracy first."""

    clock: str
    nodes: int
    share: float
    first: dict[str, Row]  # of each family that has runs

    @property
    def numbers(self) -> list[tuple[str, ...]]:
        """A line for each family, as in STANDING."""
        head = self.clock, str(self.nodes), f"{self.share:g}"
        return [
            (*head, of, row.rule, row.topology, f"{row.lr:g}", f"{row.value:.4g}", f"{row.low:.4g}")
            for of, row in self.first.items()
        ]


STANDING = ("clock", "M", "share", "family", "rule", "topology", "lr", "seconds of all seeds", "of the first seed")


class Race(selection.Words):
    """A table of a study: the seconds until all seeds of a way have a share of the best accuracy, first of its family.

    Args:
        title: above it.
        to: shares of the best accuracy of any run, among those with as many machines.
        families: selections of rows, by name.
        ours: names of families: the last column has the seconds of the first of the others over those of the first of
            these.
        of: the "mean" of nodes, the "merged" model or the "worst" node.
    """

    title: str
    to: tuple[Annotated[float, Field(gt=0, le=1)], ...]
    families: dict[str, Selections]
    ours: tuple[str, ...] = ()
    of: Literal["mean", "merged", "worst"] = "mean"

    def check_names(self, place: str, known: Mapping[str, Options], clocks: Mapping[str, Clock]) -> None:
        """Refuse options that no run has, values that none can have, and a study without clocks."""
        selection.check_tables(place, (each for family in self.families.values() for each in family), known)
        for name in self.ours:
            named("family", name, self.families)
        if not clocks:
            raise ValueError(f"{place}: seconds need a clock; give the study [clocks]")

    def run(self, rows: Sequence[Row], clocks: Mapping[str, Clock]) -> list[Standing]:
        """Who is first, for each clock, number of machines and share."""
        standings = []
        rows = [row if self.of == "mean" else row.showing(self.of) for row in rows]
        for name, clock in clocks.items():
            timed = selection.timed(rows, name, clock)
            for M, share in product(sorted({row.nodes for row in timed}), self.to):
                reached = selected(selection.reaching(timed, share), {"nodes": M})
                members = {of: selected(reached, family) for of, family in self.families.items()}
                first = {of: best_of(some) for of, some in members.items() if some}
                standings.append(Standing(name, M, share, first))
        return standings

    def lines(self, standings: Sequence[Standing]) -> list[tuple[str, ...]]:
        """The table: its header, and a line for each standing; "-" where a family has no runs."""
        table = [("clock", "M", "of the best", *self.families, "others / ours")]
        for name, M, share, first in standings:
            cells = [
                "-" if (row := first.get(of)) is None else spread(row) + f", {row.topology}" * math.isfinite(row.low)
                for of in self.families
            ]
            others, ours = (
                min((row.value for of, row in first.items() if (of in self.ours) is wanted), default=math.inf)
                for wanted in (False, True)
            )
            alone = {(False, True): "only others", (True, False): "only ours", (True, True): "-"}
            times = alone.get((math.isinf(others), math.isinf(ours))) or factor(others / ours)
            table.append((name, str(M), f"{share:.0%}", *cells, times))
        return table


# --- trends over the number of machines -----------------------------------------------------------------------------


class Trend(NamedTuple):
    """One rule on one graph, by number of machines, and what a sentence asks about it."""

    points: Points
    first: int
    last: int
    tolerance: Tolerance
    relative: bool
    others: Sequence[Row]  # of theirs, on the same graph

    @property
    def best(self) -> int:
        """The number of machines with the best value."""
        return best_of(self.points.values()).nodes

    def worsens(self, backwards: bool = False) -> Answer:
        """Whether values get worse: no step back that counts, and a clear change from end to end."""
        sizes = sorted((M for M in self.points if self.first <= M <= self.last), reverse=backwards)
        line = [self.points[M] for M in sizes]
        back = any(is_behind(earlier, later) for earlier, later in combinations(line, 2))
        return len(line) > 1 and not back and ERRORS.gap(line[-1], line[0]) >= CHANGE - 1, ""

    def improves(self) -> Answer:
        return self.worsens(backwards=True)

    def stays_within(self) -> Answer:
        values, tolerance = [row.value for row in self.points.values()], self.tolerance
        gap = tolerance.between(min(values), max(values))
        text = f"over smallest {1 + gap:.3g}" if tolerance.is_share else f"less smallest {gap:.3g}"
        return gap <= tolerance.value, f"largest {text}"

    def no_ceiling(self) -> Answer:
        """The most machines are about the best."""
        most = max(self.points)
        times = 1 + ERRORS.gap(self.points[most], self.points[self.best])
        beyond = "" if self.best == most else f", {factor(times)} times that at {most}"
        return times <= CHANGE, f"best at M = {self.best}{beyond}"

    def turns(self) -> Answer:
        """The best number lies between the two, and values get worse beyond."""
        no_ceiling, text = self.no_ceiling()
        return self.first <= self.best < self.last and not no_ceiling, text

    def drops_most(self) -> Answer:
        """No step between neighbouring sizes costs more than the one between the two."""
        steps = pairwise(sorted(self.points))
        drops = {(few, many): OTHERS.gap(self.points[many], self.points[few]) for few, many in steps}
        worst = max(drops, key=lambda step: drops[step])
        if drops[worst] <= self.tolerance.value:
            return None, f"no drop of more than {self.tolerance.value:g}"
        return worst == (self.first, self.last), f"largest drop from {worst[0]} to {worst[1]}"

    def larger_best(self) -> Answer:
        """The best number of machines is larger than that of theirs on the same graph."""
        if not self.others:
            return None, "has nothing to compare with"
        other = best_of(self.others)
        return self.best > other.nodes, f"best at M = {self.best}, {other.rule} at {other.nodes}"

    def better_early(self) -> Answer:
        """The most machines are ahead of the fewest at some early round, each at its own learning rate."""
        few, many = self.points[min(self.points)], self.points[max(self.points)]
        first, last = few.curve.mean(axis=0), many.curve.mean(axis=0)
        if self.relative:
            first, last = first / first[0], last / last[0]
        early, late = dict(zip(few.steps, first, strict=True)), dict(zip(many.steps, last, strict=True))
        if not (both := [t for t in few.steps if t in late]):
            return None, f"M = {many.nodes} and {few.nodes} have no recorded round in common"
        ends = {t: (early[t], late[t]) if few.largest else (late[t], early[t]) for t in both}
        better = [t for t in both if self.tolerance.between(*ends[t]) > self.tolerance.value]
        text = f"better from round {better[0]:,} to {better[-1]:,}" if better else "never better"
        return bool(better) and better[0] <= EARLY * few.steps[-1], f"M = {many.nodes} against {few.nodes}: {text}"


TRENDS: dict[str, Callable[[Trend], Answer]] = {
    method.__name__.replace("_", " "): method
    for method in (
        *(Trend.worsens, Trend.improves, Trend.stays_within, Trend.no_ceiling, Trend.turns),
        *(Trend.drops_most, Trend.larger_best, Trend.better_early),
    )
}
