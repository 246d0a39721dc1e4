"""Drawings: every phase, every kind of graph, and files that are whole."""

import numpy as np
import pytest
from PIL import Image

from klatsch import topology as tp
from klatsch.topology.drawing import figure


@pytest.mark.parametrize(
    "graph", [tp.ring(5), tp.base_graph(11, 2), tp.torus(12), tp.star(6), tp.complete(1)], ids=repr
)
def test_one_panel_per_round(graph):
    drawn = [panel for panel in figure(graph).axes if panel.collections]
    assert len(drawn) == graph.period
    for t, panel in enumerate(drawn, 1):
        links = graph.matrix(t).nnz - (graph.matrix(t).diagonal() > 0).sum()
        assert len(panel.patches) == links // 2
        assert len(panel.collections[0].get_offsets()) == graph.size


def test_directed_links_are_arrows_from_speaker_to_hearer():
    (panel,) = figure(tp.directed_ring(6)).axes
    nodes = panel.collections[0].get_offsets()
    for patch in panel.patches:
        start, end = patch._posA_posB
        speaker, hearer = (min(range(6), key=lambda i: abs(nodes[i] - spot).sum()) for spot in (start, end))
        assert speaker == (hearer + 1) % 6


def test_large_graphs_are_drawn_with_lines():
    (panel,) = figure(tp.random_regular(1000)).axes
    assert sum(len(c.get_paths()) for c in panel.collections[:1]) == 2000


@pytest.mark.parametrize("graph", [tp.ring(2), tp.grid(rows=1, cols=8), tp.grid(rows=2, cols=20)], ids=repr)
def test_flat_graphs_are_not_cut_off(graph, tmp_path):
    """Some white is left between the nodes and every border of the picture."""
    with Image.open(tp.draw(graph, tmp_path / "flat.png")) as image:
        coloured = np.asarray(image.convert("HSV"))[:, :, 1] > 128
    rows, columns = np.flatnonzero(coloured.any(axis=1)), np.flatnonzero(coloured.any(axis=0))
    assert len(rows) > 25  # whole discs, not slivers
    assert rows[0] > 2
    assert columns[0] > 2
    assert rows[-1] < coloured.shape[0] - 3
    assert columns[-1] < coloured.shape[1] - 3


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("folder.svg", "file/a.svg", f"{'x' * 300}.svg"):
        with pytest.raises(ValueError, match=r"cannot (draw to|write) .*(folder|name)"):
            tp.draw(tp.ring(3), tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".PNG"])
def test_files(suffix, tmp_path, run_cli):
    path = tmp_path / f"ring{suffix}"
    code, out, _ = run_cli("topology", "one_peer_exponential", "-n", 8, "--draw", path)
    assert code == 0
    assert f"drawn to {path}" in out
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left
    content = path.read_bytes()
    if suffix == ".svg":
        text = content.decode()
        assert all(f"<!-- round {t} of 3 -->" in text for t in (1, 2, 3))
        assert tp.draw(tp.one_peer_exponential(8), path).read_bytes() == content  # the same graph, the same file
    elif suffix.lower() == ".png":
        with Image.open(path) as image:
            assert image.width > 2 * image.height
    else:
        assert content.startswith(b"%PDF")
