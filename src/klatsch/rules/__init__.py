"""Update rules from four parts, and rules by name.

A direction is what a node makes of a gradient, a pattern how nodes combine, an outer step what happens beside mixing;
`Anytime` takes gradients at an average:

    >>> from klatsch import rules
    >>> rules.make("dat-d2", lr=0.01, averaging="linear", momentum=0.9).name
    'dat-d2'
    >>> rules.Anytime(rules.Corrected(0.01, rules.momentum(0.9)), "linear").name
    'dat-d2'
    >>> rules.make("push+adam+anytime", lr=0.01, beta=0.9).name
    'push+adam+anytime'
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from klatsch.arguments import check_options, named
from klatsch.columns import Given
from klatsch.own import explained, is_own
from klatsch.rules import anytime as averaging
from klatsch.rules.anytime import Anytime, Averaged
from klatsch.rules.base import PER_COLUMN, SCHEDULES, Decay, Flow, Rule, State, check_schedule, checked
from klatsch.rules.directions import Adam, Direction, Hooked, Momentum, Muon, Outer
from klatsch.rules.names import ALIASES
from klatsch.rules.patterns import KGT, Corrected, DecentLaM, Pattern, Plain, Push, QuasiGlobal, Tracked

__all__ = ["KGT", "PER_COLUMN", "RULES", "SCHEDULES", "WHY_NOT", "Adam", "Anytime", "Averaged", "Corrected", "Decay"]
__all__ += ["DecentLaM", "Direction", "Flow", "Hooked", "Momentum", "Muon", "Outer", "Pattern", "Plain", "Push"]
__all__ += ["QuasiGlobal", "Rule", "State", "Tracked", "adam", "averaging", "check_schedule", "hooked", "kind"]
__all__ += ["make", "momentum", "muon", "options", "outer", "sgd"]

# As in rules.Plain(0.1, rules.momentum(0.9), outer=rules.outer(0.7, 0.9)), or rules.sgd().
sgd, momentum, hooked, adam, muon, outer = Momentum, Momentum, Hooked, Adam, Muon, Outer

PATTERNS: dict[str, type[Rule]] = {
    part.short: part for part in (Plain, Corrected, Tracked, Push, DecentLaM, QuasiGlobal, KGT)
}
DIRECTIONS: dict[str, type[Direction]] = {part.short: part for part in (Momentum, Adam, Muon, Hooked)}
SET_BY_OTHERS = ("direction", "outer", "base", "every", "together")  # fields that parts and graphs set
WHY_NOT = {  # an option that only other rules have: the reason
    "average": "it returns x, which is an average already; choose its weights with averaging",
    "averaging": "it takes gradients at its iterate; use dat, dat-gt, dat-d2, dat-sgp or dat-adam, or average",
    "beta": "it keeps no average x, so there is no point between x and w; use dat, dat-gt, dat-d2, dat-sgp or dat-adam",
    "beta1": "it is not an Adam, and beta1 is that of its first moment; use momentum, or a rule such as dadam",
    "beta2": "it is not an Adam; use a rule such as dadam or dat-adam",
    "momentum": "it is an Adam, whose first moment has beta1",
    "weight_decay": "only dadam and its like decay weights themselves; optimizers on ranks add it to gradients",
    "order": "it has the order atc only, in which its correction, its tracked gradient or its weight is defined; use "
    "dsgd or dat",
    "lazy": "it is stable on every graph without it; d2 and dat-d2 have it, and any rule can mix with a lazy graph: "
    "topology.lazy(graph), or lazy = true of the topology in a study",
}


class Product:
    """A pattern, a direction, an outer step and an average as one function of lr and of the options of all four."""

    def __init__(self, parts: str, defaults: Mapping[str, object] = MappingProxyType({}), line: str = "") -> None:
        pattern, *others = parts.split("+")
        ending = others.pop() if others[-1:] in ([Anytime.short], [Averaged.short]) else ""
        self.__doc__, self.pattern, self.anytime = line, PATTERNS.get(pattern, Rule), ending == Anytime.short
        # Without an average, the option `average` puts one around the rest.
        defaults = {"average": "constant" if ending == Averaged.short else None} | dict(defaults)
        self.direction: type[Direction] | None = Momentum if issubclass(self.pattern, Pattern) else None
        if self.direction and others and others[0] in DIRECTIONS:
            self.direction = DIRECTIONS[others.pop(0)]
        self.outer = Outer if self.direction and others[:1] == [Outer.short] else None
        others = others[1:] if self.outer else others
        if others or pattern not in PATTERNS:
            raise ValueError(
                f"unknown part {(others if pattern in PATTERNS else [pattern])[0]!r} of the rule {parts!r}; write a "
                f"pattern ({', '.join(PATTERNS)}), after it {' or '.join(DIRECTIONS)} and outer if the pattern has no "
                "momentum of its own, and anytime or averaged if it shall average"
            )
        options: dict[str, inspect.Parameter] = {}
        for part in filter(None, (self.pattern, self.direction, self.outer, Anytime if self.anytime else Averaged)):
            options |= {k: v for k, v in inspect.signature(part).parameters.items() if k not in SET_BY_OTHERS}
        self.__signature__ = inspect.Signature(
            [option.replace(default=defaults.get(name, option.default)) for name, option in options.items()]
        )

    def __call__(self, *lr: Given, **options: Given) -> Rule:
        given = self.__signature__.bind(*lr, **options)
        given.apply_defaults()
        values = given.arguments
        if self.direction:
            values["direction"] = self.direction(**_those_of(self.direction, values))
        if self.outer:
            values["outer"] = self.outer(**_those_of(self.outer, values))
        rule = values["base"] = self.pattern(**_those_of(self.pattern, values))
        if self.anytime:
            return Anytime(**_those_of(Anytime, values))
        return rule if values["average"] is None else Averaged(rule, values["average"])


def _those_of(part: Callable[..., object], values: Mapping[str, Given]) -> dict[str, Given]:
    """The values that a part takes."""
    return {name: values[name] for name in inspect.signature(part).parameters if name in values}


RULES: dict[str, Callable[..., Rule]] = {name: Product(*alias) for name, alias in ALIASES.items()}


def kind(name: str) -> Callable[..., Rule]:
    """What makes a rule of lr and its options: by a name, by its parts, or "file.py:Name", which is executed."""
    by_parts = isinstance(name, str) and name not in RULES and not is_own(name) and ("+" in name or name in PATTERNS)
    return Product(name) if by_parts else named("rule", name, RULES)


def make(name: str, lr: Given = None, **choices: Given) -> Rule:
    """A rule by name or by its parts: `make("dat", lr=1e-3, beta=0.9)`, `make("push+adam+anytime", lr=1e-3)`.

    Your own rule is "file.py:Name"; the file is executed.
    """
    known = options(name)
    for choice in choices:
        if not is_own(name) and choice not in known and choice in WHY_NOT:
            raise ValueError(f"{name} has no {choice}: {WHY_NOT[choice]}")
    check_options(name, ["lr", *choices], known)
    if lr is None:
        raise ValueError(f"lr = None; {name} needs a learning rate, a number above 0: make({name!r}, lr=0.01)")
    with explained(name):
        return checked(kind(name)(lr=lr, **choices))


def options(name: str) -> tuple[str, ...]:
    """The options that `make(name, ...)` takes.

    >>> from klatsch import rules
    >>> rules.options("dsgd")
    ('lr', 'order', 'momentum', 'shared', 'average')
    """
    return tuple(inspect.signature(kind(name)).parameters)
