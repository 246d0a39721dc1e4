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
from klatsch.rules.decay import SCHEDULES, Decay, check_schedule
from klatsch.rules.directions import Adam, Direction, Momentum, adam, momentum, sgd
from klatsch.rules.names import (
    RULES,
    d2,
    d2_adam,
    dadam,
    dat,
    dat_adam,
    dat_d2,
    dat_d2_adam,
    dat_gt,
    dat_gt_adam,
    dat_sgp,
    decentlam,
    diloco,
    diloco_adam,
    dsgd,
    gt,
    gt_adam,
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
    "check_schedule",
    "make",
    "options",
]
__all__ += ["Anytime", "Averaged", "Corrected", "DecentLaM", "DiLoCo", "Pattern", "Plain", "Push"]
__all__ += ["QuasiGlobal", "Tracked", "momentum", "sgd"]
__all__ += ["Adam", "adam", "d2_adam", "dadam", "dat_adam", "dat_d2_adam", "dat_gt_adam", "diloco_adam", "gt_adam"]
__all__ += ["d2", "dat", "dat_d2", "dat_gt", "dat_sgp", "decentlam", "diloco", "dsgd", "gt", "qg", "sgp"]
