"""Figures of rows and of installed studies: panels, lines, legends, and looks of one's own."""

from dataclasses import replace

import numpy as np
import pytest

from klatsch import rules
from klatsch.report import figures, pages
from klatsch.report.figures import StudyFigure
from klatsch.study import Row
from tests.report.test_sentences import of_case, row, rows_of, script_of
from tests.support.pictures import check_picture


def labels_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def captions_of(figure):
    return [axis.get_title() for axis in figure.axes]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig2", "local-steps", "images-channels", "language-links", "language-sizes"])
def test_figures_of_installed_studies(name, tmp_path):
    """Those that need a data set or a text; the others are drawn by the command."""
    script, _ = script_of(name)
    scale = 0.1 if name.startswith("language") else 1.0
    rows = rows_of(name, lambda case: 0.8 + 0.05 * scale * (case.rule != "dsgd"), half=0.7, spread=0.01)
    drawn = dict(script.drawn(rows, name, "a title"))
    figure = drawn[name]
    figure.savefig(tmp_path / "drawn.png", dpi=120)  # takes seconds, and the others of a study are of its kind
    check_picture(tmp_path / "drawn.png")
    if name == "fig2":
        assert captions_of(figure) == [f"{M} machines, alpha = {a}" for M in (8, 16) for a in (0.1, 10)]
        assert labels_of(figure)[:2] == ["dat, ring", "dsgd, ring"]
        assert figure.axes[0].get_ylabel() == "test accuracy, mean over nodes"
        assert figure.axes[0].get_xlabel() == "epochs"
    if name == "local-steps":
        assert figure.axes[0].get_xlabel() == "MB sent per node"
        assert labels_of(figure)[-4:] == ["every round", *(f"every {H}th round" for H in (4, 16, 64))]
        (line,) = [line for line in figure.axes[0].lines if line.get_label() == "dsgd, ring"]
        assert len(line.get_xdata()) == 4  # of two schedules, the better one
    if name == "images-channels":
        assert set(drawn) == {name, f"{name}-200-mbit", f"{name}-50-mbit", f"{name}-course"}
        assert len(captions_of(figure)) == 2 * 5
        assert {"every round", "every 8th round, late 7", "int8"} <= set(labels_of(figure))
        assert labels_of(figure)[-1].endswith("complete/8") or "dsgd (momentum 0.9, cosine), complete/8" in labels_of(
            figure
        )
        course = drawn[f"{name}-course"]
        links = ("200 Mbit/s, 5 ms", "50 Mbit/s, 50 ms")
        assert captions_of(course) == [f"{link}, alpha = {alpha}" for link in links for alpha in (0.1, 10)]
    if name.startswith("language"):
        axis = figure.axes[-1] if name == "language-sizes" else figure.axes[0]
        assert (axis.get_xlabel() if name == "language-sizes" else axis.get_ylabel()).endswith("bits per byte")
        assert axis.get_yscale() == "linear"


def test_the_best_rule_is_on_top():
    errors = {"dat": 1.0, "dsgd": 3.0, "gt": 2.0}
    figure = StudyFigure(across="rules").draw([row(rule, "ring", 4, e) for rule, e in errors.items()], "t", {})
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["dsgd", "gt", "dat"]


def test_the_figure_of_the_best_names_those_that_are_level_and_the_factor_of_the_next():
    cases = script_of("beyond", "quick")[1].values()
    known = {
        (c.label, c.nodes): c for c in cases if c.graph_label == "ring" and c.setting == "noise 1, heterogeneity 1"
    }

    def cells(errors):
        figure = StudyFigure(across="best").draw(
            [of_case(known[key], e, spread=0.01) for key, e in errors.items()], "b", {}
        )
        return [[text.get_text() for text in axis.texts] for axis in figure.axes]

    above, below = cells(
        {
            ("gt", 4): 2e-7, ("gt (cosine)", 4): 1.01e-8, ("d2 (cosine)", 4): 1e-8, ("dat", 4): 3e-8,
            ("gt", 25): 1e-7, ("dat", 25): np.inf,
        }
    )  # fmt: skip
    assert above == ["gt (cosine)\nd2 (cosine)\nnext × 3", "gt"]
    assert below == ["dat\n× 3", "gt\n× 1"]
    assert cells({(rule, 4): 1e-8 for rule in ("dsgd", "dat", "gt", "d2")})[0] == ["dsgd\ndat\nand 2 more"]


def test_points_lie_at_what_they_cost_and_references_stand_in_every_panel():
    cases = [
        c for c in script_of("channels")[1].values() if c.rule in ("dsgd", "dat") and not c.topology_options.get("late")
    ]
    drawing = StudyFigure(
        across="bytes", final=True, panels=("options",), lines=("every",), reference=({"topology": "complete"},)
    )
    figure = drawing.draw([of_case(c, 1e-6) for c in cases], "t", {})
    assert captions_of(figure) == ["dat (beta 1)", "dat (beta 0.9)", "dsgd"]
    for axis in figure.axes:
        lines = {line.get_label(): line for line in axis.lines}
        assert {"every round", "every 8th round", "dsgd, complete", "dsgd, complete/8"} <= set(lines)
        assert lines["dsgd, complete"].get_color() == "black"
        x = lines["every round"].get_xdata()
        assert list(x) == sorted(x)
        assert x[-1] == pytest.approx(
            max(of_case(c, 1).megabytes for c in cases if c.label == axis.get_title() and c.topology == "ring")
        )


def test_a_figure_has_its_values_in_numbers():
    settings = [{"noise": noise, "heterogeneity": noise / 10} for noise in (1.0, 10.0)]
    rows = [
        row(rule, "ring", M, 1 / M, s) for s in settings for rule in ("dat", "d2", "dat (beta 0.9)") for M in (4, 9)
    ]
    told = figures.values_of(figures.plot(rows, "nodes"))
    assert (told["x"], told["y"]) == ("machines M", "final error ‖x − x*‖², mean over nodes")
    assert [panel["title"] for panel in told["panels"]] == ["σ = 1, ζ = 0.1, ring", "σ = 10, ζ = 1, ring"]
    dat, d2, other = told["panels"][0]["lines"]
    assert (dat["x"], dat["mean"], dat["low"], dat["high"]) == (
        [4, 9],
        [0.25, 0.111111],
        [0.2475, 0.11],
        [0.2525, 0.112222],
    )
    assert dat["notes"][0] == "dat, ring, M = 4: 0.25 (0.247 to 0.253), lr 0.1"
    assert (dat["colour"], dat["dash"], other["dash"]) == (other["colour"], 0, 1)
    assert d2["colour"] != dat["colour"]
    assert told["within"] is None
    courses = figures.values_of(figures.plot([replace(rows[0], largest=True)]))
    (line,) = courses["panels"][0]["lines"]
    assert (line["name"], line["more"], line["x"], line["notes"]) == ("dat", ", lr 0.1", [1, 100, 100_000], [])
    assert courses["within"][0] >= 0  # of accuracies, as in the picture
    assert courses["log"] == [True, False]
    assert figures.values_of(StudyFigure(across="rules").draw(rows, "t", {})) is None


def test_too_many_panels_are_refused():
    rows = [row("dat", "ring", M, 1.0) for M in range(2, 110)]
    with pytest.raises(ValueError, match="a figure of 108 panels; 100 are the most"):
        figures.plot(rows, "rounds")


def test_every_line_is_in_the_legend():
    rows = [row("dat", "one_peer_exponential", M, 1 / M) for M in (4, 9)]
    rows += [row(rule, "ring", M, 1 / M) for rule in ("dat", "d2") for M in (4, 9)]
    (legend,) = figures.plot(rows, "nodes", "title").legends
    assert [text.get_text() for text in legend.get_texts()] == ["dat", "d2"]
    marked = [replace(each, setting={"beta": 0.9} if each.rule == "dat" else {}) for each in rows]  # d2 has none
    assert figures.Look(marked, words=figures.StudyFigure(marker="beta")).markers == [0.9, ""]


def test_a_legend_that_does_not_fit_into_its_panel_lies_below_it():
    short = [row("dat", "ring", 4, 0.5)]
    long = [row(f"diloco (outer_lr 0.7, momentum 0.9, number {k})", "complete", 4, 0.5 + k) for k in range(9)]
    for rows, below in ((short, False), (long, True)):
        (axis,) = (figure := figures.plot(rows, "rounds")).axes
        figure.draw_without_rendering()
        legend, panel = axis.get_legend().get_window_extent(), axis.get_window_extent()
        assert (legend.y1 < panel.y0) == below
        assert min(legend.x0, legend.y0) >= 0
        assert legend.x1 <= figure.bbox.x1


def test_a_figure_of_the_training_loss_beside_an_accuracy():
    rows = [replace(row("dat", graph, 4, 0.9), metric="accuracy", largest=True) for graph in ("ring", "torus")]
    rows[0] = replace(rows[0], others={"loss": 0.4 * rows[0].curves ** 2})
    (axis,) = StudyFigure(of="loss", lines=("rule",), panels=()).draw(rows, "t", {}).axes
    assert (axis.get_ylabel(), axis.get_yscale()) == ("training loss, mean over nodes", "log")
    (line,) = [line for line in axis.lines if line.get_label() == "dat"]  # of torus nothing is known
    assert line.get_ydata() == pytest.approx([1.6, 0.4, 0.324], rel=1e-3)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0.5", "1"]


def test_pages_say_when_a_learning_rate_lies_at_the_edge():
    edge = Row("dsgd", "ring", 4, (0.1, 0.2), (1,), np.array([[[1.0, 2.0]]]), np.zeros((1, 1, 2)), 0.0)
    assert "dsgd in 1 of 1 points" in pages.edge_note([edge])[0]


def test_every_rule_has_a_look_of_its_own():
    assert len(rules.RULES) <= len(set(figures.COLOURS)) == len(set(figures.MARKERS)), "add a colour and a marker"


def test_rules_of_ones_own_look_like_no_other_rule():
    """Also where there are more rules than colours."""
    few = [row(rule, "ring", M, 1 / M) for rule in ("dsgd", "dat", "mine.py:A", "mine.py:B") for M in (4, 9)]
    many = [
        row(rule, "ring", M, 1 / M) for rule in (*rules.RULES, *(f"mine.py:R{k}" for k in range(20))) for M in (4, 9)
    ]
    for rows in (few, many):
        look = figures.Look(rows)
        looks = {(look.style(r)["color"], look.style(r)["marker"]) for r in rows}
        assert len(looks) == len({r.rule for r in rows})
    both = figures.Look(few), figures.Look(few[:4])
    assert both[0].style(few[0]) == both[1].style(few[0])  # a built-in rule looks the same in every figure
    assert len({figures.Look(few).style(r)["color"] for r in few}) == 4


def test_a_figure_with_a_look_of_ones_own(tmp_path):
    rows = [row(rule, "ring", M, 1 / M) for rule in ("dsgd", "dat", "d2") for M in (4, 9)]
    style = tmp_path / "mine.mplstyle"
    style.write_text("figure.figsize: 5, 4\naxes.facecolor: eeeeee\n")
    look = {"order": ["d2", "dsgd"], "colours": {"dsgd": "#ff0000"}, "labels": {"dsgd": "baseline $x"}, "style": style}
    figure = figures.plot(rows, "nodes", **look)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["d2", r"baseline \$x"]
    drawn = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert drawn[r"baseline \$x"] == "#ff0000"
    assert tuple(figure.get_size_inches()) == (5, 4)
    assert figure.axes[0].get_facecolor()[0] == pytest.approx(0xEE / 255)
    assert tuple(figures.plot(rows, "nodes", size=(3, 2)).get_size_inches()) == (3, 2)
    with pytest.raises(ValueError, match="no row has the rule 'dta'; did you mean dat"):
        figures.plot(rows, "nodes", order=["dta"])
    with pytest.raises(ValueError, match=r"nowhere.mplstyle.*give an .mplstyle file"):
        figures.plot(rows, "nodes", style=tmp_path / "nowhere.mplstyle")
