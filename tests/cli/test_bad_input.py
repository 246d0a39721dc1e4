"""Every refusal names the value and the remedy; on the command line it is one line and exit code 2."""

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array

from klatsch import topology as tp

HALF = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    "name, n", [*((name, 0) for name in tp.TOPOLOGIES), *(("torus", n) for n in (-3, 2.5, "four", True, None))]
)
def test_a_number_of_nodes_that_is_none(name, n):
    with pytest.raises(ValueError, match=rf"{name}: .*(whole number from 1|give n)"):
        tp.make(name, n)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tp.torus(13), r"n = 13 is prime .* nearest torus is 12 = 3 x 4"),
        (lambda: tp.torus(2), r"nearest torus is 4 = 2 x 2"),
        (lambda: tp.grid(7), r"n = 7 is prime .* path; the nearest grid is 8"),
        (lambda: tp.torus(12, rows=5), r"5 x 2 = 10 nodes, not n = 12"),
        (lambda: tp.torus(rows=5), r"rows = 5 and cols = None; give both"),
        (lambda: tp.torus(), r"give n, or rows and cols"),
        (lambda: tp.torus(rows=0, cols=3), r"0 nodes"),
        (lambda: tp.torus(rows=10_000, cols=10_000), r"100,000,000 nodes are too many"),
        (lambda: tp.hypercube(12), r"n = 12 is not a power of two; the nearest that works is 8"),
        (lambda: tp.hypercube(13), r"nearest that works is 16"),
        (lambda: tp.near_complete(2), r"take 1 or 3"),
        (lambda: tp.base_graph(4, 0), r"base_graph: k = 0; give a whole number from 1 up"),
        (lambda: tp.erdos_renyi(4, p=1.5), r"p = 1.5; give a probability"),
        (lambda: tp.erdos_renyi(50, p=0.01), r"none of 100 draws .* node \d+ cannot reach node \d+.* raise p above"),
        (lambda: tp.random_regular(5, degree=3), r"n = 5 and degree = 3 are both odd.* n = 6 or degree = 2"),
        (lambda: tp.random_regular(5, degree=5), r"degree = 5 with n = 5"),
        (lambda: tp.random_regular(6, degree=1), r"degree = 1 cannot connect 6 nodes"),
        (lambda: tp.random_regular(6, degree=2.5), r"degree = 2.5; give a whole number"),
        (lambda: tp.random_regular(6, seed="x"), r"seed = 'x'; give a whole number"),
        (lambda: tp.erdos_renyi(6, p="x"), r"p = 'x'; give a probability"),
        (lambda: tp.ring(10**12), r"1,000,000,000,000 nodes are too many to build; the most is 1,000,000"),
        (lambda: tp.complete(200_000), r"200,000 nodes are too many"),
        (lambda: tp.make(None, 4), r"unknown topology None"),
        (lambda: tp.make("rign", 4), r"unknown topology 'rign'; did you mean ring\?"),
        (lambda: tp.make("exponental", 4), r"did you mean exponential\?"),
        (lambda: tp.make("ring", 4, k=2), r"ring has no option 'k'; it takes every"),
        (
            lambda: tp.make("ring", 4, meets="pairwise 0.05 over wan"),
            r"ring has no option 'meets', which is an argument of simulate: .*meets='pairwise 0.05 over wan'",
        ),
        (lambda: tp.make("base_graph", 4, seed=2), r"base_graph has no option 'seed'; it takes k"),
        (lambda: tp.ring(4).matrix(0), r"round t = 0; give a whole number from 1 up"),
        (lambda: tp.ring(4).neighbors(4), r"ring: node = 4; give a whole number from 0 to 3"),
        (lambda: tp.ring(4).neighbors(-1), r"node = -1"),
        (lambda: tp.ring(4).neighbors("a"), r"node = 'a'"),
        (lambda: tp.ring(4).matrix(1.5), r"t = 1.5"),
        (lambda: tp.ring(4).effective_neighbors("a"), r"gamma = 'a'"),
        (lambda: tp.lazy(np.eye(2)), r"lazy takes a Topology, not a ndarray"),
        (lambda: tp.draw("ring", "ring.svg"), r"draw takes a Topology, not a str"),
        (lambda: tp.from_networkx(np.eye(2)), r"takes a networkx graph, not a ndarray"),
        (lambda: tp.summarize(tp.ring(4), params=0), r"params = 0"),
        (lambda: tp.spectral_gap("torus", 13), r"n = 13 is prime"),
        (lambda: tp.spectral_gap("ring", 0), r"ring: 0 nodes"),
    ],
)
def test_refusals_of_constructors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "matrices, message",
    [
        ([[0.5, 0.4], [0.5, 0.5]], r"row 0 sums to 0.9 instead of 1; divide the row by its sum"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"entry \(0, 1\) is -0.5, which is negative"),
        ([[np.nan, 1], [1, 0]], r"entry \(0, 0\) is nan, which is not finite"),
        ([[np.inf, 1], [1, 0]], r"entry \(0, 0\) is inf, which is not finite"),
        ([[0.5, 0.5, 0], [0.5, 0.5, 0]], r"is 2 x 3; a gossip matrix is square"),
        ([[0.5, 0.5], [1.0]], r"same number of weights"),
        ([["a", "b"], ["c", "d"]], r"entries of type <U1"),
        ([0.5, 0.5], r"is 2; a gossip matrix is square"),
        (3.0, r"a single number"),
        (np.zeros((0, 0)), r"0 x 0"),
        ([], r"no matrix given"),
        ([np.full((2, 2), 0.5), np.full((3, 3), 1 / 3)], r"matrices of 2 and 3 nodes"),
        ([np.full((2, 2), 0.5), np.array([[0.5, 0.4], [0.5, 0.5]])], r"matrix 2: row 0 sums to 0.9"),
        ([[0.6, 0.4], [0.5, 0.5]], r"column 0 sums to 1.1 .* would not keep the mean.*stochastic=\"rows\""),
        ([[0.6, 0.5], [0.4, 0.5]], r"row 0 sums to 1.1 .* push-sum"),
        (np.eye(3), r"disconnected: node 0 cannot reach node 1; add links"),
        (csr_array(np.eye(2)), r"disconnected"),
        (np.array([[0.5, 0.5j], [0.5j, 0.5]]), r"entries of type complex128"),
        (tp.ring(7).matrix(1).astype(np.float32), r"row 0 sums to 1.0000000\d+ .* float64"),
        ([[[0, 1, 0], [1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 1], [0, 1, 0]]], r"never averages them"),
        (np.roll(np.eye(6), 1, axis=0) / 2 + np.roll(np.eye(6), 3, axis=0) / 2, r"never averages them"),
        ([[0, 1], [1, 0]], r"never averages them.*\(I \+ P\) / 2"),
        (np.roll(np.eye(4), 1, axis=0), r"never averages them"),
    ],
)
def test_refusals_of_matrices(matrices, message):
    with pytest.raises(ValueError, match=message):
        tp.from_matrices(matrices)


def test_a_directed_graph_that_only_goes_one_way_names_the_nodes():
    one_way = [[1.0, 0.0], [0.5, 0.5]]  # node 1 hears node 0, never the other way
    with pytest.raises(ValueError, match="node 1 cannot reach node 0"):
        tp.from_matrices(one_way, stochastic="rows")
    with pytest.raises(ValueError, match="node 0 cannot reach node 1"):
        tp.from_matrices(np.array(one_way)[::-1, ::-1], stochastic="rows")


def test_an_unknown_kind_of_sums():
    with pytest.raises(ValueError, match="stochastic = 'both'; choose from doubly, rows, columns"):
        tp.from_matrices(HALF, stochastic="both")


def _attributed(u_to_v, directed=False):
    graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_weighted_edges_from(u_to_v)
    return graph


def _bipartite_without_self_weights():
    """Ten weights of 0.1 leave nothing, but 1 - 10 * 0.1 is 1e-16 in floating point."""
    graph = nx.complete_bipartite_graph(10, 10)
    nx.set_edge_attributes(graph, 0.1, "weight")
    return graph


@pytest.mark.parametrize(
    "graph, options, message",
    [
        (nx.Graph([(0, 1), (1, 1)]), {}, r"node 1 has a self-loop; remove it"),
        (nx.Graph([("a", "b"), ("c", "d")]), {}, r"disconnected: node 'a' cannot reach node 'c'"),
        (nx.DiGraph([(0, 1), (1, 0)]), {}, r"directed, and Metropolis–Hastings weights need an undirected"),
        (nx.MultiGraph([(0, 1), (0, 1)]), {}, r"multigraph; merge"),
        (nx.Graph(), {}, r"no nodes"),
        (nx.path_graph(2), {"weight": "w"}, r"edge \(0, 1\) has w = None; give every edge a number"),
        (_attributed([(0, 1, 0.7), (1, 2, 0.7)]), {"weight": "weight"}, r"node 1 \(row 1\) sum to 1.4"),
        (_attributed([(0, 1, -0.2)]), {"weight": "weight"}, r"entry \(0, 1\) is -0.2, which is negative"),
        (_attributed([(0, 1, 0.5), (1, 0, 0.2)], True), {"weight": "weight"}, r"column 0 sums to 1.3"),
        (nx.DiGraph([(0, 1), (1, 2), (2, 1)]), {"stochastic": "columns"}, r"node 1 cannot reach node 0"),
        (
            _attributed([(0, 1, 0.7), (0, 2, 0.7), (1, 0, 0.5), (2, 0, 0.5)], True),
            {"weight": "weight", "stochastic": "columns"},
            r"node 0 \(column 0\) sum to 1.4",
        ),
        (_attributed([(0, 1, np.nan)]), {"weight": "weight"}, r"edge \(0, 1\) has weight = nan"),
        (_bipartite_without_self_weights(), {"weight": "weight"}, r"never averages them"),
    ],
)
def test_refusals_of_networkx_graphs(graph, options, message):
    with pytest.raises(ValueError, match=message):
        tp.from_networkx(graph, **options)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["topology", "ring", "-n", "0"], "0 nodes"),
        (["topology", "torus", "-n", "13"], "nearest torus is 12"),
        (["topology", "rign", "-n", "4"], "did you mean ring?"),
        (["topology", "ring"], "needs the number of nodes"),
        (["topology"], "name a topology"),
        (["topology", "ring", "-n", "four"], "four"),
        (["topology", "ring", "-n", "4", "--set", "k=2"], "ring has no option 'k'"),
        (["topology", "torus", "-n", "4", "--set", "row=2"], "did you mean rows? There are rows, cols, every"),
        (["topology", "ring", "-n", "4", "--params", "0"], "params = 0"),
        (["topology", "ring", "-n", "4", "--draw", "ring.jpg"], "must end in .svg, .png, .pdf"),
        (["topology", "ring", "-n", "4", "--draw", "/nowhere/ring.svg"], "there is no folder /nowhere"),
        (["topology", "ring", "-n", "3000", "--draw", "ring.svg"], "2000 or fewer"),
        (["topology", "--compare"], "needs the number of nodes"),
        (["topology", "--compare", "-n", "0"], "0 nodes"),
        (["topology", "ring", "--compare", "-n", "4"], "does not go with the topology 'ring'"),
        (["topology", "--compare", "-n", "4", "--draw", "a.svg"], "does not go with --draw"),
        (["topology", "--compare", "-n", "16", "--set", "k=0"], "k = 0"),
        (["topology", "--compare", "-n", "16", "--set", "p=7"], "p = 7; give a probability"),
        (["topology", "erdos_renyi", "-n", "16", "--set", "p=x"], "p = 'x'; give a probability"),
        (["topology", "complete", "-n", "1000", "--draw", "a.svg"], "499,500 links"),
        (["topology", "ring", "-n", "10000000000000"], "too many"),
        (["run", "--rules", "dsgd", "-n", "4", "--set", "meets=pairwise nan over wan"], "gradient = nan"),
        (
            ["run", "--rules", "dsgd", "-n", "4", "--set", "meets=pairwise 0.1 over /dev/zero"],
            "unknown network '/dev/zero'",
        ),
        (
            ["run", "--rules", "dsgd", "-n", "4", "--set", "meets=pairwise 0.1 over nowhere.csv"],
            "cannot read nowhere.csv",
        ),
        (["run", "--rules", "dsgd", "-n", "4", "--set", "meets=pairwise 99999999*0.05 over wan"], "nodes = 99999999"),
        (["topology", "ring", "-n", "4", "--set", "meets=pairwise 0.1"], "ring has no option 'meets'"),
        (["topology", "ring", "-n", "4", "--frobnicate"], "--frobnicate"),
        (["topologie"], "topologie"),
        (["probe", "least-squares", "-n", "2147483648"], "nodes = 2147483648; give a whole number from 1 to 65536"),
    ],
)
def test_the_command_line_complains_in_one_line(arguments, message, run_cli):
    code, out, err = run_cli(*arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("klatsch: error: ")
    assert message in err
