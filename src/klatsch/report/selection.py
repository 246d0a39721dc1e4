"""Rows by their options: what the sentences and figures of a study may name."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from klatsch import catalogue, own
from klatsch.arguments import shown, there_are
from klatsch.clock import Clock, Deaths, Links, Sites, Uneven
from klatsch.study.cases import Case, defaults, elapsed
from klatsch.study.choices import Row
from klatsch.study.spec import Options, explained, grouped
from klatsch.units import compact, ordinal

BOUNDS: dict[str, Callable[..., bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "from": operator.ge,
    "to": operator.le,
    "starts": lambda value, bound: str(value).startswith(bound),
}
NAMES = ("rule", "options", "topology", "graph", "wire", "hook", "clock")  # options whose values say what they are

Selection = Options
Selections = Annotated[
    tuple[Selection, ...], BeforeValidator(lambda given: [given] if isinstance(given, Mapping) else given)
]
Value = TypeVar("Value")


class Words(BaseModel):
    """A table of a study file that says what its page shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, tables: Sequence[Options], key: str) -> dict[str, Self]:
        """Tables of a study by their places, such as "sentences[0]"."""
        read = {}
        for k, table in enumerate(tables):
            try:
                read[f"{key}[{k}]"] = cls.model_validate(table)
            except ValidationError as refusal:
                raise ValueError(explained(refusal.errors(include_url=False)[0], cls, f"{key}[{k}]")) from None
        return read


def options_of(row: Row | Case) -> Options:
    """All options of a row or run but the learning rate and the seed, defaults included."""
    if isinstance(row, Row):
        names = {"rule": row.rule.partition(" (")[0], "topology": row.topology.partition(" (")[0]}
        of_row = {"options": row.rule, "graph": row.topology, "nodes": row.nodes, **row.setting}
        return (options_of(row.case) if row.case else names) | of_row
    known = {} if own.is_own(row.rule) else defaults("rule", row.rule)  # in files that a store must not open
    return {
        **{name: "none" if value is None else value for name, value in known.items()},  # TOML has no null
        "schedule": "constant",
        **row.rule_options,
        **row.channel._asdict(),
        "meets": row.meets,
        **row.topology_options,
        **row.problem_options,
        "rule": own.label(row.rule),
        "options": row.label,  # the rule with its options
        "topology": own.label(row.topology),
        "graph": row.graph_label,  # the topology with its options
        "nodes": row.nodes,
    }


def selected(rows: Iterable[Row], wanted: Selection | Sequence[Selection]) -> list[Row]:
    """The rows that a selection, or one of several, fits."""
    wanted = [wanted] if isinstance(wanted, Mapping) else wanted
    return [row for row in rows if any(_fits(options_of(row), each) for each in wanted)]


def _fits(options: Options, wanted: Selection) -> bool:
    return all(name in options and _is(options[name], value) for name, value in wanted.items())


def _is(value: object, wanted: object) -> bool:
    if isinstance(wanted, list | tuple):
        return any(_is(value, each) for each in wanted)
    if isinstance(wanted, Mapping):
        return all(BOUNDS[name](value, bound) for name, bound in wanted.items())
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool))


NAMED = {"rule": catalogue.RULES, "topology": catalogue.TOPOLOGIES}


def check_names(place: str, names: Iterable[str], known: Collection[str], what: str = "option of its runs") -> None:
    """Refuse options that no run of a study has, or clocks that it does not have."""
    for name in names:
        if name not in known:
            raise ValueError(f"{place}: the study has no {what} {name!r}; {there_are(name, known)}")


def check_tables(place: str, tables: Iterable[Selection], known: Mapping[str, Options]) -> None:
    """Refuse selections by options or names that no run has, or with bounds that do not fit what runs have."""
    for name, wanted in ((name, wanted) for table in tables for name, wanted in table.items()):
        check_names(place, [name], known)
        for one in [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else ():
            own = known[name].values()
            # One that klatsch knows may belong to another scale of the study; products and files are not looked up.
            if name in NAMED and one not in own and one not in NAMED[name] and not {*"+:"} & {*str(one)}:
                raise ValueError(f"{place}: no run of the study has {name} = {one!r}; {there_are(str(one), own)}")
        for text, value in known[name].items():
            try:
                _is(value, wanted)
            except (LookupError, TypeError):
                bounds = f"{', '.join(BOUNDS)}: a number for numbers, a word for words"
                raise ValueError(f"{place}: {name} = {shown(wanted)} for runs with {text}; give {bounds}") from None


def in_words(name: str, value: object) -> str:
    """The value of an option; empty if there is nothing to say."""
    if name == "nodes":
        return f"M = {value}"
    if name == "every":
        return "every round" if value == 1 else f"every {ordinal(value)} round"  # type: ignore[arg-type]
    if name == "late":
        return f"late {value}" if value else ""
    if name == "meets":
        return str(value).partition(" ")[0]
    return str(value) if name in NAMES else f"{name} {compact(value)}"


def distinct(rows: Iterable[Row], of: Callable[[Row], Value]) -> list[Value]:
    """The distinct values, in order."""
    return list(dict.fromkeys(of(row) for row in rows))


def varying(rows: Sequence[Row]) -> list[str]:
    """The problem's options that differ between rows."""
    names = dict.fromkeys(name for row in rows for name in row.setting)
    return [name for name in names if len({row.setting.get(name) for row in rows}) > 1]


def in_bits(row: Row) -> bool:
    """Whether its values are bits per byte."""
    return row.metric.partition(",")[0] == "bits"


def best_of(rows: Iterable[Row]) -> Row:
    """The row with the best value; among equals, the one with the better best seed."""
    return min(rows, key=lambda row: (-row.value, -row.high) if row.largest else (row.value, row.low))


# --- time -----------------------------------------------------------------------------------------------------------


def clock_of(options: Options) -> Clock:
    """A clock of a study: options of `Clock`; `network` and `deaths` may be tables, see docs/clock.md."""
    if any(str(value).lower().endswith(".csv") for value in options.values()):
        raise ValueError(f"clocks: {shown(options)} names a file, which a store would not hold; give numbers")
    try:
        network, deaths = options.get("network", "10gbe"), options.get("deaths")
        made = {"network": _network({**network}) if isinstance(network, Mapping) else network}
        return Clock(**{**options, **made, "deaths": None if deaths is None else Deaths(**deaths)})
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"clocks: {shown(options)} is no clock ({error}); give gradient and network") from None


def _network(table: Options) -> Links:
    """Links from a table: all alike, of several sites (`sites` and `inside`), or with a `factor` between them."""
    if "sites" in table:
        others = {name: value for name, value in table.items() if name not in ("sites", "inside")}
        return Sites(**others, sizes=table["sites"], inside=_network(table["inside"]))
    return Uneven(**table) if "factor" in table else Links(**table)


def timed(rows: Iterable[Row], name: str, clock: Clock) -> list[Row]:
    """Rows timed by a clock, without those whose schedules were made by another clock."""
    placed = []
    for row in rows:
        meets = row.case.meets.strip() if row.case else ""
        said = re.fullmatch(r"\w+\s+(.+?)(?:\s+over\s+(\S+))?", meets)  # as in `clock.rounds.scheduled`
        own_clock = said and (said[1], said[2] or "10gbe") == (str(clock.gradient), clock.network)
        if row.case and (not meets or own_clock):
            seconds = elapsed(row.case, row.exchange, clock, row.steps)
            placed += [replace(row, setting={**row.setting, "clock": name}, elapsed=seconds)] if seconds else []
    return placed


@dataclass(frozen=True)
class Reached(Row):
    """A row that shows the seconds until each seed has an accuracy; inf if it never has."""

    @property
    def value(self) -> float:
        """Until all seeds have it: a mean says nothing where one never does."""
        return self.high


def reaching(rows: Iterable[Row], share: float) -> list[Row]:
    """Rows that show the seconds until, at a recorded round, they first have this share of the best accuracy.

    The best is that of any row at the end, among those with as many nodes. (Of errors: the smallest over the share.)
    """
    reached = list[Row]()
    for same in grouped(rows, lambda row: (row.nodes, row.setting_text)).values():
        best = best_of(same)
        target = best.value * share if best.largest else best.value / share
        for row in same:
            arrived = row.curve >= target if row.largest else row.curve <= target
            first = np.where(arrived.any(1), np.array(row.elapsed)[arrived.argmax(1)], np.inf)[:, None, None]
            known = vars(row.stopped(1)) | {"metric": "seconds", "largest": False, "others": {}}
            known |= {"steps": row.steps[-1:], "elapsed": None, "curves": first, "consensus": first}
            reached.append(Reached(**known))
    return reached


def first_done(rows: Iterable[Row]) -> float:
    """The seconds of the run that is done first."""
    return min(row.elapsed[-1] for row in rows if row.elapsed)


def chosen_for(row: Row, seconds: float) -> tuple[Row, int]:
    """The row with the learning rate that is best after some seconds, and how many points it has by then."""
    points = sum(when <= seconds * (1 + 1e-9) for when in row.elapsed or ())
    best = replace(row, curves=row.curves[:, : max(1, points)]).best
    curves, consensus = row.curves[:, :, [best]], row.consensus[:, :, [best]]
    return replace(row, lrs=(row.lrs[best],), tried=row.lrs, curves=curves, consensus=consensus, others={}), points
