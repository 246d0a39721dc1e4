"""The command line: thin commands over the library. A user's mistake is one short message and exit code 2.

Options that commands share stand here: `--set NAME=VALUE`, typed by the signatures of rules, graphs and problems, and
those of a clock.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup, TyperOption

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.cli.terminal import option, text, words
from klatsch.version import VERSION

if TYPE_CHECKING:
    from klatsch.clock import Clock

Call = TypeVar("Call", bound=Callable[..., None])
Settings = list[str] | None
Parameters = Mapping[str, inspect.Parameter]
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


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


def _after_help(examples: tuple[str, ...]) -> str:
    return "\n\n".join(("Examples:", *(f"klatsch {example}" for example in examples)))


app = typer.Typer(
    name="klatsch",
    cls=Group,
    help="Train models over a network of machines that talk only to their neighbours.",
    epilog=_after_help(("demo", "list", "run --rules dat,dsgd --topology ring -n 16 --set heterogeneity=10")),
    add_completion=False,
    pretty_exceptions_enable=False,
)


def command(*examples: str, more: str = "", name: str | None = None, to: typer.Typer = app) -> Callable[[Call], Call]:
    """Register a command, whose help is its docstring, `more` and examples; its dataclasses are groups of options."""

    def register(function: Call) -> Call:
        help_ = "\n\n".join(filter(None, (function.__doc__, more)))
        title, after = name or function.__name__, _after_help(examples)
        to.command(name=title, cls=Command, help=help_, epilog=after)(_flat(function))
        return function

    return register


def _flat(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with the fields of its dataclasses as parameters."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    flat = []
    for name, parameter in inspect.signature(function).parameters.items():
        options = {name: parameter.default}
        if name in groups:
            options = {field.name: field.default for field in fields(groups[name])}
            hints |= get_type_hints(groups[name], include_extras=True)
        flat += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[option])
            for option, default in options.items()
        ]

    def called(**given: object) -> None:
        for group, kind in groups.items():
            given[group] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True)
class Timing:
    """How long gradients and messages take, and what figures have across."""

    gradient: Annotated[
        str | None,
        text("Shows how long runs would take: seconds of a gradient, 0.05 or 'lognormal(0.05, 0.5)'.", metavar="X"),
    ] = None
    network: Annotated[
        str | None, text(f"With --gradient: {', '.join(catalogue.NETWORKS)}, or a CSV file of links (10gbe).")
    ] = None
    gpus: Annotated[int, option("With --gradient: GPUs of a node, if nodes are hosts.")] = 1
    against: Annotated[str, text("Across in figures: rounds, seconds (with --gradient) or bytes.")] = "rounds"

    def clock(self) -> Clock | None:
        """The clock, if there is one."""
        from klatsch.arguments import named
        from klatsch.clock import Clock

        named("axis", self.against, dict.fromkeys(("rounds", "seconds", "bytes")))
        if self.gradient is not None:
            return Clock(self.gradient, self.network or "10gbe", gpus=self.gpus)
        if self.network is not None or self.gpus != 1 or self.against == "seconds":
            what = "--against seconds" if self.against == "seconds" else "--network" if self.network else "--gpus"
            raise ValueError(f"{what} needs to know how long a gradient takes; give --gradient 0.05, in seconds")
        return None


def setting(help_: str) -> Any:
    """The option --set."""
    return text(f"{help_}; klatsch list names all.", "--set", metavar="NAME=VALUE")


def split(given: Sequence[str] | None) -> dict[str, str]:
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


def typed(given: Mapping[str, str], parameters: Parameters) -> dict[str, object]:
    """The settings that are among the parameters, as values of their types."""
    return {name: _values(name, text, parameters[name]) for name, text in given.items() if name in parameters}


def chosen(given: Sequence[str] | None, owner: str, parameters: Parameters) -> dict[str, object]:
    """The settings of a single owner, as values of their types."""
    check_known(split(given), {owner: parameters})
    return typed(split(given), parameters)


def check_known(
    given: Collection[str], owners: Mapping[str, Parameters], reasons: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a setting that no owner has; `reasons` explains some of the refusals."""
    from klatsch.arguments import there_are

    known = dict.fromkeys(option for parameters in owners.values() for option in parameters)
    who = f"{', '.join(owners)} has no" if len(owners) == 1 else f"none of {', '.join(owners)} has an"
    for name in given:
        if name not in known:
            why = f": {reasons[name]}" if name in reasons else f"; {there_are(name, known)}" if known else ""
            raise ValueError(f"--set {name}: {who} option {name!r}{why}")


def parameters_of(kind: str, name: str) -> Parameters:
    """The options of a rule, topology or problem, by its name; topologies also take those of a channel."""
    from klatsch import problems, rules
    from klatsch.topology.channel import CHANNEL
    from klatsch.topology.families import family
    from klatsch.topology.graph import channel

    makers: dict[str, Callable[[str], Callable[..., object]]]
    makers = {"rule": rules.kind, "problem": problems.kind, "topology": lambda name: family(name).build}
    options = list(inspect.signature(makers[kind](name)).parameters.values())
    if kind == "topology":
        options += [option for option in inspect.signature(channel).parameters.values() if option.name in CHANNEL]
    elsewhere = {"rule": "lr", "problem": "seed", "topology": ""}[kind]  # which another flag gives
    # The first one of a graph and of a problem is the number of nodes.
    return {option.name: option for option in options[kind != "rule" :] if option.name != elsewhere}


def _values(name: str, text: str, parameter: inspect.Parameter) -> object:
    hint, kind = parameter.annotation, type(parameter.default)
    first = hint.__name__ if isinstance(hint, type) else str(hint).split(" | ")[0]
    kind = TYPES.get(first) or (kind if kind in (bool, float, str) else object)  # object: nothing says what it takes
    values = [_value(name, word, kind) for word in words(text)]
    return values[0] if len(values) == 1 else values


def _value(name: str, word: str, kind: type) -> object:
    truth = {"true": True, "false": False}.get(word.lower())
    if kind is bool and truth is None:
        raise ValueError(f"--set {name}={word}: give true or false")
    if kind is bool or (kind is object and truth is not None):
        return truth
    for read in {int: (int,), float: (float,), str: (str,)}.get(kind, (int, float, str)):
        with suppress(ValueError):
            return read(word)
    raise ValueError(f"--set {name}: {word!r} is not a {'whole ' * (kind is int)}number")


def main() -> NoReturn:
    """Run the command line; every error that a user can cause ends in a message and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (ValueError, OSError) as error:
        code = _complain(str(error))
    except MemoryError:
        code = _complain("not enough memory for a graph of that size; choose fewer nodes")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:  # a usage error; typer brings its own copy of click, or click's, so ask what it can do
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        code = _complain(f"{error.format_message()} (see {context.command_path if context else 'klatsch'} --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # names of files may hold anything
    print(terminal.wrapped(f"klatsch: error: {line}", sys.stderr), file=sys.stderr)
    return 2


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train models over a network of machines that talk only to their neighbours."""
    if version:
        print(f"klatsch {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@command("list", "run --rules gt,dat-gt --set momentum=0.9", name="list")
def list_names() -> None:
    """List the rules, topologies and problems, each with the options that --set takes and their defaults."""
    console = terminal.console()
    tables = {
        "rules, each a product of parts": catalogue.rules(),
        "parts of rules, and their options": catalogue.parts(),
        "topologies": catalogue.topologies(),
        "problems": catalogue.problems(),
    }
    for title, entries in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        table.add_column(style="dim")
        for name, entry in entries.items():
            table.add_row(name, *entry)
        console.print(table, "")
    terminal.note(catalogue.CHANNEL)
