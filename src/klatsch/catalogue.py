"""Everything that has a name, with a line on each, to print without loading anything.

The lines are the first ones of the docstrings; tests/house/test_startup.py holds them to the real tables.
"""

from __future__ import annotations

RULES = {
    "dsgd": "D-SGD, the baseline of the field: step along your own gradient, then average with your neighbours.",
    "dat": "DAT-SGD, the paper's rule: D-SGD with gradients at, or near, an average x of the iterates.",
    "d2": "D2, which differences between the nodes' data do not harm; on static symmetric graphs.",
    "gt": "Gradient tracking, which differences between the nodes' data do not harm; twice the messages of D-SGD.",
    "sgp": "Stochastic gradient push, for directed graphs.",
    "decentlam": "DecentLaM: momentum that does not amplify the differences between nodes.",
    "dat-gt": "DAT over gradient tracking.",
    "dat-d2": "DAT over D2, without the bias that data which differ between nodes cause.",
    "dat-sgp": "DAT over push-sum, for directed graphs.",
}

OPTIONS = {  # of the rules, besides lr
    "dsgd": ("momentum", "average", "order"),
    "dat": ("averaging", "order", "momentum", "beta"),
    "d2": ("momentum", "average", "lazy"),
    "gt": ("momentum", "average"),
    "sgp": ("momentum", "average"),
    "decentlam": ("momentum", "average"),
    "dat-gt": ("averaging", "momentum", "beta"),
    "dat-d2": ("averaging", "momentum", "beta", "lazy"),
    "dat-sgp": ("averaging", "momentum", "beta"),
}

TOPOLOGIES = {
    "ring": "A circle: every node talks to the next and the previous one.",
    "torus": "A rows x cols lattice that wraps around at all four sides; from n alone, the squarest one.",
    "grid": "A rows x cols lattice with borders; from n alone, the squarest one.",
    "complete": "Everyone talks to everyone: one round gives the exact mean, as a parameter server would.",
    "near_complete": "The complete graph without the links (0, 1), (2, 3), ...: "
    "the near-complete row of the paper's Table 1.",
    "star": "Node 0 talks to everyone, the others only to node 0.",
    "hypercube": "Nodes whose numbers differ in one binary digit talk to each other; n is a power of two.",
    "exponential": "Directed: node i hears the nodes i + 1, i + 2, i + 4, ... (Ying et al. 2021), "
    "all with equal weights.",
    "one_peer_exponential": "Directed: in phase k node i averages itself with node i + 2^k (modulo n), which it hears; "
    "period ceil(log2 n).",
    "base_graph": "The Base-(k+1) Graph: at most k neighbours in every round, "
    "and one period gives the exact mean for every n.",
    "directed_ring": "Node i hears only node i + 1, with weight 1/2: the sparsest graph that push-sum can use.",
    "erdos_renyi": "Every pair of nodes is linked with probability p; drawn again until connected.",
    "random_regular": "A random graph in which every node has the same number of neighbours; "
    "drawn again until connected.",
}

SILENCE = "NAME/8 of any topology, such as ring/8, gossips in every 8th round only: local steps in between."

PROBLEMS = {
    "least-squares": "f_i(x) = ½ ||A_i x - b_i||², with Gaussian noise on every gradient (Section 5.1).",
    "logistic": "f_i(x) = mean over the samples (a, y) of node i of log(1 + exp(-y a'x)) + l2/2 ||x||², "
    "with y = 1 or -1.",
    "fashion-mnist": "A LeNet on Fashion-MNIST, as in the paper's image study (Section 5.2).",
}

# What klatsch plan and klatsch reproduce know.
NETWORKS = ("1gbe", "10gbe", "100gbe", "wan")
TARGETS = ("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "beyond", "images-beyond", "table1", "table2")
