"""The paper's bounds as functions: what to expect of a rule, and up to how many machines it pays."""

from klatsch.theory.parallelism import (
    largest_machines,
    parallelism_bound,
    parallelism_exponent,
    rounds_to_error,
    transient_iterations,
)
from klatsch.theory.rates import (
    RATES,
    Constants,
    Rate,
    consensus_bound,
    dat_bound,
    dat_learning_rate,
    dat_local_bound,
    dat_rate,
    dsgd_rate,
    gt_rate,
    minibatch_rate,
)

__all__ = [
    "RATES",
    "Constants",
    "Rate",
    "consensus_bound",
    "dat_bound",
    "dat_learning_rate",
    "dat_local_bound",
    "dat_rate",
    "dsgd_rate",
    "gt_rate",
    "largest_machines",
    "minibatch_rate",
    "parallelism_bound",
    "parallelism_exponent",
    "rounds_to_error",
    "transient_iterations",
]
