"""Bad input to rules, problems and runs: one clear error that shows the value and the remedy."""

import re

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.problems import LeastSquares, LogisticRegression, dirichlet
from klatsch.rules import averaging

nan, inf = float("nan"), float("inf")
A, b = np.ones((3, 4, 2)), np.ones((3, 4))
holed = np.where(np.arange(24).reshape(3, 4, 2) == 13, nan, 1.0)
X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2


class WrongShape(LeastSquares):
    def gradient(self, x, drawn):
        return super().gradient(x, drawn)[:, 0]


def run(**changes):
    call = {
        "problem": LeastSquares(4, dim=3),
        "rule": rules.make("dat", 0.01),
        "topology": tp.ring(4),
        "steps": 5,
    }
    return klatsch.simulate(**{**call, **changes})


CASES = [
    # learning rates
    *[
        (lambda rule=rule, lr=lr: rules.make(rule, lr=lr), shown, "above 0")  # of each pattern one
        for rule, lr, shown in (
            *(("dsgd", lr, shown) for lr, shown in ((0, "lr = 0"), (-1e-3, "lr = -0.001"), (nan, "lr = nan"))),
            *((rule, inf, "lr = inf") for rule in ("dat", "d2", "gt", "sgp", "decentlam", "qg", "kgt", "diloco")),
        )
    ],
    (lambda: rules.make("dsgd", [0.1, 0.2, -3.0]), "lr = -3 in column 2", "above 0"),
    (lambda: rules.make("dsgd", [0.1, nan]), "lr = nan in column 1", "above 0"),
    (lambda: rules.make("dsgd", []), "shape (0,)", "one number per column"),
    (lambda: rules.make("dsgd", [[0.1, 0.2], [0.3, 0.4]]), "shape (2, 2)", "one number per column"),
    (lambda: rules.make("dsgd", "0.1"), "lr = '0.1'", "above 0"),
    (lambda: rules.make("dsgd", None), "lr = None", "above 0"),
    (lambda: rules.make("dsgd", True), "lr = True", "above 0"),
    (lambda: rules.make("dsgd", lambda t: -1.0), "lr(1) = -1", "from 0 up"),
    (
        lambda: run(rule=rules.make("dsgd", lambda t: nan if t > 3 else 0.1), engine="torch"),
        "lr(4) = nan",
        "from 0 up",
    ),
    (
        lambda: run(rule=rules.make("dsgd", lambda t: nan if t > 3 else 0.1), engine="auto"),
        "lr(4) = nan",
        "from 0 up",
    ),
    (lambda: rules.make("dat"), "learning rate", "lr=0.01"),
    # other hyper-parameters
    *[
        (lambda rule=rule, m=m: rules.make(rule, lr=0.1, momentum=m), f"momentum = {m}", "not including 1")
        for rule, m in (("dsgd", 1), ("dat", 1.5), ("decentlam", -0.1), ("dsgd", nan))
    ],
    (lambda: rules.make("dat", 0.1, order="act"), "order = 'act'", "atc"),
    (lambda: rules.make("dat", 0.1, averaging="quadratic"), "averaging = 'quadratic'", "polynomial(p)"),
    (lambda: rules.make("dat", 0.1, averaging=3), "averaging = 3", "constant"),
    (lambda: rules.make("dat", 0.1, averaging="fixed"), "averaging = 'fixed'", "fixed(0.9)"),
    (lambda: rules.make("dat", 0.1, averaging="linear(2)"), "averaging = 'linear(2)'", "no number"),
    (lambda: rules.make("dat", 0.1, averaging="polynomial(x)"), "averaging = 'polynomial(x)'", "with a number"),
    (lambda: averaging.fixed(1.0), "gamma = 1.0", "not including 1"),
    (lambda: averaging.fixed(-0.1), "gamma = -0.1", "from 0"),
    (lambda: averaging.polynomial(-1), "p = -1", "from 0 to 50"),
    (lambda: averaging.polynomial(1.5), "p = 1.5", "whole number"),
    (lambda: rules.make("dsgd", lr=0.1, ordr="cta"), "no option 'ordr'", "lr, order, momentum"),
    (lambda: rules.make("gt", lr=0.1, order="cta"), "gt has no order", "use dsgd or dat"),
    (lambda: rules.make("dat", lr=0.1, lazy=True), "dat has no lazy", "topology.lazy"),
    (lambda: rules.make("DAT-SGD", lr=0.1), "unknown rule 'DAT-SGD'", "did you mean"),
    # runs
    *[(lambda steps=steps: run(steps=steps), f"steps = {steps!r}", "from 1 up") for steps in (0, -3, 2.5, True, "9")],
    (lambda: run(topology=tp.ring(5)), "ring has 5 nodes but the problem has 4", "same number"),
    (lambda: run(topology=4), "topology is a int", "topology.make"),
    (lambda: run(topology="rnig"), "unknown topology 'rnig'", "did you mean"),
    (lambda: run(rule="dat"), "the rule is a str", "rules.make"),
    (lambda: run(problem="least-squares"), "problem is a str", "LeastSquares"),
    (lambda: run(dtype=torch.float16), "torch.float16", "torch.float32"),
    (lambda: run(device="abacus"), "device = 'abacus'", "cpu"),
    (lambda: run(device="cuda:99"), "device = 'cuda:99'", "cpu"),
    (lambda: run(engine="warp"), "engine = 'warp'", "fused"),
    (lambda: run(engine="cuda graph"), "cuda graph", "device='cuda'"),
    (lambda: run(record=0), "record = 0", "from 1 up"),
    (lambda: run(record=[0]), "record = [0]", "from 1 to 5"),
    (lambda: run(record=[6]), "record = [6]", "from 1 to 5"),
    (lambda: run(record=[1.5]), "record = [1.5]", "whole steps"),
    (lambda: run(record=[]), "record = []", "from 1 to 5"),
    (lambda: run(record="all"), "record = 'all'", "list of steps"),
    (
        lambda: run(rule=rules.make("dat", [0.1, 0.2, 0.3]), problem=LeastSquares(4, noise=[1, 2])),
        "the rule has 3 columns but the problem has 2",
        "same number",
    ),
    (
        lambda: run(rule=rules.make("dat", [0.1, 0.2, 0.3], momentum=[0.1, 0.2])),
        "lr has 3 columns but momentum has 2",
        "same length",
    ),
    (lambda: run(after=run(rule=rules.make("dsgd", 0.1)), steps=9), "another rule", "same run"),
    (lambda: run(after="foo"), "after is a str", "result"),
    (lambda: run(device="meta"), "device = 'meta'", "cpu"),
    (lambda: run(rule=rules.make("dsgd", lambda t: [0.1] * (2 + t % 2)), steps=9), "lr(2)", "at every round"),
    (lambda: run(problem=WrongShape(4, dim=3)), "gradients of shape (4, 3)", "(nodes, columns, parameters)"),
    (lambda: run(after=run(), steps=5), "5 rounds are done", "give more"),
    (lambda: run().best("speed"), "no metric 'speed'", "distance"),
    # problems
    *[(lambda n=n: LeastSquares(n), f"nodes = {n!r}", "from 1 up") for n in (0, -1, 2.5, "4", None)],
    (lambda: LeastSquares(4, dim=0), "dim = 0", "from 1 up"),
    (lambda: LeastSquares(4, noise=-1), "noise = -1", "0 or a positive"),
    (lambda: LeastSquares(4, noise=[1, nan]), "noise = nan in column 1", "0 or a positive"),
    (lambda: LeastSquares(4, heterogeneity=inf), "heterogeneity = inf", "0 or a positive"),
    (lambda: LeastSquares(4, seed=-1), "seed = -1", "from 0 up"),
    (lambda: LeastSquares(4, seed=2**63), "seed = 9223372036854775808", "from 0 up"),
    (lambda: LeastSquares(4, noise=[1, 2], heterogeneity=[1, 2, 3]), "2 columns and heterogeneity 3", "same number"),
    (lambda: LeastSquares(4).grad(torch.zeros(3, 1, 50), 1), "shape (3, 1, 50)", "(4, columns, 50)"),
    (lambda: LeastSquares.from_arrays(A, b[:2]), "b has (2, 4)", "(3, 4)"),
    (lambda: LeastSquares.from_arrays(A, b[:, :3]), "b has (3, 3)", "(3, 4)"),
    (lambda: LeastSquares.from_arrays(A[0], b), "A has shape (4, 2)", "3 dimensions"),
    (lambda: LeastSquares.from_arrays(A, b[0]), "b has shape (4,)", "2 dimensions"),
    (lambda: LeastSquares.from_arrays(holed, b), "A[1, 2, 1] = nan", "finite"),
    (lambda: LeastSquares.from_arrays(A, np.full((3, 4), inf)), "b[0, 0] = inf", "finite"),
    (lambda: LeastSquares.from_arrays("A", b), "A is not an array", "(nodes, samples, parameters)"),
    (lambda: LeastSquares.from_arrays(A[:, :, :0], b), "(3, 4, 0)", "at least one"),
    (lambda: LogisticRegression(4, l2=0), "l2 = 0", "above 0"),
    (lambda: LogisticRegression(4, batch=0), "batch = 0", "from 1 up"),
    (lambda: LogisticRegression(4, alpha=0), "alpha = 0", "above 0"),
    (lambda: LogisticRegression.from_arrays(X, y[:5], 4), "labels (5,)", "one label for every row"),
    (lambda: LogisticRegression.from_arrays(X, y * 0, 4), "1 different values", "two classes"),
    (lambda: LogisticRegression.from_arrays(X, y), "nodes = None", "number of nodes"),
    (lambda: LogisticRegression.from_arrays(X.reshape(4, 5, 3), y.reshape(4, 5), 5), "nodes = 5", "leave nodes out"),
    (lambda: LogisticRegression.from_arrays(X.reshape(4, 5, 3), y), "labels has shape (20,)", "2 dimensions"),
    (lambda: LogisticRegression.from_arrays(X * nan, y, 4), "features[0, 0] = nan", "finite"),
    (lambda: LogisticRegression.from_arrays(X, y, 21), "21 nodes", "one sample per node"),
    (lambda: dirichlet([0, 1, 0], 4, 1.0), "4 nodes", "one sample per node"),
    (lambda: dirichlet([0, 1, 0], 2, nan), "alpha = nan", "above 0"),
    (lambda: problems.make("least-squares", 4, noisy=1), "no option 'noisy'", "noise"),
    (lambda: problems.make("lest-squares", 4), "unknown problem", "did you mean least-squares"),
]


@pytest.mark.parametrize("k", range(len(CASES)))
def test_refused_with_the_value_and_the_remedy(k):
    call, value, remedy = CASES[k]
    with pytest.raises(ValueError, match=re.escape(value)) as error:
        call()
    assert remedy in str(error.value)
