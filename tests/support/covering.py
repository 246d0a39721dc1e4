"""Grids of parameters, covered: every two values of different parameters meet, not every value with all the others."""

import itertools

import pytest


def pairs(*values, where=lambda *_: True):
    """A selection of the product of `values`, in which all pairs meet that meet in the product.

    Args:
        values: for each parameter, what it may be.
        where: whether a choice makes sense.
    """
    product = [choice for choice in itertools.product(*map(list, values)) if where(*choice)]
    met = {choice: {*itertools.combinations(enumerate(choice), 2)} for choice in product}
    missing, chosen = set().union(*met.values()), []
    while missing:
        chosen.append(max(product, key=lambda choice: len(met[choice] & missing)))
        missing -= met[chosen[-1]]
    return chosen


def covering(names, *values, **options):
    """Parametrize a test by such a selection; `names` are those of the parameters."""
    return pytest.mark.parametrize(names, pairs(*values, **options))
