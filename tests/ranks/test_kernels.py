"""Updates as kernels: what they would compute on a GPU, run on the CPU; and on a GPU, where there is one."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import klatsch
from klatsch.ranks import kernels
from klatsch.wire.program import NotTraceableError
from tests.support.imitation import Kernel
from tests.support.processes import Ranks
from tests.support.rank_scenarios import PATTERNS, RANK_RULES, ROUNDS, lr_of, problem_of

PARTS = (*PATTERNS, "dat linear momentum", "dadam cta v decay", "dat-d2-adam local", "gt-adam", "qg")
EVERYTHING = dict.fromkeys(PARTS, ("ring/4",)) | {"dat": ("one_peer_exponential",), "decentlam": ("ring",)}
# Muon needs whole matrices, and runs operation by operation.
REST = dict.fromkeys(RANK_RULES.keys() - EVERYTHING.keys() - {"muon"}, ("ring/4",))
SOME = dict.fromkeys(("dat cta beta", "dat-d2 beta", "dat-adam", "dadam cta shared", "sgp"), ("ring",))
NEEDED = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "device, cases",
    [
        ("cpu", EVERYTHING),
        pytest.param("cpu", REST, marks=pytest.mark.soak),
        pytest.param("cuda", SOME, marks=NEEDED),
    ],
)
def test_kernels_compute_what_the_rules_say(tmp_path, launch, device, cases):
    """To 1e-4, in float32, where steps add up to 0.1 and more; what Adam divides by may be small."""
    launch(4, "parity", device=device, cases=cases, kernels=True).succeed()
    ranks = [torch.load(tmp_path / f"parity-{rank}") for rank in range(4)]
    assert len(ranks[0]) >= len(cases)
    for case in ranks[0]:
        label, name = case.split(" | ")
        rule, options = RANK_RULES[label]
        algorithm, graph = klatsch.rules.make(rule, lr=lr_of(label), **options), klatsch.topology.make(name, 4)
        expected = klatsch.simulate(problem_of(4), algorithm, graph, ROUNDS, record=1, engine="torch")
        for rank, found in enumerate(ranks):
            x, output = found[case].double()
            torch.testing.assert_close(x, algorithm.query(expected.state)[rank, 0], rtol=0, atol=1e-4)
            torch.testing.assert_close(output, expected.output[rank, 0], rtol=0, atol=1e-4)


SEVERAL = ("dsgd", "dat cta beta", "gt", "d2", "dadam cta shared", "dat-adam v decay")


@pytest.mark.soak
@pytest.mark.parametrize(
    "rules, travel",
    [
        (SEVERAL, {"wire": "bfloat16"}),
        (SEVERAL, {"wire": "int8"}),
        (("dsgd", "dat", "gt"), {"late": 1}),
        (("dsgd", "dat cta beta", "gt"), {"late": 1, "every": 2, "wire": "int8"}),
    ],
)
def test_channels_go_with_kernels(tmp_path, prepared, rules, travel):
    """As without kernels: to rounding, as what is sent is rounded alike."""
    ends = []
    for kernels_too in (True, False):
        folder, cases = tmp_path / str(kernels_too), dict.fromkeys(rules, ("ring",))
        Ranks(prepared, folder, 4, "parity", cases=cases, kernels=kernels_too, **travel).succeed()
        ends.append([torch.load(folder / f"parity-{rank}") for rank in range(4)])
    for with_kernels, without in zip(*ends, strict=True):
        assert len(without) == len(rules)
        for label, end in without.items():
            torch.testing.assert_close(with_kernels[label].double(), end, rtol=0, atol=3e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDED)])
@pytest.mark.parametrize("on_failure", ["raise", "continue"])
def test_kernels_refuse_what_is_not_finite(tmp_path, launch, on_failure, device):
    """They have written the next state by then, but the round has not happened, or has without that neighbour."""
    ranks = launch(5, "rank_hardships.nonsense", on_failure=on_failure, device=device)
    codes = ranks.codes()
    found = [torch.load(tmp_path / f"end-{rank}") for rank in range(5)]
    for rank in (0, 1, 3, 4):
        assert bool(torch.isfinite(found[rank]["x"]).all())
    if on_failure == "raise":
        assert 1 in codes
        assert any("neighbour 2 has sent numbers that are not finite" in ranks.errors(rank) for rank in (1, 3))
        for rank in (1, 3):
            assert found[rank]["rounds"] == 9
            assert torch.equal(found[rank]["x"], found[rank]["before"])  # bits: a copy
    else:
        assert [code for rank, code in enumerate(codes) if rank != 2] == [0] * 4, ranks.errors(1)
        assert [found[rank]["lost"] for rank in (0, 1, 3, 4)] == [(), (2,), (2,), ()]


def with_and_without(monkeypatch, rule, gradient, rounds):
    """Where a rule ends, with kernels and without."""
    ends = []
    monkeypatch.setattr(kernels, "compiled", Kernel)
    for there in (True, False):
        monkeypatch.setattr(kernels, "available", lambda device, there=there: there)
        x = torch.nn.Parameter(torch.zeros(3))
        optimizer = klatsch.Gossip([x], rule, "ring")
        for _ in range(rounds):
            x.grad = gradient.clone()
            optimizer.step()
        ends.append(x.detach().clone())
    return ends


def test_a_field_that_is_no_symbol_is_written_last(alone, monkeypatch):
    """A rule may count in one number, where the kernel still reads what was there."""

    @dataclass(frozen=True, eq=False)
    class Counting(klatsch.rules.Plain):
        name = "counting"

        def init(self, x):
            return {"w": x, "k": x.new_zeros(1)}

        def update(self, s, grad, flow, t, lr):
            (w,) = flow.mix(s["w"] - grad * lr + s["k"])
            return {"w": w, "k": torch.full((1,), float(t))}

    ends = with_and_without(monkeypatch, Counting(0.1), torch.ones(3), rounds=3)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("power", [lambda g: g**3, lambda g: abs(g) * g * g, lambda g: g * (g == 1)])
def test_rules_that_kernels_do_not_know_run_as_they_are(alone, monkeypatch, power):
    @dataclass(frozen=True, eq=False)
    class Odd(klatsch.rules.Plain):
        name = "odd"

        def update(self, s, grad, flow, t, lr):
            return {"w": flow.mix(s["w"] - power(grad) * lr)[0]}

    ends = with_and_without(monkeypatch, Odd(0.1), torch.tensor([1.0, 2.0, -3.0]), rounds=1)
    assert torch.equal(*ends)  # bits: same call
    assert ends[0].abs().max() > 0.05


def test_a_script_reads_first_and_writes_last(monkeypatch):
    monkeypatch.setattr(kernels, "compiled", Kernel)
    a, b, scale = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]), torch.tensor([10.0])
    script = kernels.Script()
    x, y = script.symbol(a), script.symbol(b)
    assert script.symbol(a).known == x.known
    b.copy_(x)
    a.copy_(torch.sqrt((2.0 - y / 4.0).abs()).add_(y, alpha=0.5).clamp(min=-1.0) * scale)
    script.run()
    torch.testing.assert_close(b, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(a, 10 * torch.tensor([1.25**0.5 + 1.5, 3.0**0.5 - 2.0]))


def test_what_a_kernel_has_written_the_next_one_reads(monkeypatch):
    """Not what that was computed from, which it does not need."""
    monkeypatch.setattr(kernels, "compiled", Kernel)
    w, g, u, heard = (torch.tensor([1.0, float(k)]) for k in range(4))
    formulas = kernels.Formulas()
    first, second = kernels.Script(formulas), kernels.Script(formulas)
    for script in (first, second):
        step = script.symbol(w) - script.symbol(g) * 0.5
        u.copy_(step)
        if script is second:
            w.copy_(torch.lerp(step, script.symbol(heard), 0.25))
        script.run()
    assert [id(v) for v in second.vectors] == [id(w), id(u), id(heard)]
    torch.testing.assert_close(w, torch.lerp(torch.tensor([0.5, -0.5]), heard, 0.25))


@pytest.mark.parametrize(
    "work, wrong",
    [
        (lambda x, a: a.copy_(x.sum()), "sum of a vector"),
        (lambda x, a: torch.cumsum(x, 0), "cumsum of a vector"),
        (lambda x, a: x.clamp(max=1.0), "clamp of a vector"),
        (lambda x, a: x + torch.ones(2, 2), "a Tensor"),
        (lambda x, a: x + torch.ones(4)[::2], "a vector with gaps"),
        (lambda x, a: a.copy_(x + torch.ones(3)), "vectors of several lengths"),
        (lambda x, a: x + "1", "a str"),
        (lambda x, a: x == 1, "eq of a vector"),
        (lambda x, a: bool(x), "bool of a vector"),
        (lambda x, a: torch.stack([x, x]), "stack of vectors"),
        (lambda x, a: torch.ones(2).add_(x), "add_ of a vector"),
        (lambda x, a: x * torch.ones(2, dtype=torch.float64), "a vector of torch.float64"),
    ],
)
def test_what_is_not_elementwise_is_not_computed(work, wrong):
    a = torch.tensor([1.0, 2.0])
    script = kernels.Script()

    def compute():
        work(script.symbol(a), a)
        script.run()

    with pytest.raises(NotTraceableError, match=wrong):
        compute()
    assert a.tolist() == [1.0, 2.0]


def test_without_a_compiler_updates_run_operation_by_operation(alone, monkeypatch):
    def fail(self, *given, **options):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "compiled", Kernel)
    monkeypatch.setattr(Kernel, "launch", fail)
    ends = []
    for working in (True, False):
        monkeypatch.setattr(kernels, "available", lambda device, there=not working: there)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = klatsch.optim.GossipSGD(model.parameters(), lr=0.1)
        model(torch.ones(3)).sum().backward()
        if working:
            optimizer.step()
        else:
            with pytest.warns(RuntimeWarning, match="operation by operation.*Failed to find C compiler"):
                optimizer.step()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)  # bits: same call


def test_a_kernel_that_has_worked_may_fail_aloud(monkeypatch):
    a = torch.tensor([1.0, 2.0])

    def double():
        script = kernels.Script()
        a.copy_(script.symbol(a) * 2.0)
        script.run()

    monkeypatch.setattr(kernels, "compiled", Kernel)
    double()
    monkeypatch.setattr(Kernel, "launch", lambda *given, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        double()
    assert a.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "work",
    [
        lambda x, y: 2.0 - x,
        lambda x, y: 2.0 / x,
        lambda x, y: x - y / 3.0,
        lambda x, y: -torch.square(y),
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.maximum(x, y),
        lambda x, y: torch.sub(x, y, alpha=0.5),
    ],
)
def test_every_formula_is_what_torch_computes(work, monkeypatch):
    monkeypatch.setattr(kernels, "compiled", Kernel)
    a, b, target = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]), torch.zeros(2)
    script = kernels.Script()
    target.copy_(work(script.symbol(a), script.symbol(b)))
    script.run()
    torch.testing.assert_close(target, work(a, b))
