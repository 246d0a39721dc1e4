"""Grids of parameters, covered: every two values of different parameters meet, not every value with all the others."""

import itertools

import pytest


def covering(names, *values, marks=lambda *_: (), where=lambda *_: True):
    """Parametrize a test by a selection of the product of `values`, in which all pairs that the product has occur.

    Args:
        names: those of the parameters, as `pytest.mark.parametrize` takes them.
        values: for each of them, what it may be.
        marks: of a choice.
        where: whether a choice makes sense.
    """
    product = [choice for choice in itertools.product(*map(list, values)) if where(*choice)]
    pairs = {choice: {*itertools.combinations(enumerate(choice), 2)} for choice in product}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(product, key=lambda choice: len(pairs[choice] & missing)))
        missing -= pairs[chosen[-1]]
    return pytest.mark.parametrize(names, [pytest.param(*choice, marks=marks(*choice)) for choice in chosen])
