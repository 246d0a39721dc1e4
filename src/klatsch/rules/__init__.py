"""Update rules from three parts, and the table of their names.

A direction is what a node makes of a gradient, a pattern how nodes combine; `Anytime` takes gradients at an average:

    >>> from klatsch import rules
    >>> rules.make("dat-d2", lr=0.01, averaging="linear", momentum=0.9).name
    'dat-d2'
    >>> rules.Anytime(rules.Corrected(0.01, rules.momentum(0.9)), "linear").name
    'dat-d2'
"""

from klatsch.rules import anytime as averaging
from klatsch.rules.anytime import Anytime, Averaged
from klatsch.rules.base import PER_COLUMN, Flow, Rule, State
from klatsch.rules.decay import SCHEDULES, Decay
from klatsch.rules.directions import Direction, Momentum, momentum, sgd
from klatsch.rules.names import (
    RULES,
    d2,
    dat,
    dat_d2,
    dat_gt,
    dat_sgp,
    decentlam,
    diloco,
    dsgd,
    gt,
    make,
    options,
    qg,
    sgp,
)
from klatsch.rules.patterns import Corrected, DecentLaM, DiLoCo, Pattern, Plain, Push, QuasiGlobal, Tracked

__all__ = [
    "PER_COLUMN",
    "RULES",
    "SCHEDULES",
    "Decay",
    "Direction",
    "Flow",
    "Momentum",
    "Rule",
    "State",
    "averaging",
    "make",
    "options",
]
__all__ += ["Anytime", "Averaged", "Corrected", "DecentLaM", "DiLoCo", "Pattern", "Plain", "Push"]
__all__ += ["QuasiGlobal", "Tracked", "momentum", "sgd"]
__all__ += ["d2", "dat", "dat_d2", "dat_gt", "dat_sgp", "decentlam", "diloco", "dsgd", "gt", "qg", "sgp"]
