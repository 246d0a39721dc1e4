"""Studies: what a file may say, which runs it means, how they are packed, and that only missing ones are done."""

import dataclasses
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.study import Store, execute, expand, load, parse, run_study, summarize, workers
from klatsch.study.batches import pack, run_batch
from tests.support.comparisons import assert_same_to_rounding

SMALL = {
    "steps": 60,
    "nodes": [4, 6],
    "seeds": 2,
    "lr": [0.001, 0.01],
    "record": 3,
    "rules": ["dat", {"name": "dsgd", "momentum": [0.0, 0.5]}],
    "topologies": ["ring", {"name": "base_graph", "k": 2}],
    "problem": {"dim": 5, "noise": [1.0, 10.0]},
}


def study(**changes):
    return parse({**SMALL, **changes})


# --- what a study may say -------------------------------------------------------------------------------------------

FILE = """
name = "mine"
steps = 60
nodes = [4, 6]
seeds = [3, 5]
lr = 0.01
topologies = ["ring", { name = "base_graph", k = 2 }]
dtype = "float32"

[problem]
name = "least-squares"
noise = [1.0, 10.0]

[[rules]]
name = "dat"
order = ["atc", "cta"]

[[rules]]
name = "d2"
lr = [1e-4, 1e-3]
"""


def test_a_file_says_what_to_run(tmp_path):
    (tmp_path / "s.toml").write_text(FILE + "\n")
    found = load(tmp_path / "s.toml")
    assert (found.name, found.steps, found.seeds, found.lr, found.dtype) == ("mine", 60, (3, 5), (0.01,), "float32")
    with pytest.raises(ValueError, match=r"d2 on base_graph\(k=2\).*leave_out = true"):
        expand(found)
    cases, left_out = expand(found.model_copy(update={"leave_out": True}))
    assert {item.nodes for item in left_out} == {4, 6}
    # dat: 2 graphs x 2 noises x 2 sizes x 2 orders x 2 seeds; d2: 1 graph x 2 noises x 2 sizes x 2 rates x 2 seeds
    assert len(cases) == 32 + 16
    assert {case.label for case in cases} == {"dat (atc)", "dat (cta)", "d2"}
    assert {case.lr for case in cases if case.rule == "d2"} == {1e-4, 1e-3}


WRONG = {
    "unknown key": ("stpes = 3\n", "s.toml: unknown key 'stpes'; did you mean steps? There are nodes, rules"),
    "scales": ("[scales.quick]\nsteps = 3\n", "s.toml: scales are for studies that come with klatsch"),
    "unknown rule": ('rules = ["adam"]\n', "s.toml: rules[0]: unknown rule 'adam'"),
    "unknown option": (
        'rules = [{ name = "dat", speed = 3 }]\n',
        "rules[0]: dat has no option 'speed'; it takes lr, order",
    ),
    "wrong value": (
        'rules = [{ name = "dat", momentum = [0.5, 1.5] }]\n',
        "momentum = 1.5; give a number from 0 up to",
    ),
    "wrong order": ('rules = [{ name = "dat", order = "up" }]\n', "order = 'up'; choose atc"),
    "unknown graph": ('topologies = ["rnig"]\n', "topologies[0]: unknown topology 'rnig'; did you mean ring?"),
    "graph's option": ('topologies = [{ name = "ring", k = 3 }]\n', "ring has no option 'k'; it takes every"),
    "graph's nodes": ('topologies = [{ name = "ring", nodes = [4, 5] }]\n', "ring has nodes = 5, which the study does"),
    "nodes of no graph": ('nodes = [4, 9]\ntopologies = [{ name = "ring", nodes = 4 }]\n', "nodes = 9: no graph of"),
    "unknown problem": ('[problem]\nname = "lasso"\n', "problem: unknown problem 'lasso'"),
    "problem's option": ("[problem]\nspeed = 1\n", "problem: least-squares has no option 'speed'; it takes dim"),
    "problem's value": ("[problem]\nnoise = -1\n", "problem: noise = -1; give 0 or a positive number"),
    "problem's seed": ("[problem]\nseed = 1\n", "least-squares has no option 'seed'"),
    "empty grid": ("lr = []\n", "lr = []; the list is empty, give at least one entry"),
    "empty rules": ("rules = []\n", "rules = []; the list is empty"),
    "empty option": ('rules = [{ name = "dat", order = [] }]\n', "rules[0]: order = []; the list is empty"),
    "number for a rule": ("rules = [3]\n", "rules[0] = 3; give a name, or a table with a name and options"),
    "misspelt and so missing": ("setps = 5\nsteps_ = 3\n", "unknown key 'setps'; did you mean steps?"),
    "wrong rate": ("lr = [0.1, -1.0]\n", "lr = -1.0; give a number above 0"),
    "text for a number": ('lr = "fast"\n', "lr = 'fast'; give a number above 0"),
    "yes for a rate": ("lr = true\n", "lr = True; give a number above 0"),
    "list in a list": (
        "[problem]\nnoise = [[1.0, 2.0]]\n",
        "noise = [1.0, 2.0]; give a value, or a flat list of values",
    ),
    "table for a value": ("topologies = [{ name = 'base_graph', k = { a = 1 } }]\n", "k = {'a': 1}; give a value"),
    "lazy problem": ("[problem]\nlazy = true\n", "least-squares has no option 'lazy'"),
    "endless record": ("record = 1000000000000\n", "record = 1000000000000; give a whole number from 1 to 10000"),
    "endless problem": ("[problem]\ndim = 10000000\n", "least-squares with {'dim': 10000000} cannot be built"),
    "half a node": ("nodes = [4, 2.5]\n", "s.toml: nodes = 2.5; give a whole number from 1 up"),
    "no steps": ("steps = 0\n", "s.toml: steps = 0; give a whole number from 1 up"),
    "yes for a number": ("steps = true\n", "steps = True"),
    "no seeds": ("seeds = 0\n", "seeds = 0; give a whole number from 1 to 100000"),
    "wrong seeds": ("seeds = [1, -2]\n", "seeds = -2; give how many, or a list of whole numbers from 0 up"),
    "wrong dtype": ('dtype = "float16"\n', 'dtype = \'float16\'; give "float64" or "float32"'),
    "number for a clock": ("[clocks]\nlr = 5\n", "clocks.lr = 5; give tables, as in docs/studies.md"),
    "no toml": ("steps = = 3\n", "cannot be read as TOML"),
    "size": ("nodes = [4, 7]\ntopologies = ['torus']\n", "s.toml: torus"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_file_names_file_key_value_and_remedy(case, tmp_path, run_cli):
    text, words = WRONG[case]
    given = {line.split(" ")[0] for line in text.splitlines()}
    rest = {
        "steps": "steps = 10",
        "nodes": "nodes = [4]",
        "rules": 'rules = ["dat"]',
        "topologies": 'topologies = ["ring"]',
    }
    head = "\n".join(line for key, line in rest.items() if key not in given)
    file = tmp_path / "s.toml"
    file.write_text(f"{head}\n{text}")
    code, out, err = run_cli("run", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
    assert words.removeprefix("s.toml: ") in err
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


def test_what_is_missing_is_said(tmp_path, run_cli):
    (tmp_path / "s.toml").write_text('steps = 10\nrules = ["dat"]\ntopologies = ["ring"]\n')
    assert "nodes is missing" in run_cli("run", tmp_path / "s.toml")[2]
    code, _, err = run_cli("run", tmp_path / "nowhere.toml")
    assert code == 2
    assert "there is no file" in err
    (tmp_path / "picture.toml").write_bytes(b"\x89PNG\xff\xfe")
    assert "cannot be read as TOML" in run_cli("run", tmp_path / "picture.toml")[2]


def test_plain_mistakes_in_python_are_told():
    with pytest.raises(ValueError, match=r"study is a dict; make one with study.parse"):
        run_study(SMALL)
    with pytest.raises(ValueError, match=r"'x.toml' is not a study; give a dictionary, or load\(file\)"):
        parse("x.toml")
    assert study(problem="logistic").problem.name == "logistic"


def test_options_do_not_go_with_a_file(tmp_path, run_cli):
    (tmp_path / "s.toml").write_text("")
    code, _, err = run_cli("run", tmp_path / "s.toml", "--steps", 5)
    assert code == 2
    assert "--steps does not go with a study file" in err


# --- which runs it means --------------------------------------------------------------------------------------------


def test_a_key_knows_everything_that_determines_a_result():
    keys = {case.key for case in expand(study())[0]}
    assert len(keys) == len(expand(study())[0]) == 2 * 2 * 2 * (1 + 2) * 2 * 2
    for change in (
        {"steps": 61},
        {"record": 4},
        {"dtype": "float32"},
        {"seeds": [7, 8]},
        {"lr": [0.5]},
        {"nodes": [8]},
    ):
        assert not keys & {case.key for case in expand(study(**change))[0]}, change
    assert {case.key for case in expand(study(device="cuda"))[0]} == keys  # the device changes rounding only
    assert {case.key for case in expand(study(name="other", any_graph=True))[0]} == keys
    plain = {"rules": ["dat"], "topologies": ["ring"], "problem": {}}
    keys = {case.key for case in expand(study(**plain))[0]}
    for change in (
        {"rules": [{"name": "dat", "order": "cta"}]},
        {"rules": [{"name": "dat", "averaging": "linear"}]},
        {"rules": [{"name": "dat", "beta": 0.9}]},
        {"rules": ["dat-gt"]},
        {"topologies": [{"name": "ring", "lazy": True}]},
        {"topologies": ["complete"]},
        {"problem": {"heterogeneity": 2.0}},
        {"problem": {"dim": 7}},
        {"problem": {"name": "logistic"}},
    ):
        assert not keys & {case.key for case in expand(study(**{**plain, **change}))[0]}, change


def test_a_graph_may_have_some_of_the_sizes_only():
    cases, _ = expand(study(topologies=["ring", {"name": "torus", "nodes": 4}]))
    assert {(case.topology, case.nodes) for case in cases} == {("ring", 4), ("ring", 6), ("torus", 4)}
    everywhere = expand(study(topologies=["ring", "torus"], leave_out=True))[0]
    assert {case.key for case in cases} < {case.key for case in everywhere}


def test_seeds_are_told_apart_however_large():
    large = 1 << 60
    cases, _ = expand(study(seeds=[large, large + 1, large + 2]))
    assert len(cases) == 144
    assert {case.seed for case in cases} == {large, large + 1, large + 2}


def test_a_default_written_out_is_the_same_run():
    short = expand(study(rules=["dat"], problem={}))[0]
    long = expand(
        study(
            rules=[{"name": "dat", "order": "atc", "averaging": "constant", "momentum": 0}],
            problem={"name": "least-squares", "dim": 50, "noise": 1, "heterogeneity": 1.0},
        )
    )[0]
    assert [case.key for case in short] == [case.key for case in long]


def test_sizes_that_do_not_fit_are_refused_or_left_out():
    with pytest.raises(ValueError, match=r"torus.*leave_out = true"):
        expand(study(nodes=[4, 7], topologies=["torus"]))
    cases, left_out = expand(study(nodes=[4, 7], topologies=["torus"], leave_out=True))
    assert {case.nodes for case in cases} == {4}
    assert [item.nodes for item in left_out] == [7]
    with pytest.raises(ValueError, match="torus") as refusal:
        expand(study(nodes=[7], topologies=["torus"], leave_out=True))
    assert "leave_out" not in str(refusal.value)  # it would not help


# --- how they are packed --------------------------------------------------------------------------------------------


def test_what_shares_a_problem_instance_is_one_batch():
    cases, _ = expand(study())
    batches = pack(cases, "cpu")
    # graph, size, seed and rule make a batch; learning rates, momenta and noises are its columns
    assert len(batches) == 2 * 2 * 2 * 2
    assert {len(batch.cases) for batch in batches} == {4, 8}
    assert sorted(case.key for batch in batches for case in batch.cases) == sorted(case.key for case in cases)
    assert [batch.key for batch in pack(cases, "cpu")] == [batch.key for batch in batches]
    assert len(pack(cases, "cuda")) == 2 * 2  # sizes and seeds share a stack


@pytest.mark.slow
def test_a_batch_gives_what_each_run_gives_alone():
    entries = [{"name": "dsgd", "momentum": [0.0, 0.5]}, {"name": "dat", "averaging": "linear"}]
    cases, _ = expand(study(rules=entries, nodes=6, seeds=[1]))
    for batch in pack(cases, "cpu"):
        for case, outcome in zip(batch.cases, run_batch(batch), strict=True):
            problem = problems.LeastSquares(case.nodes, seed=case.seed, **case.problem_options)
            graph = tp.make(case.topology, case.nodes, **case.topology_options)
            alone = klatsch.simulate(problem, rules.make(case.rule, **case.rule_options), graph, 60, record=3)
            assert outcome.steps.tolist() == alone.steps
            for name, values in alone.metrics.items():
                np.testing.assert_allclose(outcome.metrics[name], values[:, 0], rtol=1e-9, atol=1e-14)


@pytest.mark.slow
def test_a_stack_for_a_gpu_gives_the_same():
    cases, _ = expand(study())
    expected = {}
    for batch in pack(cases, "cpu"):
        expected |= {
            case: outcome.metrics["distance"] for case, outcome in zip(batch.cases, run_batch(batch), strict=True)
        }
    for batch in pack(cases, "cuda"):
        for case, outcome in zip(batch.cases, run_batch(dataclasses.replace(batch, device="cpu")), strict=True):
            np.testing.assert_allclose(outcome.metrics["distance"], expected[case], rtol=1e-9)


def test_stacks_are_cut_where_the_common_period_is_long():
    wide = study(topologies=["one_peer_exponential"], nodes=[4, 9, 25, 49, 100, 256], rules=["dat"], seeds=1)
    sizes = [sorted(network[0].nodes for network in batch.networks) for batch in pack(expand(wide)[0], "cuda")]
    assert sizes == [[4, 9, 25, 49, 100], [256]]  # periods 2, 4, 5, 6, 7: 420 rounds; with 8 they would be 840


@pytest.mark.slow
def test_problems_without_columns_are_batches_too():
    found = run_study(
        study(problem={"name": "logistic", "batch": [1, 4]}, rules=["dat"], topologies=["ring"], lr=[0.1, 0.5]),
        executor=workers.threads,
    )
    assert len(found.rows) == 2 * 2
    assert len({row.value for row in found.rows}) == 4
    assert all(np.isfinite(row.value) for row in found.rows)


# --- only what is missing -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_running_again_does_nothing_and_an_addition_only_itself(tmp_path):
    path = tmp_path / "s.sqlite"

    def new(**changes):
        return run_study(study(**changes), path, executor=workers.threads).progress.runs_done

    assert new() == 96
    assert new() == 0
    assert new(seeds=3) == 48
    assert new(seeds=3, lr=[0.001, 0.01, 0.05]) == 72
    assert new(lr=[0.05]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["s.sqlite"]


@pytest.mark.slow
def test_a_batch_that_lacks_a_few_runs_does_only_those(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        cases, _ = expand(study())
        some = [case for k, case in enumerate(cases) if k % 3]
        assert execute(some, store, executor=workers.threads).runs_done == len(some)
        assert execute(cases, store, executor=workers.threads).runs_done == len(cases) - len(some)
        whole = run_study(study(), executor=workers.threads).rows
        for row, other in zip(summarize([(case.key, case) for case in cases], store), whole, strict=True):
            np.testing.assert_allclose(row.curves, other.curves, rtol=1e-9)


def test_rows_are_ordered_and_choose_by_the_mean_over_seeds():
    found = run_study(study(), executor=workers.threads)
    keys = [(row.topology, row.setting["noise"], row.nodes, row.rule) for row in found.rows]
    rules = ["dat", "dsgd (momentum 0)", "dsgd (momentum 0.5)"]
    assert keys == [
        (topology, noise, nodes, rule)
        for topology in ("ring", "base_graph (k 2)")
        for noise in (1.0, 10.0)
        for nodes in (4, 6)
        for rule in rules
    ]
    for row in found.rows:
        assert row.curves.shape == (2, len(row.steps), 2)
        assert row.lr == row.lrs[row.final.mean(axis=0).argmin()]


@pytest.mark.slow
def test_schedules_are_part_of_a_rule():
    """Each has a row and keys of its own, a rule may have others than the study, and constant is what it always was."""
    common = {"steps": 30, "nodes": 4, "seeds": 1, "lr": [1e-3, 3e-3], "topologies": "ring"}
    dat = {"name": "dat", "schedule": "linear"}
    found = run_study(parse({**common, "rules": ["dsgd", dat], "schedule": ["constant", "cosine"]}))
    assert [row.rule for row in found.rows] == ["dsgd", "dsgd (cosine)", "dat (linear)"]
    problem, graph = problems.LeastSquares(4), tp.ring(4)
    for row, name, schedule in zip(found.rows, ("dsgd", "dsgd", "dat"), ("constant", "cosine", "linear"), strict=True):
        for k, lr in enumerate(row.lrs):
            rule = rules.make(name, lr=rules.Decay(lr, schedule, 30))
            expected = klatsch.simulate(problem, rule, graph, 30).metrics["distance"][-1]
            assert row.final[0, k] == pytest.approx(float(expected), rel=1e-9)
    before = expand(parse({**common, "rules": "dsgd"}))[0]
    keys = [case.key for case in expand(parse({**common, "rules": "dsgd", "schedule": ["cosine", "constant"]}))[0]]
    assert {case.key for case in before} < set(keys)
    assert len(set(keys)) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_heard_where_python_drops_exceptions():
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with workers.ctrl_c_kept() as check:
            check()
            Interrupted()  # dropped here
            with pytest.raises(KeyboardInterrupt):
                check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.processes
def test_any_executor_will_do(tmp_path):
    few = {"topologies": ["ring"], "seeds": 1}
    reference = run_study(study(**few), executor=workers.threads).rows
    with ThreadPoolExecutor(2) as pool:
        rows = run_study(study(**few), tmp_path / "t.sqlite", executor=pool).rows
    assert_same_to_rounding([row.value for row in rows], [row.value for row in reference])
    with ProcessPoolExecutor(1, mp_context=__import__("multiprocessing").get_context("spawn")) as pool:
        rows = run_study(study(**few, nodes=4), tmp_path / "p.sqlite", executor=pool).rows
    assert_same_to_rounding([row.value for row in rows], [row.value for row in reference if row.nodes == 4])


@pytest.mark.slow
def test_progress_tells_batches_pace_time_left_and_the_best():
    told = []
    run_study(study(), executor=workers.threads, told=lambda p: told.append(dataclasses.replace(p)))
    first, last = told[0], told[-1]
    assert (first.batches, first.runs, first.batches_done, first.seconds_left) == (16, 96, 0, None)
    assert [p.batches_done for p in told] == list(range(17))
    assert (last.runs_done, last.work_done, last.seconds_left) == (96, last.work, 0)
    error, case = last.best
    best = min(float(row.final.min()) for row in run_study(study(), executor=workers.threads).rows)
    assert error == pytest.approx(best, rel=1e-9)
    assert case.rule in ("dat", "dsgd")


def test_after_an_error_nothing_more_is_begun_in_somebody_elses_executor(monkeypatch):
    begun, over = [], threading.Event()

    def failing(batch, *_):
        begun.append(batch)
        if len(begun) > 1:
            over.wait(60)  # so that however slow the driver is, the others have not begun yet
        raise ValueError("no luck")

    monkeypatch.setattr(workers, "run_batch", failing)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="no luck"):
            run_study(study(), executor=pool)
        over.set()
    assert len(begun) <= 2  # of 16: one failed, one may have been on its way


@pytest.mark.slow
def test_a_batch_that_fails_stops_the_study_and_keeps_what_is_done(tmp_path, monkeypatch):
    real, calls = workers.run_batch, []

    def failing(batch, *rest):
        calls.append(batch)
        if len(calls) == 4:
            raise ValueError("no luck")
        return real(batch, *rest)

    monkeypatch.setattr(workers, "run_batch", failing)
    with pytest.raises(ValueError, match="no luck"):
        run_study(study(), tmp_path / "s.sqlite", executor=lambda: workers.threads(1))
    with Store(tmp_path / "s.sqlite") as store:
        kept = len(store.done())
    assert 0 < kept < 96
    monkeypatch.setattr(workers, "run_batch", real)
    assert run_study(study(), tmp_path / "s.sqlite", executor=workers.threads).progress.runs_done == 96 - kept


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")])
def test_what_does_not_fit_into_memory_is_one_line(error, monkeypatch):
    def failing(*_):
        raise error

    monkeypatch.setattr(workers, "run_batch", failing)
    with pytest.raises(ValueError, match=r"with up to \d nodes and 4 columns does not fit in memory; use fewer"):
        run_study(study(rules=["dat"]), executor=workers.threads)


def test_a_bug_is_shown_as_one(monkeypatch):
    def failing(*_):
        raise RuntimeError("index 3 is out of bounds")

    monkeypatch.setattr(workers, "run_batch", failing)
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_study(study(), executor=workers.threads)


@pytest.mark.slow
def test_two_threads_of_one_process_may_share_a_store(tmp_path):
    """And three processes: see test_store_faults."""
    path, errors = tmp_path / "s.sqlite", []

    def run():
        try:
            run_study(study(), path, executor=workers.threads)
        except Exception as error:
            errors.append(error)

    pair = [threading.Thread(target=run) for _ in range(2)]
    for thread in pair:
        thread.start()
        time.sleep(0.05)
    for thread in pair:
        thread.join()
    assert not errors
    with Store(path) as store:
        assert len(store.done()) == len(store.runs()) == 96


def test_a_rule_may_have_graphs_of_its_own(in_threads):
    content = {"nodes": 4, "steps": 20, "seeds": 2, "lr": [1e-3, 1e-2], "topologies": ["ring", "torus"]}
    baseline = {"name": "dsgd", "topologies": ["complete", "ring"]}
    cases, _ = expand(grid := parse({**content, "rules": ["dat", baseline]}))
    pairs = [(case.topology, case.rule) for case in cases]
    assert list(dict.fromkeys(pairs)) == [("ring", "dat"), ("ring", "dsgd"), ("torus", "dat"), ("complete", "dsgd")]
    alone, _ = expand(parse({**content, "rules": ["dsgd"], "topologies": ["complete"]}))
    assert {case.key for case in alone} < {case.key for case in cases}  # the same runs, however they are asked for
    with Store(":memory:") as store:
        assert len(run_study(grid, store).rows) == 4
        assert [case.key for case in expand(store.studies()[0].study)[0]] == [case.key for case in cases]


def test_graphs_of_a_rule_are_checked_like_the_study_s():
    content = {"nodes": 4, "steps": 20, "topologies": ["ring"]}
    with pytest.raises(ValueError, match=r"rules\[0\].topologies\[0\].*unknown topology 'rng'; did you mean ring"):
        parse({**content, "rules": [{"name": "dat", "topologies": ["rng"]}]})
    with pytest.raises(ValueError, match="the list is empty"):
        parse({**content, "rules": [{"name": "dat", "topologies": []}]})


def test_a_study_needs_graphs_that_some_rule_uses():
    content = {"nodes": 4, "steps": 20}
    baseline = {"name": "dsgd", "topologies": "complete"}
    assert [case.topology for case in expand(parse({**content, "rules": [baseline], "seeds": 1, "lr": 0.1}))[0]] == [
        "complete"
    ]
    with pytest.raises(ValueError, match="topologies is missing; give it"):
        parse({**content, "rules": ["dat", baseline]})
    with pytest.raises(ValueError, match="every rule has graphs of its own, and none uses these; leave them out"):
        parse({**content, "rules": [baseline], "topologies": "ring"})
    with Store(":memory:") as store:
        store.remember(parse({**content, "rules": [baseline]}))
        assert store.studies()[0].study.topologies == ()


def test_a_rule_of_your_own_leaves_the_study_s_words_alone(tmp_path):
    for word in ("schedule", "topologies"):
        file = tmp_path / f"{word}.py"
        file.write_text(f"from klatsch import rules\n\n\ndef mine(lr, {word}=1):\n    return rules.make('dsgd', lr)\n")
        with pytest.raises(ValueError, match=f"has an option {word}, which is the study's word; give it another name"):
            parse({"nodes": 4, "steps": 20, "rules": f"{file}:mine", "topologies": "ring"})
