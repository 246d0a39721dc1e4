"""What a study is: a TOML file, or the same in Python, checked before anything runs.

name = "ring"                       # of the study, in tables and reports
steps = 10000                       # rounds
nodes = [4, 9, 16]
seeds = 3                           # 0, 1, 2; or a list
lr = [1e-3, 1e-2]                   # chosen by mean final error, for each rule, graph and size by itself
topologies = ["ring", "ring/8", { name = "base_graph", k = 2 }]    # ring/8: gossip in every 8th round

[problem]
name = "least-squares"
noise = [1.0, 10.0]                 # a list is a grid

[[rules]]
name = "dat"
order = ["atc", "cta"]

[[rules]]
name = "d2"
lr = [1e-4, 1e-3]                   # a grid of its own

[[rules]]
name = "mine.py:Extra"              # a rule of your own, in a file beside this one, which is executed
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from klatsch import own, problems, rules
from klatsch import topology as topologies
from klatsch.arguments import check_options, whole
from klatsch.files import text_of
from klatsch.study.grids import MOST_RUNS, MOST_SETTINGS, Options, combinations, count, counted, several, short
from klatsch.topology.checks import rounds_between
from klatsch.topology.silence import split

PAPER_GRID = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1)  # Section 5.1


def _named(value: Any, info: ValidationInfo) -> Any:
    """An entry as a table, in which names of files have their whole path."""
    entry = {"name": value} if isinstance(value, str) else value
    if isinstance(entry, Mapping) and own.is_own(entry.get("name")):
        return {**entry, "name": own.located(entry["name"], (info.context or {}).get("folder", ""))}
    return entry


def _by_name(value: Any, info: ValidationInfo) -> Any:
    return [_named(entry, info) for entry in several(value)]


def _stored(info: ValidationInfo) -> bool:
    """Whether a study comes from a store: then it was checked before it ran, and its files may be gone."""
    return bool((info.context or {}).get("stored"))


def _seeds(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [whole(seed, "seed", 0) for seed in several(value)]
    if (seeds := whole(value, "seeds", 1)) > MOST_RUNS:
        raise ValueError(f"seeds = {seeds}; give a whole number up to {MOST_RUNS:,}")
    return list(range(seeds))


def _nodes(value: Any) -> Any:
    return [whole(nodes, "nodes", 1) for nodes in several(value)]


def _rates(value: Any) -> Any:
    rates = several(value)
    for lr in rates:
        if isinstance(lr, bool) or not isinstance(lr, int | float):
            raise ValueError(f"lr = {short(lr)}; give numbers above 0")
        rules.make("dsgd", lr=lr)
    return rates


def _title(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("give one line of text that can be printed")
    return value


def _number_of(name: str, most: int = 1 << 62, optional: bool = False) -> BeforeValidator:
    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if (number := whole(value, name, 1)) > most:
            raise ValueError(f"{name} = {number}; give a whole number up to {most:,}")
        return number

    return BeforeValidator(check)


class Entry(BaseModel):
    """Something with a name and options; an option that is a list is a grid."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def combinations(self) -> list[Options]:
        """All combinations of the options."""
        return combinations(self.model_extra or {})

    @property
    def label(self) -> str:
        """What to call it in tables."""
        return own.label(self.name)


class ProblemEntry(Entry):
    """The problem: `nodes` and `seed` come from the study."""

    name: str = "least-squares"

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> ProblemEntry:
        if own.is_own(self.name) and _stored(info):
            return self
        known = [option for option in problems.options(self.name) if option != "seed"]
        check_options(self.label, self.model_extra or {}, known)
        for chosen in combinations(self.model_extra or {}, MOST_SETTINGS):
            if own.is_own(self.name):
                continue  # it may not have any size; `expand` asks it for those of the study
            try:
                problems.check(self.name, 2, **chosen)
            except (MemoryError, RuntimeError) as error:
                raise ValueError(f"{self.name} with {chosen} cannot be built ({str(error).splitlines()[0]})") from None
        return self


class RuleEntry(Entry):
    """An update rule; without `lr` it takes the study's."""

    @model_validator(mode="before")
    @classmethod
    def _lazy_by_itself(cls, entry: Any) -> Any:
        """Files of klatsch 0.1 may say lazy = "auto" of D2, which is lazy by itself since."""
        if isinstance(entry, Mapping) and entry.get("lazy") == "auto" and entry.get("name") in ("d2", "dat-d2"):
            return {option: value for option, value in entry.items() if option != "lazy"}
        return entry

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> RuleEntry:
        if not (own.is_own(self.name) and _stored(info)):
            for chosen in self.combinations():
                rules.make(self.name, **{"lr": PAPER_GRID[0], **chosen})
        return self


class TopologyEntry(Entry):
    """A family of graphs; the number of nodes comes from the study."""

    lazy: StrictBool = False  # mix with (I + P) / 2

    @model_validator(mode="before")
    @classmethod
    def _taken_apart(cls, value: Any) -> Any:
        """The name "ring/8" as ring with every = 8, so that both are the same runs."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or split(name) == (name, 1):
            return value
        family, every = split(name)
        if "every" in value:
            raise ValueError(f"{name} with every = {short(value['every'])}: its name says that; leave one of them out")
        return {**value, "name": family, "every": every}

    @model_validator(mode="after")
    def _known(self, info: ValidationInfo) -> TopologyEntry:
        if not (own.is_own(self.name) and _stored(info)):
            check_options(self.label, self.model_extra or {}, topologies.options(self.name))
        for every in several((self.model_extra or {}).get("every", 1)):
            rounds_between(every)
        self.combinations()
        return self

    def combinations(self) -> list[Options]:
        """All combinations of the options; gossip in every round is not said, as if it had been left out."""
        found = super().combinations()
        return [{name: value for name, value in one.items() if (name, value) != ("every", 1)} for one in found]


class Study(BaseModel):
    """A grid of runs: every rule on every topology at every size, with all combinations of their options.

    Args:
        nodes: numbers of machines M.
        rules: names, or tables with a name and options.
        topologies: the same.
        steps: rounds of every run; or else
        epochs: how often every run goes through all the data, where the problem has a data set. More machines then do
            fewer rounds each, and metrics are taken evenly.
        name: what to call it in tables and reports.
        problem: a table with a name and options; the paper's least squares by default.
        lr: learning rates of the rules that give none of their own.
        seeds: how many (0, 1, 2...), or a list.
        record: at how many rounds metrics are kept: log-spaced ones, or evenly spaced ones with `epochs`.
        dtype: "float64" or "float32".
        device: "cpu", "cuda", "cuda:1"...
        any_graph: run also where a rule refuses a graph.
        leave_out: name what does not fit (a size that a graph cannot have, a graph that a rule refuses) and leave it
            out, instead of refusing the study.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    nodes: Annotated[tuple[int, ...], BeforeValidator(_nodes)]
    rules: Annotated[tuple[RuleEntry, ...], BeforeValidator(_by_name)]
    topologies: Annotated[tuple[TopologyEntry, ...], BeforeValidator(_by_name)]
    steps: Annotated[int | None, _number_of("steps", optional=True)] = None
    epochs: Annotated[int | None, _number_of("epochs", optional=True)] = None
    name: Annotated[str, Field(min_length=1, max_length=100), BeforeValidator(_title)] = "study"
    problem: Annotated[ProblemEntry, BeforeValidator(_named)] = Field(default_factory=ProblemEntry)
    lr: Annotated[tuple[float, ...], BeforeValidator(_rates)] = PAPER_GRID
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = (0, 1, 2)
    record: Annotated[int, _number_of("record", 10_000)] = 50
    dtype: Literal["float64", "float32"] = "float64"
    device: str = "cpu"
    any_graph: StrictBool = False
    leave_out: StrictBool = False

    @model_validator(mode="after")
    def _has_an_end(self) -> Study:
        rules = sum(count({"lr": self.lr, **(rule.model_extra or {})}) for rule in self.rules)
        graphs = sum(count(graph.model_extra or {}) for graph in self.topologies)
        runs = rules * graphs * count(self.problem.model_extra or {}) * len(self.nodes) * len(self.seeds)
        if runs > MOST_RUNS:
            raise ValueError(
                f"a grid of {runs:,} runs; {MOST_RUNS:,} are the most: make its lists shorter, or several studies of "
                "it, which may share a store"
            )
        return self

    @model_validator(mode="after")
    def _has_length(self) -> Study:
        if (self.steps is None) == (self.epochs is None):
            given = "both are given" if self.steps else "neither is given"
            raise ValueError(f"a study is as long as its steps or its epochs say, and {given}; give one of them")
        own_problem = own.is_own(self.problem.name)
        if self.epochs is not None and (own_problem or problems.rounds_per_epoch(self.problem.name, 1) is None):
            raise ValueError(
                f"epochs = {self.epochs}, but {self.problem.label} has no data set to go through; give steps"
            )
        return self

    def rounds(self, nodes: int, setting: Options) -> int:
        """Rounds of a run with so many machines; 0 where each has less than a batch of the data."""
        if self.steps is not None:
            return self.steps
        return (problems.rounds_per_epoch(self.problem.name, nodes, **setting) or 0) * (self.epochs or 0)

    @property
    def length(self) -> str:
        """How long its runs are, in words."""
        return counted(self.steps, "round") if self.steps is not None else counted(self.epochs or 0, "epoch")

    @property
    def grids(self) -> list[tuple[str, tuple[float, ...]]]:
        """The rules by name, each with the learning rates that it chooses from."""
        return [(rule.label, tuple(several((rule.model_extra or {}).get("lr", self.lr)))) for rule in self.rules]

    @property
    def choice(self) -> str:
        """How learning rates are chosen, in words."""
        grids = {grid for _, grid in self.grids}
        if len(grids) > 1:
            return "best learning rate of each rule's grid"
        (grid,) = grids
        return f"best of {len(grid)} learning rates" if len(grid) > 1 else f"learning rate {grid[0]:g}"


def load(path: str | Path) -> Study:
    """A study from a TOML file.

    Raises:
        ValueError: it cannot be read, or something is not allowed; with the file, the key, the value and the remedy.
    """
    path = Path(path)
    try:
        return _loaded(path)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; give a study, as in docs/studies.md") from None


def _loaded(path: Path) -> Study:
    try:
        content = tomllib.loads(text_of(path))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give the name of a study, a TOML file") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give the name of a study, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None
    content.setdefault("name", path.stem)
    return parse(content, f"{path}: ", path.parent)


def parse(content: Mapping[str, Any], source: str = "", folder: str | Path = "", stored: bool = False) -> Study:
    """A study from plain data.

    Args:
        content: what a TOML file would hold.
        source: where it is from, for the errors.
        folder: where files of one's own are, which names such as "mine.py:Extra" speak of; the current one by default.
        stored: it was run before, so that such files are not needed.

    Raises:
        ValueError: something is not allowed; one line with the source, the key, the value and the remedy.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{source}{content!r} is no study; give a dictionary, or load(file)")
    try:
        return Study.model_validate(dict(content), context={"folder": folder, "stored": stored})
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
        errors.sort(key=lambda error: error["type"] != "extra_forbidden")  # a misspelt key explains a missing one
        more = f"; that is the first of {len(errors)} mistakes" if len(errors) > 1 else ""
        raise ValueError(f"{source}{_explained(errors[0])}{more}") from None


def _explained(error: Any) -> str:
    """One line from what pydantic found."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, Study.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ";"
        return f"unknown key {key!r}{hint} There are {', '.join(Study.model_fields)}".replace("; There", "; there")
    if error["type"] == "missing":
        return f"{key} is missing; give it, as in the example of docs/studies.md"
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{key} = {short(error['input'])}; give a name, or a table with a name and options"
    message: str = error["msg"].removeprefix("Value error, ")
    if key in ("steps", "epochs", "nodes", "seeds", "record", "lr") and " = " in message.split(";")[0]:
        return message  # which names the value itself
    if isinstance(error["input"], dict | Study | Entry):  # the message names the option and its value itself
        return f"{key}: {message}" if key else message
    return f"{key} = {short(error['input'])}: {message[:1].lower() + message[1:]}"
