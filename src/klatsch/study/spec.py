"""A study: a TOML file (docs/studies.md), or the same content in Python, checked before anything runs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from klatsch import catalogue, own, problems, rules
from klatsch import topology as topologies
from klatsch.arguments import check_options, named, printable, shown, there_are, whole
from klatsch.clock.rounds import check_meets
from klatsch.files import text_of
from klatsch.topology.channel import CHANNEL, check_channel
from klatsch.topology.families import split
from klatsch.units import counted, in_words

PAPER_GRID = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1)  # Section 5.1
MOST_POINTS = 10_000  # of `record`
MOST_RUNS = 100_000  # of one study, which takes some seconds to write out
MOST_SETTINGS = 1_000  # of its problem, which is tried with each
WANTED = {  # what to give, for errors
    **dict.fromkeys(("nodes", "steps", "epochs"), "a whole number from 1 up"),
    **dict.fromkeys(("rules", "topologies", "problem"), "a name, or a table with a name and options"),
    **dict.fromkeys(("any_graph", "leave_out", "lazy"), "true or false"),
    "name": "a text of 1 to 100 characters",
    "lr": "a number above 0, such as 0.01",
    "schedule": 'a text such as "cosine"',
    "seeds": "how many, or a list of whole numbers from 0 up",
    "screen": "a table such as { seeds = 1 }",
    "record": f"a whole number from 1 to {MOST_POINTS}",
    "dtype": '"float64" or "float32"',
    "device": '"cpu" or "cuda"',
    "title": "a text",
    "notes": "a list of texts",
    **dict.fromkeys(("clocks", "figures", "tables", "sentences"), "tables, as in docs/studies.md"),
}

Options = dict[str, Any]
Thing = TypeVar("Thing")
Group = TypeVar("Group")


def several(value: object) -> list[Any]:
    """A list without duplicates; a single value becomes a list of one."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ValueError("the list is empty, give at least one entry")
    distinct: dict[Any, Any] = {}
    for entry in entries:  # may be a table, or a mistake that is refused later
        distinct.setdefault(entry if isinstance(entry, str | int | float) else (repr(entry),), entry)
    return list(distinct.values())


def grouped(things: Iterable[Thing], by: Callable[[Thing], Group]) -> dict[Group, list[Thing]]:
    """Things by a value of each, in order."""
    groups: dict[Group, list[Thing]] = {}
    for thing in things:
        groups.setdefault(by(thing), []).append(thing)
    return groups


def axes(options: Options) -> list[list[Any]]:
    """The values of each option: a value, or a flat list of them."""
    for name, value in options.items():
        for entry in value if isinstance(value, list | tuple) else [value]:
            if isinstance(entry, list | tuple | dict):
                raise ValueError(f"{name} = {shown(entry)}; give a value, or a flat list of values")
        if isinstance(value, list | tuple) and not value:
            raise ValueError(f"{name} = []; the list is empty, give at least one entry")
    return [several(value) for value in options.values()]


def combinations(options: Options, most: int = MOST_RUNS) -> list[Options]:
    """All combinations of options, some of which are lists."""
    values = axes(options)
    if (number := math.prod(map(len, values))) > most:
        raise ValueError(f"a grid of {number:,} settings; the limit is {most:,}: shorten its lists")
    return [dict(zip(options, chosen, strict=True)) for chosen in product(*values)]


def _is_stored(info: ValidationInfo) -> bool:
    """Whether it comes from a store: then no name in it is looked up or called."""
    return bool((info.context or {}).get("stored"))


def _named(value: object, info: ValidationInfo) -> object:
    """An entry as a table, with the absolute paths of custom parts."""
    entry = {"name": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or _is_stored(info):
        return entry

    folder = (info.context or {}).get("folder", "")

    def located(given: Any) -> Any:
        return [located(each) for each in given] if isinstance(given, list | tuple) else own.located(given, folder)

    return {**entry, **{word: located(entry[word]) for word in ("name", "wire") if word in entry}}


def _all_named(value: object, info: ValidationInfo) -> object:
    # A rule may have no graphs of its own, and a stored study none at all.
    is_none = value is None or (_is_stored(info) and value in ([], ()))
    return value if is_none else [_named(entry, info) for entry in several(value)]


def _seeds(value: object) -> object:
    is_list = value is None or isinstance(value, list | tuple)
    return value if is_list else list(range(whole(value, "seeds", 1, MOST_RUNS)))


Unboxed = BeforeValidator(lambda value: value.item() if isinstance(value, np.generic) else value)
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 63), Unboxed]
PointCount = Annotated[int, Field(strict=True, ge=1, le=MOST_POINTS), Unboxed]
Sizes = Annotated[tuple[Count, ...], BeforeValidator(several)]
PositiveRate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), Unboxed]
ScheduleName = Annotated[str, AfterValidator(lambda text: rules.Decay(1.0, text).schedule)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=1 << 63), Unboxed]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(several), BeforeValidator(_seeds)]


class TableEntry(BaseModel):
    """A name with options; a list of values is a grid."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @model_validator(mode="after")
    def _checked(self, info: ValidationInfo) -> TableEntry:
        if not _is_stored(info):  # which was checked before it ran
            self.check()
        return self

    def check(self) -> None:
        """Refuse an unknown name, option or value."""

    @property
    def options(self) -> Options:
        return self.model_extra or {}

    def combinations(self) -> list[Options]:
        return combinations(self.options)

    @property
    def label(self) -> str:
        """Its name in tables."""
        return own.label(self.name)


class ProblemEntry(TableEntry):
    """A problem; `nodes` and `seed` come from the study."""

    name: str = "least-squares"

    def check(self) -> None:
        check_options(self.label, self.options, [name for name in problems.options(self.name) if name != "seed"])
        settings = combinations(self.options, MOST_SETTINGS)
        for setting in () if own.is_own(self.name) else settings:  # which may not allow every size: see `expand`
            try:
                problems.check(self.name, 2, **setting)
            except (MemoryError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{self.name} with {setting} cannot be built ({reason})") from None


class TopologyEntry(TableEntry):
    """A family of graphs, with options of its channel; `nodes` are some of the study's, all by default.

    `meets` is that of `simulate`.
    """

    lazy: StrictBool = False  # mix with (I + P) / 2
    nodes: Sizes | None = None

    @model_validator(mode="before")
    @classmethod
    def _taken_apart(cls, value: Any) -> Any:
        """Read "ring/8" as ring with every = 8, so that both are the same runs."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or split(name) == (name, 1):
            return value
        family, every = split(name)
        if "every" in value:
            raise ValueError(f"{name} with every = {shown(value['every'])}: the name says that; leave one of them out")
        return {**value, "name": family, "every": every}

    def check(self) -> None:
        check_options(self.label, self.options, (*topologies.options(self.name), "meets"))
        for chosen in super().combinations():
            channel = {name: value for name, value in chosen.items() if name in CHANNEL}
            check_channel(**channel)
            check_meets("a graph", chosen.get("meets", ""), **channel)

    def combinations(self) -> list[Options]:
        """All combinations, without defaults of the channel: wire = "float32" is the graph as it is."""
        given, defaults = super().combinations(), {**CHANNEL, "meets": ""}.items()
        return [{name: v for name, v in chosen.items() if (name, v) not in defaults} for chosen in given]


class RuleEntry(TableEntry):
    """An update rule; `lr`, `schedule` and `topologies` default to the study's."""

    topologies: Annotated[tuple[TopologyEntry, ...] | None, BeforeValidator(_all_named)] = None

    def check(self) -> None:
        for word in {"schedule", "topologies"} & set(rules.options(self.name) if own.is_own(self.name) else ()):
            raise ValueError(f"{self.label} has an option {word}, which is the study's word; give it another name")
        for chosen in self.combinations():
            make_rule(self.name, {"lr": PAPER_GRID[0], **chosen}, steps=1)

    @property
    def in_full(self) -> str:
        """Its name, with the options that all of its runs share."""
        options = self.options.items()
        shared = {name: value for name, value in options if name != "lr" and not isinstance(value, list | tuple)}
        return f"{self.label} ({in_words(shared)})" if shared else self.label


def make_rule(name: str, options: Options, steps: int) -> rules.Rule:
    """A rule from its options in a study; `schedule` says how the learning rate changes over the steps."""
    chosen = dict(options)
    if "schedule" in chosen:
        chosen["lr"] = rules.Decay(chosen["lr"], chosen.pop("schedule"), steps)
    return rules.make(name, **chosen)


class Screen(BaseModel):
    """Short runs that choose the learning rates: what differs from the study's runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: Count | None = None
    epochs: Count | None = None
    seeds: Seeds | None = None  # by default the first of the study's
    record: PointCount | None = None

    def rounds(self, steps: int, epochs: int | None) -> int:
        """The rounds of a short run, where the study's has so many, in so many epochs if it counts those."""
        return steps // epochs * (self.epochs or epochs) if epochs else self.steps or steps

    @property
    def text(self) -> str:
        """What chooses, in words."""
        length = [counted(n, word) for n, word in ((self.steps, "round"), (self.epochs, "epoch")) if n is not None]
        return " and ".join([*length, counted(len(self.seeds or (0,)), "seed")])


class Study(BaseModel):
    """A grid of runs: every rule on every topology at every size, with all combinations of their options.

    docs/studies.md says what the keys mean, what they default to, and what `figures`, `tables` and `sentences` hold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    nodes: Sizes
    rules: Annotated[tuple[RuleEntry, ...], BeforeValidator(_all_named)]
    topologies: Annotated[tuple[TopologyEntry, ...], BeforeValidator(_all_named)] = ()
    steps: Count | None = None
    epochs: Count | None = None
    name: Annotated[str, Field(min_length=1, max_length=100)] = "study"
    problem: Annotated[ProblemEntry, BeforeValidator(_named)] = Field(default_factory=ProblemEntry)
    lr: Annotated[tuple[PositiveRate, ...], BeforeValidator(several)] = PAPER_GRID
    schedule: Annotated[tuple[ScheduleName, ...], BeforeValidator(several)] = ("constant",)
    seeds: Seeds = (0, 1, 2)
    screen: Screen | None = None
    record: PointCount = 50
    dtype: Literal["float64", "float32"] = "float64"
    device: str = "cpu"
    any_graph: StrictBool = False
    leave_out: StrictBool = False
    title: str = ""
    notes: tuple[str, ...] = ()
    clocks: dict[str, Options] = Field(default_factory=dict)
    figures: tuple[Options, ...] = ()
    tables: tuple[Options, ...] = ()
    sentences: tuple[Options, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _in_print(cls, content: Any) -> Any:
        return printable(content)

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        own_graphs = [rule.topologies is not None for rule in self.rules]
        if not self.topologies and not all(own_graphs):
            raise ValueError("topologies is missing; give it, as in the example of docs/studies.md")
        if self.topologies and all(own_graphs):
            raise ValueError("topologies: every rule has graphs of its own, and none uses these; leave them out")
        self._check_sizes()
        if (self.steps is None) == (self.epochs is None):
            given = "both are given" if self.steps else "neither is given"
            raise ValueError(f"a study needs either steps or epochs, and {given}; give one of them")
        custom = own.is_own(self.problem.name)
        if self.epochs is not None and (custom or problems.declared(self.problem.name).rounds_per_epoch is None):
            raise ValueError(
                f"epochs = {self.epochs}, but {self.problem.label} has no data set of known size; give steps"
            )
        if self.screen is not None:
            self._check_screen(self.screen)
        return self

    def _check_sizes(self) -> None:
        used = {nodes for _, graph in self.pairs for nodes in graph.nodes or self.nodes}
        if unused := sorted(set(self.nodes) - used):
            raise ValueError(f"nodes = {unused[0]}: no graph of the study has this size; leave it out")
        runs = 0
        for rule, graph in self.pairs:
            if others := sorted(set(graph.nodes or ()) - set(self.nodes)):
                raise ValueError(
                    f"{graph.label} has nodes = {others[0]}, which the study does not have; add it to the study's nodes"
                )
            grids = *axes(self.options_of(rule)), *axes(graph.options), *axes(self.problem.options)
            runs += math.prod(map(len, grids)) * len(graph.nodes or self.nodes)
        runs *= max(len(self.seeds), len(self.screen.seeds or ()) if self.screen else 0)
        if runs > MOST_RUNS:
            raise ValueError(
                f"a grid of {runs:,} runs; the limit is {MOST_RUNS:,}: shorten its lists, or split it into several "
                "studies, which may share a store"
            )

    def _check_screen(self, screen: Screen) -> None:
        unit, other = ("steps", "epochs") if self.steps is not None else ("epochs", "steps")
        if (given := vars(screen)[other]) is not None:
            raise ValueError(f"screen.{other} = {given}, but the study counts {unit}; give {unit} or leave it out")
        short, full = vars(screen)[unit], vars(self)[unit]
        if short is not None and short > full:
            raise ValueError(f"screen.{unit} = {short}, more than the study's {full}; give at most that many")

    def options_of(self, rule: RuleEntry) -> Options:
        """The options of a rule, each a value or a list, with those that it takes from the study."""
        return {"lr": self.lr, **rule.options, "schedule": rule.options.get("schedule", self.schedule)}

    @property
    def pairs(self) -> list[tuple[RuleEntry, TopologyEntry]]:
        """Every rule with each of its graphs, ordered by graph: the study's first, then those that only rules have."""
        own_graphs = [graph for rule in self.rules for graph in rule.topologies or ()]
        graphs: list[TopologyEntry] = several([*self.topologies, *own_graphs])
        return [
            (rule, graph) for graph in graphs for rule in self.rules if graph in (rule.topologies or self.topologies)
        ]

    def rounds(self, nodes: int, setting: Options) -> int:
        """Rounds of a run on this many machines; 0 if each has less than a batch of data."""
        if self.steps is not None:
            return self.steps
        per_epoch = problems.declared(self.problem.name).rounds_per_epoch
        return per_epoch(nodes, **setting) * (self.epochs or 0) if per_epoch else 0

    @property
    def length(self) -> str:
        """How long its runs are, in words."""
        return counted(self.steps, "round") if self.steps is not None else counted(self.epochs or 0, "epoch")

    @property
    def grids(self) -> list[tuple[str, tuple[float, ...]]]:
        """Each rule's name, with the options that it has in all of its runs, and its learning rates."""
        return [(rule.in_full, tuple(several(rule.options.get("lr", self.lr)))) for rule in self.rules]

    @property
    def choice(self) -> str:
        """How learning rates are chosen, in words."""
        first, *others = {grid for _, grid in self.grids}
        if all(len(grid) == 1 for _, grid in self.grids):
            return "one learning rate for each rule" if others else f"learning rate {first[0]:g}"
        choice = "best learning rate of each rule's grid" if others else f"best of {len(first)} learning rates"
        return choice if self.screen is None else f"{choice} by runs of {self.screen.text}"


def load(path: str | Path) -> Study:
    """A study from a TOML file."""
    path = Path(path)
    try:
        content = tomllib.loads(text_of(path))
        return parse({"name": path.stem, **content}, f"{path}: ", path.parent)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give the TOML file of a study") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give the TOML file of a study") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; give a study, as in docs/studies.md") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None


def parse(content: Mapping[str, Any], source: str = "", folder: str | Path = "", stored: bool = False) -> Study:
    """A study from plain data.

    Args:
        content: what a TOML file would hold.
        source: a prefix for errors.
        folder: where files such as mine.py of "mine.py:Extra" are; the current folder by default.
        stored: whether it comes from a store: nothing that it names is looked up or called.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{source}{content!r} is not a study; give a dictionary, or load(file)")
    try:
        return Study.model_validate(dict(content), context={"folder": folder, "stored": stored})
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
        errors.sort(key=lambda error: error["type"] != "extra_forbidden")  # a misspelt key explains a missing one
        more = f"; that is the first of {len(errors)} mistakes" if len(errors) > 1 else ""
        known = Screen if errors[0]["loc"][:1] == ("screen",) else Study
        raise ValueError(f"{source}{explained(errors[0], known)}{more}") from None


def explained(error: ErrorDetails, known: type[BaseModel], place: str = "") -> str:
    """An error in a table of this kind in one line: klatsch's own message, or what to give instead."""
    loc = error["loc"]
    field = next((str(part) for part in reversed(loc) if isinstance(part, str)), "")
    if field not in ("rules", "topologies"):  # others are lists of plain values, and the value says which
        loc = loc[: len(loc) - loc[::-1].index(field)] if field else loc
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    key = "".join([place, *parts]).lstrip(".")
    if error["type"] == "extra_forbidden":
        if key == "scales":
            return "scales are for studies that come with klatsch (klatsch reproduce NAME); give the keys of one scale"
        names = [field.alias or name for name, field in known.model_fields.items()]
        return f"unknown key {key!r}; {there_are(str(loc[-1]), names)}"
    if error["type"] == "missing":
        return f"{key} is missing; give it, as in the example of docs/studies.md"
    value, message = error["input"], error["msg"].removeprefix("Value error, ")
    if error["type"] != "value_error":
        asked = "clocks" if loc[:1] == ("clocks",) else field  # clocks have names of the user's, such as lr
        message = f"give {WANTED[asked]}" if asked in WANTED else f"{message[:1].lower()}{message[1:]}"
    elif isinstance(value, dict | BaseModel):  # the message shows the option and its value
        return f"{key}: {message}" if key else message
    elif message.startswith(f"{field} = "):
        return key.removesuffix(field) + message
    return f"{key} = {shown(value)}; {message}"


# --- studies that come with klatsch, at several scales ---------------------------------------------------------------


def content_of(name: str, scale: str) -> Options:
    """What an installed study says at one of its scales, as `study.parse` takes it."""
    content = tomllib.loads((catalogue.STUDY_FILES / f"{name}.toml").read_text(encoding="utf-8"))
    chosen = named("scale", scale, content.pop("scales"))
    title = f"{content.pop('title')} ({scale} scale)"
    return {"name": f"{name}-{scale}", "title": title, **content, **chosen}


def study_of(name: str, scale: str, device: str = "cpu", dtype: str | None = None, epochs: int | None = None) -> Study:
    """An installed study; in float32 on a CPU, where that is twice as fast, and in float64 on a GPU, unless it says so.

    `dtype` and `epochs` take the place of its own; only studies that count epochs have them.
    """
    content = content_of(name, scale) | {"device": device}
    if epochs is not None:
        if "epochs" not in content:
            raise ValueError(f"epochs = {epochs}, but {name} has no data set to go through; leave epochs out")
        points = {count: max(3, min(count, 10)) for count in (content["epochs"], epochs)}
        if content["record"] == points[content["epochs"]]:  # which is not a number of its own
            content["record"] = points[epochs]
        content["epochs"] = epochs
        if short := content.get("screen", {}).get("epochs"):
            content["screen"] |= {"epochs": min(epochs, short)}
    if dtype is not None:
        if content.get("dtype", dtype) != dtype:
            raise ValueError(f"dtype = {dtype!r}; {name} trains in {content['dtype']}, leave dtype out")
        content["dtype"] = dtype
    return parse({"dtype": "float32" if device == "cpu" else "float64"} | content)
