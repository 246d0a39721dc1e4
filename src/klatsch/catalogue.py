"""Everything that has a name, with a line and the options of each, to print without loading anything.

The lines are the first ones of the docstrings, the options those of the signatures; tests/house/test_startup.py holds
them to the real tables.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A rule, topology or problem."""

    line: str
    options: str = ""  # that --set takes, with their defaults


RULES = {
    "dsgd": Entry(
        "D-SGD, the baseline of the field: step along your own gradient, then average with your neighbours.",
        "momentum=0, average, order=atc",
    ),
    "dat": Entry(
        "DAT-SGD, the paper's rule: D-SGD with gradients at, or near, an average x of the iterates.",
        "averaging=constant, order=atc, momentum=0, beta=1",
    ),
    "d2": Entry(
        "D2, which differences between the nodes' data do not harm; on static symmetric graphs.",
        "momentum=0, average, lazy=true",
    ),
    "gt": Entry(
        "Gradient tracking, which differences between the nodes' data do not harm; twice the messages of D-SGD.",
        "momentum=0, average",
    ),
    "sgp": Entry("Stochastic gradient push, for directed graphs.", "momentum=0, average"),
    "decentlam": Entry(
        "DecentLaM: momentum that does not amplify the differences between nodes.", "momentum=0.9, average"
    ),
    "dat-gt": Entry("DAT over gradient tracking.", "averaging=constant, momentum=0, beta=1"),
    "dat-d2": Entry(
        "DAT over D2, without the bias that data which differ between nodes cause.",
        "averaging=constant, momentum=0, beta=1, lazy=true",
    ),
    "dat-sgp": Entry("DAT over push-sum, for directed graphs.", "averaging=constant, momentum=0, beta=1"),
    "qg": Entry(
        "QG-DSGDm: momentum that follows the models after gossip, for data that differ between nodes.",
        "momentum=0.9, average",
    ),
    "diloco": Entry(
        "DiLoCo: local steps, then outer steps with Nesterov momentum; on a graph such as complete/16.",
        "momentum=0, outer_lr=0.7, outer_momentum=0.9, average",
    ),
    "dadam": Entry(
        "AdamW on every node, then gossip: the rule to begin with for transformers.",
        "beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0, shared=false, average, order=atc, reduced=false",
    ),
    "dat-adam": Entry(
        "Schedule-free AdamW on every node, with gossip of iterate and average.",
        "averaging=lr(2), beta=0.9, beta1=0, beta2=0.999, eps=1e-08, weight_decay=0, shared=false, order=atc, "
        "reduced=false",
    ),
    "d2-adam": Entry(
        "AdamW with the correction of D2, on static symmetric graphs.",
        "beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0, shared=true, average",
    ),
    "gt-adam": Entry(
        "AdamW of the tracked gradient, which differences between the nodes' data do not harm.",
        "beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0, shared=false, average",
    ),
    "dat-d2-adam": Entry(
        "Schedule-free AdamW with the correction of D2, on static symmetric graphs.",
        "averaging=lr(2), beta=0.9, beta1=0, beta2=0.999, eps=1e-08, weight_decay=0, shared=true",
    ),
    "dat-gt-adam": Entry(
        "Schedule-free AdamW of the tracked gradient, which differences between the nodes' data do not harm.",
        "averaging=lr(2), beta=0.9, beta1=0, beta2=0.999, eps=1e-08, weight_decay=0, shared=false",
    ),
    "diloco-adam": Entry(
        "DiLoCo as published: local steps of AdamW, then outer steps with Nesterov momentum; on complete/16, say.",
        "beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0, outer_lr=0.7, outer_momentum=0.9, average",
    ),
}

TOPOLOGIES = {
    "ring": Entry("A circle: every node talks to the next and the previous one."),
    "torus": Entry(
        "A rows x cols lattice that wraps around at all four sides; from n alone, the squarest one.", "rows, cols"
    ),
    "grid": Entry("A rows x cols lattice with borders; from n alone, the squarest one.", "rows, cols"),
    "complete": Entry("Everyone talks to everyone: one round gives the exact mean, as a parameter server would."),
    "near_complete": Entry(
        "The complete graph without the links (0, 1), (2, 3), ...: the near-complete row of the paper's Table 1."
    ),
    "star": Entry("Node 0 talks to everyone, the others only to node 0."),
    "hypercube": Entry("Nodes whose numbers differ in one binary digit talk to each other; n is a power of two."),
    "exponential": Entry(
        "Directed: node i hears the nodes i + 1, i + 2, i + 4, ... (Ying et al. 2021), all with equal weights."
    ),
    "one_peer_exponential": Entry(
        "Directed: in phase k node i averages itself with node i + 2^k (modulo n), which it hears; period ceil(log2 n)."
    ),
    "base_graph": Entry(
        "The Base-(k+1) Graph: at most k neighbours in every round, and one period gives the exact mean for every n.",
        "k=1",
    ),
    "directed_ring": Entry("Node i hears only node i + 1, with weight 1/2: the sparsest graph that push-sum can use."),
    "erdos_renyi": Entry("Every pair of nodes is linked with probability p; drawn again until connected.", "p, seed=0"),
    "random_regular": Entry(
        "A random graph in which every node has the same number of neighbours; drawn again until connected.",
        "degree, seed=0",
    ),
}

CHANNEL = (
    "NAME/8 of any topology, such as ring/8, or --set every=8, gossips in every 8th round only: local steps "
    "in between. --set late=7 gives a message 7 rounds to travel; --set wire=bfloat16 or wire=int8 sends fewer bytes. "
    '--set meets="pairwise exponential(0.05) over wan" makes gossip asynchronous. '
    "--set loss=0.1 loses a tenth of the messages, --set one_way=true each by itself; on complete, loss=0.9 is a new "
    "random graph in every round."
)

PROBLEMS = {
    "least-squares": Entry(
        "f_i(x) = ½ ||A_i x - b_i||², with Gaussian noise on every gradient (Section 5.1).",
        "dim=50, noise=1, heterogeneity=1, pool",
    ),
    "logistic": Entry(
        "f_i(x) = mean over the samples (a, y) of node i of log(1 + exp(-y a'x)) + l2/2 ||x||², with y = 1 or -1.",
        "dim=20, samples=200, batch=1, l2=0.01, alpha=0.1, pool",
    ),
    "fashion-mnist": Entry(
        "A LeNet on Fashion-MNIST, as in the paper's image study (Section 5.2).", "alpha=0.1, batch=32, test=10000"
    ),
    "language": Entry(
        "A small GPT that predicts the bytes of a text: Python's standard library, or the files of a folder.",
        "alpha=0.1, batch=16, context=256, width=96, depth=3, heads=3, folder, pattern=*.py, test=500, autocast=false",
    ),
}

# What klatsch plan and klatsch reproduce know.
NETWORKS = ("1gbe", "10gbe", "100gbe", "wan")
TARGETS = (
    *("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "beyond", "averages", "schedules", "orders"),
    *("local-steps", "channels", "images-channels", "stragglers", "language-rules", "language-links", "language-sizes"),
    *("schedule-free", "slow-networks", "language", "table1", "table2"),
)
