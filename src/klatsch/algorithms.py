"""The former name of `klatsch.rules`, with the classes of 0.1.0 as functions; to be removed in the next version."""

from __future__ import annotations

import warnings

from klatsch import rules

_NOW = {name: name for name in ("PER_COLUMN", "make", "options")}
_NOW |= {"ALGORITHMS": "RULES", "Algorithm": "Rule", "D2": "d2", "DAT": "dat", "DATD2": "dat_d2", "DSGD": "dsgd"}
_NOW |= {"DATPush": "dat_sgp", "DATTracking": "dat_gt", "DecentLaM": "decentlam", "GradientTracking": "gt"}
_NOW["PushSum"] = "sgp"

__all__ = list(_NOW)


def __getattr__(name: str) -> object:
    if name not in _NOW:
        raise AttributeError(f"module 'klatsch.algorithms' has no attribute {name!r}")
    now = _NOW[name]
    warnings.warn(
        f"klatsch.algorithms.{name} is klatsch.rules.{now} since 0.2; klatsch.algorithms goes in the next version",
        DeprecationWarning,
        stacklevel=2,
    )
    return vars(rules)[now]
