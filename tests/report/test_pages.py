"""The command `klatsch reproduce`, pages as files, a report in a real browser, and the figures on them."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from klatsch import pictures
from klatsch.report import figures, pages, tables
from klatsch.report.pages import inline_svg, page_of
from klatsch.study import Store, execute, expand, parse, run_study, spec, workers
from klatsch.study.spec import PAPER_GRID
from tests.report.test_installed import thinned
from tests.report.test_sentences import row
from tests.support.browser import BROWSER, FLAGS, needs_browser
from tests.support.pictures import check_picture
from tests.support.waiting import wait_until


@pytest.mark.parametrize("name, rows", [("table1", 3), ("table2", 11)])
@pytest.mark.slow
def test_tables_agree_with_the_paper(name, rows, run_cli, tmp_path):
    code, out, err = run_cli("reproduce", name, "--out", tmp_path)
    assert (code, err) == (0, "")
    assert "does not hold" not in out
    assert "not decided" not in out
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1 + rows
    if name == "table1":  # the table is before its sentences
        table, _, sentences = out.partition("holds")
        lines = [line.split() for line in table.splitlines()]
        assert ["torus", "1.000", "(1.000)", "0.167", "(0.167)", "0.251", "(0.250)"] in lines
        assert ["near_complete", "0.000", "(0.000)", "0.250", "(0.250)", "0.500", "(0.500)"] in lines
        assert "on the near-complete graph: 0.25" in sentences
        assert "near_complete" not in sentences
    for suffix in (".png", ".svg", ".pdf"):
        check_picture(tmp_path / f"{name}{suffix}")


def test_a_wrong_exponent_would_show(monkeypatch):
    monkeypatch.setitem(tables.TABLE_1, "ring", (2, 1 / 8, 1 / 5))
    assert [v.holds for v in tables.table_1().verdicts].count(False) == 1


# --- the command ----------------------------------------------------------------------------------------------------

RATES = PAPER_GRID[1::2]  # three: one between the others, and both edges
TINY = {"nodes": (4, 16), "steps": 100, "seeds": 2, "record": 6, "lr": RATES}
FEWER = [rule | {"lr": rule["lr"][::3]} for rule in spec.content_of("beyond", "quick")["rules"]]
SOME = [
    {"name": "ring", "wire": ["float32", "bfloat16", "int8"]},
    {"name": "ring", "every": 8, "wire": ["float32", "int8"]},
    {"name": "ring", "every": 8, "late": 7, "wire": "int8"},
]
ONE = {"problem": {"name": "least-squares", "noise": 1.0, "heterogeneity": 1.0}}
TINY_BEYOND = {"nodes": (4, 9), "steps": 100, "seeds": 1, "record": 6, "rules": FEWER} | ONE
CORRECTED = {"name": "dat-d2", "beta": [1.0, 0.9], "lr": RATES}
TINY_CHANNELS = {"nodes": 9, "steps": 100, "seeds": 1, "record": 6, "rules": CORRECTED, "topologies": SOME}
WAITING = [rule | {"lr": 1e-3} for rule in spec.content_of("stragglers", "quick")["rules"]]
TINY_STRAGGLERS = {"steps": 30, "seeds": 1, "record": 8, "rules": WAITING} | ONE
TINIES = {"fig1": TINY, "fig4": TINY, "beyond": TINY_BEYOND, "channels": TINY_CHANNELS, "stragglers": TINY_STRAGGLERS}
# Without a data set; those of `language` have tests of their own, and figures 5 and 6 are figure 4 on other graphs.
DRAWN = list(TINIES)


def shrink(patch, contents):
    """Installed studies with other content."""
    whole = spec.content_of
    patch.setattr(spec, "content_of", lambda name, scale: whole(name, scale) | contents.get(name, {}))


def figures_of(target):
    return spec.content_of(target, "quick")["figures"]


def formats(target):
    """All of them for one figure: drawing takes seconds, and is the same for the others."""
    return (".png", ".svg", ".pdf") if target == "fig1" else (".png",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with every figure at a tiny scale, made by the commands themselves."""
    folder = tmp_path_factory.mktemp("paper")
    patch = pytest.MonkeyPatch()
    shrink(patch, TINIES)
    patch.setattr(workers, "processes", workers.threads)  # no start-up time: processes are tested elsewhere
    from klatsch.cli import main

    for target in DRAWN:
        patch.setattr(pages, "FORMATS", formats(target))
        patch.setattr("sys.argv", ["klatsch", "reproduce", target, "--out", str(folder)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    yield folder
    patch.undo()


@pytest.mark.soak
def test_reproduce_writes_figures_numbers_and_verdicts(results):
    for target in DRAWN:
        name = f"{target}-quick"
        for suffix in formats(target):
            for figure in figures_of(target):
                added = f"-{figure['name']}" if "name" in figure else ""
                check_picture(results / f"{name}{added}{suffix}", most=0.9)  # cells are filled with colour
        text = (results / f"{name}.md").read_text()
        assert f"klatsch reproduce {target}" in text
        assert re.search(r"\*\*(holds|does not hold|not decided)\*\*", text)
        header = (results / f"{name}.csv").read_text().partition("\n")[0]
        assert header.startswith("topology,noise,heterogeneity,M,rule,error,from,to,merged,worst,lr,")
    lines = (results / "fig1-quick.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 4 * 2 * 2


@pytest.mark.soak
def test_figure_4_uses_the_runs_of_figure_1(results):
    with Store(results / "results.sqlite") as store:
        studies = {s.study.name for s in store.studies()}
        runs = store.runs()
    assert studies == {f"{name}-quick" for name in DRAWN}
    one = [case for _, case in runs if case.nodes == 16 and case.steps == TINY["steps"]]
    assert len(one) == 3 * 2 * 4 * len(RATES) * 2  # once, though two figures ask for some of them


@pytest.mark.soak
def test_beyond_has_all_variants_where_they_are_defined(results):
    study = thinned("beyond", "quick").model_copy(update={"nodes": (4,)})
    variants = list(dict.fromkeys(case.label for case in expand(study)[0]))
    with (results / "beyond-quick.csv").open() as file:
        lines = list(csv.DictReader(file))
    on = {
        t: {line["rule"] for line in lines if line["topology"] == t} for t in ("ring", "torus", "one_peer_exponential")
    }
    assert on["ring"] == on["torus"] == set(variants)
    assert on["one_peer_exponential"] == {name for name in variants if "d2" not in name}
    text = (results / "beyond-quick.md").read_text()
    ceilings = re.findall(r": (.*) has no ceiling on the ring", text)
    assert ceilings == variants  # a sentence for each


@pytest.mark.soak
def test_reproduce_gives_json(results, run_cli):
    code, out, _ = run_cli("reproduce", "fig1", "--out", results, "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["verdicts"]) == 8
    assert {v["holds"] for v in found["verdicts"]} <= {True, False, None}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("fig7",), "unknown target 'fig7'"),
        (("demo",), "unknown target 'demo'"),
        (("fig1", "--scale", "huge"), "unknown scale 'huge'"),
        (("table1", "--scale", "huge"), "unknown scale 'huge'"),
        (("fig1", "--dtype", "float16"), "dtype = 'float16'"),
        (("fig1", "--device", "quantum"), "device = 'quantum'"),
        (("fig1", "--workers", "0"), "--workers 0: give a number from 1 to 1,024"),
    ],
)
def test_mistakes_are_one_line(arguments, words, run_cli, tmp_path):
    code, out, err = run_cli("reproduce", *arguments, "--out", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


# --- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture
def browse(prepared, tmp_path):
    """Open a page in Chromium."""
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
    return lambda page, *options: prepared.program(*command, *options, page.as_uri()).done()


@pytest.fixture
def report(results, run_cli):
    """The report of all figures, made once."""
    file = results / "report.html"
    if not file.exists():
        code, out, err = run_cli("report", results / "results.sqlite", "-o", file)
        assert (code, err) == (0, "")
        assert f"{len(DRAWN)} pages" in out
    return file


WIDE = "document.documentElement.scrollWidth - innerWidth"
TWICE = "(ids => ids.filter((id, k) => ids.indexOf(id) !== k))([...document.querySelectorAll('[id]')].map(e => e.id))"
BOXES = """[...document.querySelectorAll('figure .picture')].map(
    picture => (box => [box.width, box.height])(picture.firstChild.getBoundingClientRect()))"""


@pytest.mark.parametrize("window", [{"width": 390}, {"width": 1280}, {"width": 1280, "dark": True}])
def test_a_real_browser_shows_the_report(window, report, tab):
    tab.open(report.as_uri(), **window)
    tab.value("asked.forEach(figure => figure.panels.forEach(draw))")  # else those below, when they come into view
    figures = [figure for name in DRAWN for figure in figures_of(name)]
    lines = [figure for figure in figures if figure.get("across") not in ("rules", "best")]
    assert tab.value("document.querySelectorAll('figure').length") == len(figures)
    assert tab.value("document.querySelectorAll('figure.asked').length") == len(lines)
    sizes = tab.value("[...document.querySelectorAll('.chart canvas')].map(e => [e.clientWidth, e.clientHeight])")
    assert len(sizes) == tab.value("document.querySelectorAll('.panel').length") > len(lines)
    assert all(width > 200 and height > 200 for width, height in sizes)
    assert tab.value(WIDE) <= 0  # nothing sticks out: figures and tables scroll by themselves
    assert tab.value(TWICE) == []
    assert tab.violations() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_without_scripts_the_report_has_pictures(width, report, tab):
    tab.open(report.as_uri(), width=width, scripts=False)
    boxes = tab.value(BOXES)
    assert len(boxes) == sum(len(figures_of(name)) for name in DRAWN)
    assert all(w > 250 and h > 150 for w, h in boxes)
    assert tab.value(WIDE) <= 0
    assert len(tab.text("main")) > 3000
    assert tab.value("document.querySelectorAll('g.value > title').length") >= 3 * 4 * 2 * 2
    html = report.read_text()
    for words in ("Verdicts", "All numbers", "Environment", "klatsch reproduce fig1", "torch"):
        assert words in html


@pytest.fixture
def asked(tmp_path, run_cli, monkeypatch):
    """A report with a figure of these rows."""

    def write(rows, across="nodes"):
        content = {"steps": 5, "nodes": 4, "rules": ["dat"], "topologies": ["ring"], "lr": [0.01]}
        with Store(tmp_path / "s.sqlite") as store:
            run_study(parse(content), store, executor=workers.threads)
        drawn = ("any", figures.plot(rows, across)), ("other", figures.plot(rows, "rounds"))
        monkeypatch.setattr(
            pages, "page_of", lambda *_, **__: pages.Page("any", "Any", (), drawn, ("a", "b"), (("=1", '"'),))
        )
        assert run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html")[0] == 0
        return tmp_path / "r.html"

    return write


PANEL = "asked[0].panels[0]"
ROWS = [
    row(rule, "ring", nodes, nodes * error) for rule, error in (("dat", 1e-4), ("d2", 1e-2)) for nodes in (4, 9, 16)
]


def test_a_figure_is_asked(asked, tab):
    tab.open(asked(ROWS).as_uri())
    tab.until(f"Boolean({PANEL}.plot)")
    told = json.loads(tab.value("document.querySelector('figure script').textContent"))
    assert told["log"] == [True, True]
    left, top = tab.value(f"(box => [box.x, box.y])({PANEL}.plot.over.getBoundingClientRect())")
    x, y = (left + tab.value(f"{PANEL}.plot.valToPos(9, 'x')"), top + tab.value(f"{PANEL}.plot.valToPos(9e-4, 'y')"))
    for beside in (30, 3):
        tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + beside, y=y - beside)
    tab.until(f"!{PANEL}.tip.hidden")
    assert tab.text(".tip") == "dat, ring, M = 9: 0.0009 (0.000891 to 0.000909), lr 0.1"
    tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y + 400)
    tab.until(f"{PANEL}.tip.hidden")


def test_the_value_of_a_point_hides_no_line(asked, tab):
    tab.open(asked(ROWS).as_uri(), width=390)
    tab.until(f"Boolean({PANEL}.plot)")
    tab.value(f"{PANEL}.plot.over.scrollIntoView({{block: 'center'}})")

    def seen(nodes, error):
        place = f"[{PANEL}.plot.valToPos({nodes}, 'x'), {PANEL}.plot.valToPos({nodes * error}, 'y')]"
        box = f"(box => [box.x, box.y])({PANEL}.plot.over.getBoundingClientRect())"
        return np.add(tab.value(place), tab.value(box))

    x, y = seen(16, 1e-2)
    for beside in (20, 3):
        tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x - beside, y=y)
    tab.until(f"!{PANEL}.tip.hidden")
    tip = tab.value(f"(b => [b.left, b.right, b.top, b.bottom])({PANEL}.tip.getBoundingClientRect())")
    for nodes, error in product(np.geomspace(4, 16, 40), (1e-4, 1e-2)):  # the lines are straight on log axes
        u, v = seen(nodes, error)
        assert not (tip[0] < u < tip[1] and tip[2] + 2 < v < tip[3] - 2)  # it may touch one


def test_lines_and_axes_are_chosen_by_keys(asked, tab):
    tab.open(asked(ROWS).as_uri())
    tab.until(f"Boolean({PANEL}.plot)")

    def key_on(label):
        while tab.value("document.activeElement.parentNode.textContent") != label:
            tab.press("Tab")
        tab.press(" ")

    key_on("log x")
    key_on("log y")
    scales = (
        f"(p => ['x', 'y'].map(name => [p.scales[name].distr, p.scales[name].min, p.scales[name].max]))({PANEL}.plot)"
    )
    (x, *_), (y, low, high) = tab.value(scales)
    assert (x, y) == (1, 1)
    assert low < 0.0004 < 0.16 < high
    key_on("dat")
    assert 0.03 < tab.value(scales)[1][1] < 0.04
    assert tab.value(f"{PANEL}.plot.bands.length") == 1
    assert tab.value("asked[1].shown.size") == 2  # of the other figure
    key_on("d2")
    assert tab.value(f"{PANEL}.plot.bands.length") == 0  # empty, and no error
    tab.value("[...document.querySelectorAll('button')].find(button => button.textContent === 'All').click()")
    assert tab.value(f"{PANEL}.plot.bands.length") == 2


def test_the_values_of_a_figure_are_downloaded_and_listed(asked, tab, tmp_path):
    tab.open(asked(ROWS).as_uri())
    tab.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    buttons = "[...document.querySelectorAll('button')].filter(button => button.textContent.endsWith('CSV'))"
    tab.value(f"{buttons}.forEach(button => button.click())")
    for name in ("any", "any-2", "any-table"):
        wait_until((tmp_path / f"{name}.csv").exists, tab.process)
    with (tmp_path / "any.csv").open() as file:
        head, *lines = csv.reader(file)
    assert head[:6] == ["panel", "line", "machines M", "mean", "from", "to"]
    assert [(name, *map(float, numbers)) for _, name, *numbers, _ in lines] == [
        (each.rule, each.nodes, *map(pytest.approx, (each.value, each.low, each.high))) for each in ROWS
    ]
    assert lines[0][-1] == "dat, ring, M = 4: 0.0004 (0.000396 to 0.000404), lr 0.1"
    assert (tmp_path / "any-table.csv").read_text() == 'a,b\n\'=1,""""\n'  # no formula for a spreadsheet
    tab.value("document.querySelector('.ask details').open = true")
    tab.until("document.querySelectorAll('.ask td').length")
    assert (
        tab.value(
            "[...document.querySelectorAll('.ask tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        == lines
    )


def test_what_a_store_says_is_never_markup(asked, tab):
    evil = "</script><img src=x><!--<script>"
    page = asked([replace(each, rule=f"{each.rule}{evil}", topology=evil) for each in ROWS])
    html = page.read_text()
    page.write_text(html.replace("</head>", "<script>document.title = 'forged'</script></head>"))
    tab.open(page.as_uri())
    tab.until(f"Boolean({PANEL}.plot)")
    assert tab.value("document.querySelectorAll('img').length") == 0
    assert tab.text(".names label").strip() == f"dat{evil}"
    assert tab.value("document.title") == "klatsch: s.sqlite"  # the page runs its own script and no other
    (refused,) = tab.errors
    assert "Content Security Policy" in refused
    tab.errors.clear()


def test_what_diverged_leaves_a_figure_that_can_be_asked(asked, tab):
    diverged = [replace(each, rule="gt", curves=np.full_like(each.curves, np.inf)) for each in ROWS[:3]]
    tab.open(asked([*ROWS[:3], *diverged]).as_uri())
    tab.until(f"Boolean({PANEL}.plot)")
    assert (
        tab.value("[...document.querySelectorAll('.names')].map(e => e.innerText.match(/dat|gt/g).join())")
        == ["dat,gt"] * 2
    )
    tab.value("document.querySelector('.names input').click()")
    assert tab.value(f"{PANEL}.plot.data[0].length") == 0


@needs_browser
def test_the_report_prints(report, browse, tmp_path):
    browse(report, f"--print-to-pdf={tmp_path / 'report.pdf'}")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000


def test_the_report_is_self_contained_and_escapes_what_it_shows(tmp_path, run_cli):
    study = tmp_path / "s.toml"
    study.write_text(
        'name = "<script>alert(1)</script>"\nsteps = 50\nnodes = 4\nrules = ["dat"]\ntopologies = ["ring"]\n'
    )
    assert run_cli("run", study)[0] == 0
    code, out, _ = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html", "--title", "A & B")
    assert (code, out) == (0, f"1 page of results written to {tmp_path / 'r.html'}\n")
    html = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in html
    assert "A &amp; B" in html
    assert not re.search(r'(src|href)="https?:', html)
    assert "@import" not in html


def test_a_page_that_cannot_be_shown_is_a_line_and_the_others_are_there(tmp_path, run_cli, monkeypatch):
    content = {"steps": 5, "nodes": 4, "rules": ["dat"], "topologies": ["ring"], "lr": [0.01]}
    forged = {
        "wide": {"figures": [{"wide": 10**9}]},
        "long": {"sentences": [{"claim": "{most:9999999999}", "theirs": {}}]},
        "odd": {},
    }
    with Store(tmp_path / "s.sqlite") as store:
        for name, words in ({"fine": {}} | forged).items():
            run_study(parse({**content, "name": name, **words}), store, executor=workers.threads)
    whole = pages.page_of

    def raises(study, *args, **options):
        return {}["no such thing"] if study.study.name in odd else whole(study, *args, **options)

    monkeypatch.setattr(pages, "page_of", raises)
    odd = ["odd"]
    code, out, err = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert (code, err, html.count("<svg")) == (0, "", 1)
    for line in ("wide: figures[0].wide = 1000000000", "long: sentences[0]: the claim has a {most}", "odd: what the"):
        assert line in out
        assert line in html
    odd = ["fine", "odd"]
    code, _, err = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html")
    assert (code, err.count("\n")) == (2, 1)  # there is nothing to show


def test_rows_are_printed_before_what_is_said_of_them(tmp_path, run_cli, monkeypatch):
    def refuse(*_):
        raise ValueError("nothing can be said")

    monkeypatch.setattr(pages.Outline, "verdicts", refuse)
    code, out, err = run_cli("run", "--rules", "dat", "-n", 4, "--steps", 5, "--lr", 0.01)
    assert (code, "dat" in out, "nothing can be said" in err) == (2, True, True)


def test_svg_in_a_page_has_ids_of_its_own():
    figure = figures.plot([row("dat", "ring", nodes, 1.0) for nodes in (4, 9)], "nodes")
    text = pictures.render(figure, ".svg").decode()
    one, two = (inline_svg(text, name) for name in ("one", "two"))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg in (one, two):
        root = ElementTree.fromstring(svg)
        known = {element.get("id") for element in root.iter()}
        for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', svg):
            assert reference in known


def test_a_page_without_runs_says_what_to_do(tmp_path, run_cli):
    cases, _ = expand(parse({"steps": 5, "nodes": 4, "rules": ["dat"], "topologies": ["ring"]}))
    with Store(tmp_path / "s.sqlite") as store:
        execute(cases, store, executor=workers.threads)  # runs, but of no study
    code, _, err = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "r.html")
    assert code == 2
    assert "holds no study" in err
    code, _, err = run_cli("report", tmp_path / "s.sqlite", "-o", tmp_path / "nowhere" / "r.html")
    assert code == 2
    assert "folder that exists" in err


@pytest.mark.slow
def test_a_report_shows_what_is_there_of_a_study_that_is_not_finished(tmp_path, run_cli):
    path = tmp_path / "s.sqlite"
    content = {"steps": 50, "nodes": [6, 8], "rules": ["dat"], "topologies": ["ring"], "lr": [0.01], "record": 3}
    done, begun = parse({**content, "name": "done"}), parse({**content, "name": "begun", "steps": 60})
    few = {"steps": 50, "lr": 0.01, "seeds": 1} | ONE
    half = parse(spec.content_of("fig1", "quick") | few | {"nodes": [4, 9]})
    curves = parse(spec.content_of("fig4", "quick") | few | {"nodes": [6, 8], "name": "odd"})
    with Store(path) as store:
        run_study(done, store, executor=workers.threads)
        store.remember(begun, "klatsch run begun.toml")
        store.remember(half, "klatsch reproduce fig1")
        execute([case for case in expand(half)[0] if case.rule == "dat"], store, executor=workers.threads)
        run_study(curves, store, executor=workers.threads, command="klatsch reproduce fig4")
    code, out, err = run_cli("report", path, "-o", tmp_path / "r.html")
    assert (code, err) == (0, "")
    assert "4 pages" in out
    html = (tmp_path / "r.html").read_text()
    assert "None of its 6 runs is finished." in html
    assert f"{len(expand(half)[0]) // 2:,} of {len(expand(half)[0]):,} runs" in html
    assert "not decided" in html


@pytest.mark.soak
def test_a_wrong_device_does_not_take_the_place_of_what_is_done(results, run_cli):
    with Store(results / "results.sqlite", read_only=True) as store:
        before = store.studies()
    code, _, err = run_cli("reproduce", "fig1", "--out", results, "--device", "tpu", "--dtype", "float64")
    assert code == 2
    assert "device = 'tpu'" in err
    with Store(results / "results.sqlite", read_only=True) as store:
        assert store.studies() == before


def test_a_page_tells_the_learning_rates_that_were_tried(tmp_path):
    content = {"steps": 50, "nodes": 4, "topologies": ["ring"], "record": 3}
    study = parse({**content, "rules": [{"name": "dat", "lr": [0.01, 0.02]}, {"name": "dsgd", "lr": 1e-5}]})
    with Store(tmp_path / "s.sqlite") as store:
        run_study(study, store, executor=workers.threads)
        page = page_of(store.studies()[0], store)
    assert "Learning rates dat: 0.01, 0.02; dsgd: 1e-05. " in page.facts[0]
    assert study.choice == "best learning rate of each rule's grid"


@pytest.mark.parametrize("several", [list, tuple])
def test_a_grid_is_told_with_the_options_that_all_of_its_runs_share(several):
    rule = {"name": "dat", "beta": 0.9, "order": several(("atc", "cta")), "lr": 0.01}
    study = parse({"steps": 50, "nodes": 4, "topologies": ["ring"], "rules": [rule]})
    assert study.grids == [("dat (beta 0.9)", (0.01,))]
