"""The command line: thin commands over the library. A user's mistake is one short message and exit code 2.

Options that commands share stand here: `--set NAME=VALUE`, which goes to the rules, graphs and problems that have such
an option and check its value, and those of a clock.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from klatsch import catalogue, own, pictures
from klatsch.cli import terminal
from klatsch.cli.terminal import Plot, option, text, words
from klatsch.extras import VERSION
from klatsch.files import check_output

if TYPE_CHECKING:
    from klatsch.clock import Clock
    from klatsch.report.pages import Outline
    from klatsch.study.choices import Row

Call = TypeVar("Call", bound=Callable[..., None])
Settings = list[str] | None
Owner = tuple[str, str]  # a kind, such as "rule", and a name
Parameters = Mapping[str, inspect.Parameter]


class _Flags:
    """Shows no type beside a flag, which takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return parameters


class Command(_Flags, TyperCommand):
    """A command."""


class Group(_Flags, TyperGroup):
    """A group of commands."""


def examples(*lines: str) -> str:
    """What a help ends with."""
    return "\n\n".join(("Examples:", *(f"klatsch {line}" for line in lines)))


app = typer.Typer(
    name="klatsch",
    cls=Group,
    epilog=examples("demo", "list", "run --rules dat,dsgd --topology ring -n 16 --set heterogeneity=10"),
    add_completion=False,
    pretty_exceptions_enable=False,
)


def command(*lines: str, more: str = "", name: str | None = None, to: typer.Typer = app) -> Callable[[Call], Call]:
    """Register a command, whose help is its docstring, `more` and examples; its dataclasses are groups of options."""

    def register(function: Call) -> Call:
        help_ = "\n\n".join(filter(None, (function.__doc__, more)))
        to.command(name=name or function.__name__, cls=Command, help=help_, epilog=examples(*lines))(_flat(function))
        return function

    return register


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with the fields of its dataclasses as parameters."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    defaults: dict[str, object] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            hints |= get_type_hints(groups[name], include_extras=True)
            defaults |= {field.name: field.default for field in fields(groups[name])}
        else:
            defaults[name] = parameter.default

    def called(**given: object) -> None:
        for group, kind in groups.items():
            given[group] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        with terminal.for_programs() if given.get("as_json") else nullcontext():
            function(**given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    flat = [inspect.Parameter(name, keyword, default=v, annotation=hints[name]) for name, v in defaults.items()]
    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True)
class Timing:
    """How long gradients and messages take, and what figures have across."""

    gradient: Annotated[
        str | None,
        text("Show how long runs would take; seconds per gradient: 0.05, or 'lognormal(0.05, 0.5)'.", metavar="X"),
    ] = None
    network: Annotated[
        str | None, text(f"With --gradient: {', '.join(catalogue.NETWORKS)}, or a CSV file of links (10gbe).")
    ] = None
    gpus: Annotated[int, option("With --gradient: GPUs per node, if nodes are hosts.")] = 1
    against: Annotated[str, text("The x axis of figures: rounds, seconds (with --gradient) or bytes.")] = "rounds"

    def clock(self) -> Clock | None:
        """The clock, if there is one."""
        from klatsch.arguments import named
        from klatsch.clock import Clock

        named("axis", self.against, dict.fromkeys(("rounds", "seconds", "bytes")))
        if self.gradient is not None:
            return Clock(self.gradient, self.network or "10gbe", gpus=self.gpus)
        asked = {"--against seconds": self.against == "seconds", "--network": self.network, "--gpus": self.gpus != 1}
        if what := next((flag for flag, given in asked.items() if given), ""):
            raise ValueError(f"{what} needs to know how long a gradient takes; give --gradient 0.05, in seconds")
        return None


@dataclass(frozen=True)
class Plotting(Timing):
    """The same, with a figure."""

    plot: Plot = None
    style: Annotated[Path | None, text("With --plot: a matplotlib style file.", metavar="FILE")] = None

    def __post_init__(self) -> None:
        if self.plot is not None:
            pictures.check_path(self.plot)
        elif self.style is not None:
            raise ValueError("--style is for a figure; give --plot FILE as well")

    def draw(self, rows: Sequence[Row], title: str, across: str = "", outline: Outline | None = None) -> None:
        """Draw the curves, or the figures of a study that names some, if a file is given; stdout may be a table."""
        from klatsch.report import figures

        if self.plot is None:
            return
        if outline is not None and outline.figures and self.against == "rounds":
            drawn = outline.drawn(rows, self.plot.stem, title, self.style)
        else:
            drawn = [(self.plot.stem, figures.plot(rows, across or self.against, title, style=self.style))]
        for name, figure in drawn:
            path = self.plot.with_name(name + self.plot.suffix)
            pictures.save(figure, path, dpi=160)
            print(f"drawn to {path}", file=sys.stderr)


@dataclass(frozen=True)
class Exports:
    """Files to export a table to."""

    csv: Annotated[Path | None, text("Export to FILE.csv.", metavar="FILE")] = None
    parquet: Annotated[Path | None, text("Export to FILE.parquet.", metavar="FILE")] = None

    @property
    def files(self) -> dict[Path, str]:
        """Those that are asked for, and their kinds."""
        return {path: kind for path, kind in ((self.csv, "CSV"), (self.parquet, "Parquet")) if path is not None}

    def check(self, *inputs: Path) -> None:
        """Refuse files that cannot be written, or that one would not get back."""
        for path, kind in self.files.items():
            check_output(path, kind, *inputs)
        if self.csv is not None and self.parquet is not None:
            check_output(self.parquet, "Parquet", self.csv)

    def write(self, records: Sequence[dict[str, object]]) -> None:
        from klatsch.study import choices

        for path, kind in self.files.items():
            (choices.to_csv if kind == "CSV" else choices.to_parquet)(records, path)


# --- settings ---------------------------------------------------------------------------------------------------------


def setting(help_: str) -> Any:
    """The option --set."""
    return text(f"{help_}; klatsch list shows all.", "--set", metavar="NAME=VALUE")


def split(given: Settings) -> dict[str, str]:
    """The settings by name, each as text."""
    values: dict[str, str] = {}
    for word in given or ():
        name, _, value = (part.strip() for part in word.partition("="))
        if not name or not value:
            raise ValueError(f"--set {word}: give a name and a value, such as momentum=0.9")
        if name in values:
            raise ValueError(f"--set {name} is given twice; separate several values by commas, as {name}=1,2")
        values[name] = value
    return values


def assigned(
    given: Settings, owners: Mapping[Owner, Parameters], reasons: Mapping[str, str] = MappingProxyType({})
) -> dict[Owner, dict[str, object]]:
    """The settings of each owner that has such options; `reasons` explains why nobody has some of the others."""
    from klatsch.arguments import there_are

    texts = split(given)
    options = dict.fromkeys(option for known in owners.values() for option in known)
    names = ", ".join(own.label(name) for _, name in owners)
    who = f"{names} has no" if len(owners) == 1 else f"none of {names} has an"
    for name in texts:
        if name not in options:
            why = f": {reasons[name]}" if name in reasons else f"; {there_are(name, options)}" if options else ""
            raise ValueError(f"--set {name}: {who} option {name!r}{why}")
    return {
        owner: {name: _values(text, known[name].default) for name, text in texts.items() if name in known}
        for owner, known in owners.items()
    }


def chosen(given: Settings, kind: str, name: str) -> dict[str, Any]:
    """The settings of a single owner."""
    return assigned(given, {(kind, name): parameters_of(kind, name)})[kind, name] if given else {}


def parameters_of(kind: str, name: str) -> Parameters:
    """The options of a rule, topology or problem, by its name; topologies also take those of a channel."""
    if kind == "topology":  # which need no torch
        from klatsch.topology.channel import CHANNEL
        from klatsch.topology.families import family
        from klatsch.topology.graph import channel

        travel = {k: v for k, v in inspect.signature(channel).parameters.items() if k in CHANNEL}
        return _after_nodes(family(name).build) | travel
    from klatsch import problems, rules

    if kind == "rule":
        return {k: v for k, v in inspect.signature(rules.kind(name)).parameters.items() if k != "lr"}
    return {k: v for k, v in _after_nodes(problems.kind(name)).items() if k != "seed"}


def _after_nodes(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function but for the first one, the number of nodes."""
    return dict(list(inspect.signature(make).parameters.items())[1:])


def _values(text: str, default: object) -> object:
    """One value, or several: texts where the default is one, else numbers and truths where they look like it."""
    values = [word if isinstance(default, str) else _value(word) for word in words(text)]
    return values[0] if len(values) == 1 else values


def _value(word: str) -> object:
    for read in (int, float):
        with suppress(ValueError):
            return read(word)
    return {"true": True, "false": False}.get(word.lower(), word)


# --- the command itself -----------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Run the command line; every error that a user can cause ends in a message and exit code 2."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (ValueError, OSError) as error:
        terminal.complain(str(error))
    except MemoryError:
        terminal.complain("not enough memory for a graph of that size; choose fewer nodes")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:  # a usage error; typer brings its own copy of click, or click's, so ask what it can do
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        terminal.complain(f"{error.format_message()} (see {context.command_path if context else 'klatsch'} --help)")
    sys.exit(2)


def show_help(context: typer.Context) -> None:
    """The help of a group whose commands are not named."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train models over a network of machines that talk only to their neighbours."""
    if version:
        print(f"klatsch {VERSION}")
        raise typer.Exit
    show_help(context)
