"""`--set NAME=VALUE`: options of rules, graphs and problems, typed by the signatures of their owners."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from klatsch.cli.terminal import text, words

Settings = list[str] | None
Parameters = Mapping[str, inspect.Parameter]
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def setting(help_: str) -> Any:
    """The option --set."""
    return text(f"{help_}; klatsch list names all.", "--set", metavar="NAME=VALUE")


def split(given: Sequence[str] | None) -> dict[str, str]:
    """The settings by name, each as text."""
    found: dict[str, str] = {}
    for word in given or ():
        name, _, value = (part.strip() for part in word.partition("="))
        if not name or not value:
            raise ValueError(f"--set {word}: give a name and a value, such as momentum=0.9")
        if name in found:
            raise ValueError(f"--set {name} is given twice; separate several values by commas, as {name}=1,2")
        found[name] = value
    return found


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
    """The options of a rule, topology or problem, by its name."""
    from klatsch import problems, rules
    from klatsch.topology.families import family

    makers: dict[str, Callable[[str], Callable[..., object]]]
    makers = {"rule": rules.kind, "problem": problems.kind, "topology": lambda name: family(name).build}
    found = dict(inspect.signature(makers[kind](name)).parameters)
    if kind == "topology":
        found |= channel_parameters()
    if kind != "rule":
        found = dict(list(found.items())[1:])  # without the number of nodes, if it takes one
    otherwise = {"rule": "lr", "problem": "seed", "topology": ""}[kind]  # which another flag gives
    return {option: parameter for option, parameter in found.items() if option != otherwise}


def channel_parameters() -> Parameters:
    """The options that all topologies take: how messages travel."""
    from klatsch.topology.channel import CHANNEL, channel

    return {name: v for name, v in inspect.signature(channel).parameters.items() if name in CHANNEL}


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
