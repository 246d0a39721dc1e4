"""The command line: thin commands over the library. A user's mistake is one short message and exit code 2."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup, TyperOption

from klatsch import catalogue
from klatsch.cli import terminal
from klatsch.version import VERSION

Call = TypeVar("Call", bound=Callable[..., None])


class _Flags:
    """Shows no type beside a flag, which takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return found


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
