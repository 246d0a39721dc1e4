"""The studies that come with klatsch: their verdicts are those of the committed pages, and they are what they say."""

import csv
import lzma
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from klatsch import catalogue, problems, rules
from klatsch.catalogue import GROUPS
from klatsch.report.pages import Outline
from klatsch.report.selection import selected
from klatsch.report.sentences import STANDING
from klatsch.study import Row, Store, expand, parse
from klatsch.study.batches import most_numbers, pack
from klatsch.study.choices import BESIDE, place, screened
from klatsch.study.spec import content_of, study_of
from klatsch.wire.rehearsal import vectors

RESULTS = Path(__file__).parents[2] / "docs" / "results"
OPTIONS = ("noise", "heterogeneity", "alpha")
PAGES = [name for name in catalogue.STUDIES if (RESULTS / f"{name}-paper.csv").exists()]


def thinned(name, scale="paper"):
    """An installed study with one learning rate and one seed: every row has one run."""
    content = content_of(name, scale)
    given = content["rules"] if isinstance(content["rules"], list) else [content["rules"]]
    rules = [{**({"name": rule} if isinstance(rule, str) else rule), "lr": 0.01} for rule in given]
    return parse(content | {"rules": rules, "seeds": 1, "screen": None, "device": "cuda"})


@cache
def cases_of(name, scale="paper"):
    """One run of each row of a study, by graph, size, rule and setting."""
    cases, _ = expand(thinned(name, scale))
    return {(case.graph_label, case.nodes, case.label, case.setting): case for case in cases}


def rows_of(name):
    """The rows of a committed table: final values of the seeds, of which one is known by the mean of all."""
    study, rows = study_of(name, "paper", "cuda"), []
    with (RESULTS / f"{name}-paper.csv").open() as file:
        lines = list(csv.DictReader(file))
    title = next(title for title in ("accuracy", "error", "bits") if title in lines[0])
    known = {(*key[:3], by_name(case.problem_options)): case for key, case in cases_of(name).items()}
    for line in lines:
        case = known[line["topology"], int(line["M"]), line["rule"], by_name({k: line.get(k) for k in OPTIONS})]
        mean, low, high = (float(line[key]) for key in (title, "from", "to"))
        seeds = {3: [low, 3 * mean - low - high, high], 2: [low, high]}.get(len(study.seeds), [mean])
        beside = {of: np.full((len(seeds), 1, 1), float(line[of])) for of in BESIDE if line.get(of, "-") != "-"}
        curves = np.clip(seeds, low, high)[:, None, None]
        rows.append(
            Row(
                *(case.label, case.graph_label, case.nodes, (float(line["lr"]),), (case.steps,), curves, curves, 1.0),
                setting=case.problem_options,
                metric="distance" if title == "error" else title,
                largest=title == "accuracy",
                epochs=case.epochs,
                sent=1e6 * float(line["MB sent"]),
                case=case,
                others=beside,
            )
        )
    return rows


def rows_of_runs(name, folder):
    """The rows of a study whose runs are committed: as they are, where a table has four digits."""
    file = folder / "runs.sqlite"
    file.write_bytes(lzma.decompress((RESULTS / f"{name.partition('-')[0]}-runs.sqlite.xz").read_bytes()))
    study = study_of(name, "paper")
    with Store(file) as store:
        runs = screened(study, expand(study)[0], store)
        assert not runs.missing(store)
        return runs.rows(store)


def by_name(options):
    """Those options of a problem that differ between the rows of a page, as a table shows them."""
    return tuple("" if options.get(name) is None else f"{float(options[name]):g}" for name in OPTIONS)


def is_known(sentence):
    """Whether final values decide a sentence: tables have no courses."""
    at = sentence.at
    return at.share == 1 and at.bytes != "doubled" and not at.clock and sentence.trend != "better early"


@pytest.mark.documents
@pytest.mark.parametrize("name", PAGES)
def test_verdicts_of_the_committed_pages_follow_from_their_tables_or_runs(name, tmp_path):
    text = (RESULTS / f"{name}-paper.md").read_text()
    committed = {line.rpartition(" (")[0]: word for word, line in re.findall(r"^- \*\*(.*?)\*\*: (.*)$", text, re.M)}
    rows = rows_of_runs(name, tmp_path) if name in ("bytes", "bytes-alike") else rows_of(name)
    script = Outline.of(thinned(name), list(cases_of(name).values()))
    verdicts = [verdict for sentence in script.sentences if is_known(sentence) for verdict in sentence.check(rows)]
    assert {v.claim: v.word for v in verdicts} == {v.claim: committed[v.claim] for v in verdicts}
    assert len(verdicts) >= {"stragglers": 0, "seconds": 0, "language-large": 2}.get(name, 3)


@pytest.mark.documents
def test_the_page_of_seconds_follows_from_its_runs(tmp_path):
    """Its table, the same as CSV, and verdicts: the runs are there, and what is written is what clocks say of them."""
    page, rows = (RESULTS / "seconds-paper.md").read_text(), rows_of_runs("seconds", tmp_path)
    study = study_of("seconds", "paper")
    script, name = Outline.of(study, expand(study)[0]), "25 M, internet, deaths"
    (race,) = script.races
    standings = race.run(rows, script.clocks)
    assert len(standings) == 90
    for line in race.lines(standings):
        assert f"| {' | '.join(line)} |" in page
    with (RESULTS / "seconds-paper-race.csv").open() as text:
        assert [tuple(line) for line in csv.reader(text)] == [
            STANDING,
            *(n for each in standings for n in each.numbers),
        ]
    told = [verdict for s in script.sentences if s.at.clock == name for verdict in s.check(rows, script.clocks)]
    assert {verdict.word for verdict in told} == {"holds", "does not hold"}
    for verdict in told:
        assert f"- **{verdict.word}**: {verdict.claim} (the study of seconds)\n  - {verdict.figures[0]}" in page


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["level with DiLoCo", "ahead of an all-reduce in float32"])
def test_at_equal_bytes_gossip_sends_no_more_than_what_it_is_compared_with(claim):
    """A run that sends a hundredth more does not count, and where none is left the sentence does not hold."""
    rows = [row for row in rows_of("bytes") if row.nodes == 64]
    outline = Outline.of(thinned("bytes"), list(cases_of("bytes").values()))
    (sentence,) = [sentence for sentence in outline.sentences if claim in sentence.claim]
    theirs = selected(rows, sentence.theirs)
    budgets = {row.megabytes for row in theirs}
    perfect = replace(selected(rows, sentence.ours)[0], curves=np.ones((3, 1, 1)))

    def verdict(share):
        sent = [replace(perfect, sent=1e6 * share * budget) for budget in budgets]
        (told,) = sentence.check([*theirs, *sent])
        return told.holds, told.figures[0].count("none of ours")

    assert verdict(1.0) == (True, 0)
    assert verdict(1.01) == (False, 1)  # at the smallest; elsewhere what the one below sends is enough


def lines_of(name):
    with (RESULTS / f"{name}-paper.csv").open() as file:
        return list(csv.DictReader(file))


def assert_tells(cell, lines):
    """A cell such as "**89.9** (89.7 to 90.0) of something" tells the best of these lines of a committed table."""
    best = max(lines, key=lambda line: float(line["accuracy"]))
    told = re.match(r"\*{0,2}([\d.]+)\*{0,2} \(([\d.]+) to ([\d.]+)\)", cell)
    known = [100 * float(best[key]) for key in ("accuracy", "from", "to")]
    assert np.abs(np.subtract([float(number) for number in told.groups()], known)).max() < 0.056, (cell, best)


def test_the_tables_at_equal_bytes_tell_the_best_that_sends_no_more():
    page, lines = (RESULTS.parent / "slow-networks.md").read_text(), lines_of("bytes")
    for nodes in ("16", "64"):
        start = page.index(f"| {nodes} machines: all-reduce in")
        told = re.findall(
            r"^\| every (?:(\d+)\w\w )?round \(.*?\) \|(.*)\|$", page[start : page.index("\n\n", start)], re.M
        )
        assert len(told) == 7
        mine = [line for line in lines if line["M"] == nodes]
        for every, cells in told:
            graph = f"complete/{every}" if every else "complete"
            (budget,) = {float(line["MB sent"]) for line in mine if line["topology"] == graph}
            within = [line for line in mine if float(line["MB sent"]) <= budget]
            reduced = [line for line in within if line["topology"].startswith("complete")]
            local = [line for line in reduced if line["rule"].startswith("dsgd")]
            gossip = [[line for line in within if wire in line["topology"]] for wire in ("int8", "int4")]
            kinds = local, [line for line in reduced if line not in local], *gossip
            for cell, those in zip(cells.split(" | "), kinds, strict=True):
                assert_tells(cell.strip(), those)


def test_the_table_of_the_readme_tells_what_the_committed_table_says():
    page = (RESULTS.parents[1] / "README.md").read_text()
    lines = [line for line in lines_of("bytes") if line["M"] == "16"]
    told = dict(re.findall(r"^\| (.+?) \| (\d.+?) \|", page[page.index("LeNet, 16 machines") :], re.M))
    rows = {
        "all-reduce": ("complete", "dsgd (momentum 0.9"),
        "plain gossip, local momentum or AdamW": ("one_peer_exponential", "dsgd (momentum 0.9"),
        "`GossipSGD`, `GossipAdamW`": ("base_graph", "dsgd (shared True"),
        "`GossipSGD` in int4: an eighth of the bytes; `GossipAdamW` in int8: a quarter": (
            "base_graph (wire int4)",
            "dsgd (shared True",
        ),
        '`GossipSGD` in int4, Base-8, `shared="first"`: 6 % more bytes than plain gossip': (
            "base_graph (k 7, wire int4)",
            "dsgd (shared first",
        ),
        "fewest bytes: `qg` in int4, 1/15 of `GossipSGD`'s; `GossipAdamW`, int8, one peer, `shared=False`, 1/16": (
            "base_graph (k 1, wire int4)",
            "qg (cosine",
        ),
    }
    assert told.keys() == rows.keys()
    for name, (graph, rule) in rows.items():
        assert_tells(told[name], [x for x in lines if x["topology"] == graph and x["rule"].startswith(rule)])


def test_every_study_has_words_that_fit_it():
    for name in (*catalogue.STUDIES, "demo"):
        study = thinned(name, "quick")
        script = Outline.of(study, expand(study)[0])
        assert script.figures
        assert script.sentences
        assert study.title.endswith("(quick scale)")
    assert {name for group in GROUPS.values() for name in group} <= set(catalogue.STUDIES)


def test_epochs_and_dtype_of_ones_own():
    study = study_of("schedules", "paper", epochs=5)
    assert (study.epochs, study.screen.epochs, study.record) == (5, 5, 6)
    assert [study_of("fig2", scale, epochs=5).record for scale in ("quick", "paper")] == [5, 5]
    assert [study_of("fig3", "quick", epochs=n).record for n in (1, 20)] == [3, 10]
    assert study_of("averages", "paper", epochs=5).record == 2  # a number of its own
    with pytest.raises(ValueError, match="fig1 has no data set to go through; leave epochs out"):
        study_of("fig1", "quick", epochs=5)
    with pytest.raises(ValueError, match="fig2 trains in float32, leave dtype out"):
        study_of("fig2", "quick", dtype="float64")
    assert [study_of("fig1", "quick", device).dtype for device in ("cpu", "cuda")] == ["float32", "float64"]
    assert study_of("fig1", "quick", "cuda", "float32").dtype == "float32"


def test_what_the_notes_say_of_messages_is_what_rules_send():
    send = {name: sum(vectors(rules.make(name, lr=0.1))) for name in ("dsgd", "d2", "gt", "dat", "dat-d2", "dat-gt")}
    assert send == {"dsgd": 1, "d2": 1, "gt": 2, "dat": 2, "dat-d2": 2, "dat-gt": 3}
    note = content_of("beyond", "quick")["notes"][-1]
    assert "dsgd and d2 send one vector per round, gt, dat and dat-d2 two, dat-gt three" in note
    assert "dat and dat-d2 send twice as much as their bases, dat-gt 1.5 times" in note


@pytest.mark.slow
def test_what_one_study_has_run_the_other_finds():
    """The learning rates on the ring of 16 are chosen by `averages` already."""
    study = study_of("schedules", "paper")
    with Store(":memory:") as store:
        short = screened(study, expand(study)[0], store).short
    ring = {case.key for case in short if (case.topology, case.nodes) == ("ring", 16)}
    assert ring <= {case.key for case in expand(study_of("averages", "paper"))[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name, least, most", [("local-steps", 700e6, 1.4e9), ("images-channels", 400e6, 500e6)])
def test_image_studies_fit_their_budgets(name, least, most):
    study = study_of(name, "paper", "cuda")
    cases, left_out = expand(study)
    full = len(cases_of(name)) * len(study.seeds) * study.epochs
    short = len(cases) // len(study.seeds) * study.screen.epochs
    assert not left_out
    assert least < 60_000 * (full + short) < most  # samples
    assert len(cases_of(name, "quick")) <= 20


@pytest.mark.slow
def test_the_language_study_fits_its_budget():
    done, trained = set(), 0
    for name in GROUPS["language"]:
        study = study_of(name, "paper", "cuda")
        cases = expand(study)[0]
        chosen = {place(case): case.lr for case in cases}  # any one: all seeds run it
        needed = [c for c in cases if c.seed in study.screen.seeds or c.lr == chosen[place(c)]]
        missing = [case for case in needed if case.key not in done]
        done |= {case.key for case in missing}
        options = missing[0].problem_settings
        trained += sum(case.nodes * case.steps for case in missing) * options["batch"] * options["context"]
        models = max(sum(case.nodes for case in batch.cases) for batch in pack(missing, "cuda"))
        numbers = 12 * models * problems.Language.dim_of(8, **missing[0].problem_options)
        assert numbers <= most_numbers(missing[0], "cuda")
        grids = {}
        for case in cases:
            grids.setdefault(place(case), set()).add(case.lr)
        assert min(map(len, grids.values())) >= 3  # every grid has an inside
    assert trained / 4.2e6 < 60 * 25  # bytes per second that three processes train on an H200; seconds
