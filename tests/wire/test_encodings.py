"""Encodings of messages: what arrives, and that both ends hold the same."""

import pytest
import torch

import klatsch
from klatsch import encodings, own, problems, rules
from klatsch import topology as tp
from klatsch.encodings import BLOCK, quantized, restored
from klatsch.simulation.mixing import StackedMix
from klatsch.wire.carried import carried
from tests.support import signs
from tests.support.comparisons import assert_same_to_rounding
from tests.support.imitation import Address, blocks_of
from tests.support.machine import CUDA, KERNEL

SHAPES = [(1,), (255,), (256,), (257,), (3, 600), (2, 3, 1000)]


def spread(shape, dtype=torch.float64):
    """Numbers of very different sizes, block by block."""
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype) * 10.0 ** (torch.arange(shape[-1]) // BLOCK * 3 - 2).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_difference_is_restored_to_half_a_code(shape, dtype):
    v = spread(shape, dtype)
    codes, scales = quantized(v)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, v.shape, (*shape[:-1], -(-shape[-1] // BLOCK)))
    steps = scales.to(dtype).repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    # The largest number of a block may be cut by as much as its scale was rounded down: by 1 in 256.
    largest = v.abs().unfold(-1, 1, 1)[..., 0] / steps
    assert ((restored(codes, scales, dtype) - v).abs() <= steps * (0.5 + 127 / 256) + 1e-30).all()
    assert ((restored(codes, scales, dtype) - v).abs()[largest < 126] <= steps[largest < 126] * 0.501).all()
    assert codes.abs().amax() == 127


@pytest.mark.parametrize("outliers", [1, encodings.OUTLIERS])
def test_a_few_outliers_do_not_make_the_others_coarse(outliers):
    v = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0))
    v[: 20 * outliers : 20] = -1e4 * torch.arange(1, outliers + 1)
    v[21] = 1e2  # large beside the rest, if not beside these
    codes, scales = quantized(v)
    assert (scales < 0).tolist() == [True, False]
    wrong = (restored(codes, scales, v.dtype) - v).abs()
    assert (wrong <= 0.2 * v.abs())[v.abs() > 5].all()
    assert wrong[v.abs() < 2].max() < (5 if outliers < encodings.OUTLIERS else 1e2) / 127


def test_code_times_scale_is_exact():
    """So a fused multiplication and addition, which some machines use, rounds as two operations do."""
    v = spread((2000,), torch.float32)
    v[::100] *= 3e4  # blocks with outliers
    codes, scales = quantized(v)
    exact = restored(codes, scales, torch.float64)
    assert not (restored(codes, scales, torch.float32).double() - exact).any()


def test_differences_to_what_is_held_shrink():
    v, held = spread((1000,)), torch.zeros(1000, dtype=torch.float64)
    for _ in range(6):
        held = held + restored(*quantized(v - held), v.dtype)
    assert ((v - held).abs() <= 1e-12 * v.abs().max()).all()


def test_nothing_to_say_and_nothing_finite():
    codes, scales = quantized(torch.zeros(300))
    assert not codes.any()
    assert not scales.any()
    for wrong in (torch.nan, torch.inf):
        v = torch.ones(600)
        v[300] = wrong
        _, scales = quantized(v)
        assert torch.isfinite(scales).tolist() == [True, False, True]


def test_bfloat16_keeps_eight_bits():
    v = spread((1000,))
    arrived = encodings.of("bfloat16").arrives(v)
    assert ((arrived - v).abs() <= v.abs() / 256).all()
    assert arrived.dtype == v.dtype


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_says_what_torch_says(dtype):
    v = spread((7, 1300), dtype)
    v[1] = 0
    v[2, 300], v[3, 900] = torch.nan, torch.inf
    v[4] = torch.arange(1300) * 0.5  # in the middle between two codes
    v[5, ::90] *= 10.0 ** torch.arange(15)
    v[6, :256] = torch.arange(256) * 0.5  # between two codes, with outliers
    v[6, :4] = torch.tensor([112.0, 160.0, 2e4, 1e9])
    v = v.T.contiguous().T  # of which the kernel gets a copy
    (codes, scales), (wanted, steps) = quantized(v), encodings._quantized(v)
    assert torch.equal(scales.isfinite(), steps.isfinite())  # bits: whole numbers
    finite = steps.isfinite().repeat_interleave(BLOCK, -1)[:, :1300]
    assert torch.equal(codes[finite], wanted[finite])  # bits: whole numbers
    torch.testing.assert_close(scales[steps.isfinite()], steps[steps.isfinite()], rtol=2**-7, atol=0)  # one unit
    again, theirs = restored(codes, scales, dtype), encodings._restored(codes, scales, dtype)
    torch.testing.assert_close(again, theirs, equal_nan=True)
    assert (scales[5:] < 0).any()
    codes = torch.arange(-128, 128).to(torch.int8)
    for scale in (torch.tensor([0.5]).bfloat16(), torch.tensor([-0.5]).bfloat16()):
        assert torch.equal(restored(codes, scale, dtype), encodings._restored(codes, scale, dtype))  # bits: a copy


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_packs_as_torch_does(dtype):
    v = spread((7, 1301), dtype)  # the last byte has one code
    v[1] = 0
    v[2, 300], v[3, 900] = torch.nan, torch.inf
    v[4] = torch.arange(1301) * 0.5  # in the middle between two codes
    int4 = encodings.of("int4")
    (scales, pairs), (wanted, theirs) = int4.encode(v), encodings._packed(v)
    assert torch.equal(scales.isfinite(), wanted.isfinite())  # bits: whole numbers
    assert torch.equal(pairs[[0, 1, 4, 5, 6]], theirs[[0, 1, 4, 5, 6]])  # bits: whole numbers
    torch.testing.assert_close(scales, wanted, rtol=2**-7, atol=0, equal_nan=True)  # one unit
    again = encodings._unpacked(scales, pairs, 1301, dtype)
    assert_same_to_rounding(int4.decode([scales, pairs], 1301, dtype)[[0, 1, 4, 5, 6]], again[[0, 1, 4, 5, 6]])


def test_what_four_bits_miss_is_part_of_the_next_message():
    """To half a code of the block of 64, and the rest soon; numbers beside a far larger one wait for one message."""
    v = spread((1000,), torch.float64)
    v[5] = 1e4
    encoding, held = encodings.of("int4"), torch.zeros_like(v)
    largest = encodings._blocks(v, 64).abs().amax(-1).repeat_interleave(64)[:1000]
    assert ((encoding.arrives(v) - v).abs() <= largest / 14 * 1.07).all()  # its scale may be rounded down by 1 in 256
    for _ in range(12):
        held += encoding.arrives(v - held)
    assert ((held - v).abs() <= 1e-9 * largest).all()
    assert encoding.bytes(1_000_000) / 4_000_000 < 0.133


def sorted_form(difference):
    """`quantized` by the nine largest numbers of each block, as it reads in its docstring."""
    blocks, values = encodings._blocks(difference), encodings.STEEP.to(difference.dtype)
    top = blocks.abs().topk(encodings.OUTLIERS + 1).values
    most = rest = top[..., :1]
    for _ in range(encodings.TIMES):
        below = torch.where(top < rest / encodings.OUTLYING, top, 0.0).amax(-1, keepdim=True)
        rest = torch.where(below > 0, below, rest)
    steep, even = rest < most, encodings.EVEN
    scales = torch.where(steep, torch.maximum(most / values[127], rest / even), most / 127).bfloat16()
    steps = blocks / torch.where(scales > 0, scales, 1.0).to(blocks.dtype)
    between = (values[even:127] + values[even + 1 : 128]) / 2
    above = (even + torch.bucketize(steps.abs(), between)).to(blocks.dtype).copysign_(steps)
    codes = torch.where(steep & (steps.abs() >= even + 0.5), above, steps.round().clamp_(-127, 127))
    codes = codes.nan_to_num_(0.0).to(torch.int8).flatten(-2)[..., : difference.shape[-1]]
    return codes, torch.where(steep, -scales, scales)[..., 0]


def blocks_of_all_kinds(length, dtype):
    """Blocks with 0 to 12 outliers of several sizes, ties, zeros, tiny numbers, and some that are not finite."""
    draw = torch.Generator().manual_seed(length)
    v = torch.randn(13 * 30, length, generator=draw, dtype=dtype)
    for row, numbers in enumerate(v):
        places, kind = torch.randperm(length, generator=draw)[: row % 13], row // 13
        numbers[places] *= [20.0, 40.0, 1e3, 1e5, 1e12, 2.0**25][kind % 6]
        if kind % 5 == 1:
            numbers.copy_(numbers.sign() * 2.0 ** numbers.abs().log2().round())  # ties, and limits that are met
        elif kind % 5 == 2:
            numbers *= 1e-40 if dtype == torch.float32 else 1e-310
        elif kind % 5 == 3:
            numbers[torch.rand(length, generator=draw) < 0.97] = 0.0
        elif kind % 5 == 4:
            numbers[places[: row % 13 // 2]] *= 1e4  # outliers of outliers
    v[5], v[6, 0], v[7, :9], v[8, -1], v[9, 0], v[10] = 0.0, torch.inf, -torch.inf, torch.nan, torch.nan, torch.nan
    v[9, -1] = torch.inf
    ones = torch.tensor(-1, dtype=torch.int32 if dtype == torch.float32 else torch.int64)
    v[11, 0] = ones.view(dtype)  # as a GPU writes NaN
    return v


class Programs:
    """A kernel for a GPU, run program by program with torch on a CPU."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def run(*given, enable_fp_fusion):
            for program in range(*grid):
                encodings.tl = blocks_of(program)
                self.kernel(*(Address(v) if isinstance(v, torch.Tensor) else v for v in given))

        return run


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("length", [256, 4100, 7])
def test_the_kernels_of_a_gpu_say_what_torch_says(length, device, monkeypatch):
    """Of numbers, and of differences to what is held."""
    if device == "cpu":
        monkeypatch.setattr(encodings, "_compiled", Programs)
        monkeypatch.setattr(encodings, "tl", None)
    v = blocks_of_all_kinds(256, torch.float32).repeat(1, 17)[:, -length:].contiguous().to(device)
    held = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(device)
    for known in (None, held):
        wanted, steps = encodings._quantized(v if known is None else v - known)
        codes, scales = torch.empty_like(wanted).contiguous(), torch.empty_like(steps).contiguous()
        encodings._launch(encodings._quantize_blocks, v, known, codes, scales)
        finite = steps.isfinite()
        assert torch.equal(scales.isfinite(), finite)  # bits: whole numbers
        assert torch.equal(scales[finite], steps[finite])  # bits: whole numbers
        numbers = finite.repeat_interleave(BLOCK, -1)[:, :length]
        assert torch.equal(codes[numbers], wanted[numbers])  # bits: whole numbers
        again, said = torch.empty_like(v), encodings._restored(codes, scales, torch.float32)
        encodings._launch(encodings._restore_blocks, again, codes, scales, known)
        wanted = said if known is None else known + said
        torch.testing.assert_close(again, wanted, rtol=0, atol=0, equal_nan=True)  # bits: same call


@pytest.mark.parametrize("length", [256, 700, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_the_kernel_the_bits_are_those_of_the_sorted_form(dtype, length):
    v = blocks_of_all_kinds(length, dtype)
    (codes, scales), (wanted, steps) = encodings._quantized(v), sorted_form(v)
    assert torch.equal(codes, wanted)  # bits: whole numbers
    assert torch.equal(scales.view(torch.int16), steps.view(torch.int16))  # bits: whole numbers
    assert torch.equal(scales.isfinite(), encodings._blocks(v).isfinite().all(-1))  # bits: whole numbers
    assert (scales < 0).any()
    kernel, theirs = quantized(v)
    finite = steps.isfinite().repeat_interleave(BLOCK, -1)[:, :length]
    assert torch.equal(kernel[finite], codes[finite])  # bits: whole numbers
    torch.testing.assert_close(theirs[steps.isfinite()], steps[steps.isfinite()], rtol=2**-7, atol=0)  # one unit


def test_the_largest_one_after_the_other_are_those_of_a_sort():
    sizes = spread((3, 4, BLOCK)).abs()
    sizes[0, 0, 7], sizes[1, 2, 9] = torch.nan, torch.inf
    assert torch.equal(
        encodings._largest(sizes.clone(), 5, one_by_one=True), sizes.topk(5).indices
    )  # bits: whole numbers


# --- what every encoding has to do ----------------------------------------------------------------------------------

WIRES = [*encodings.BUILT_IN, "topk(0.001)", "topk(0.5)", signs.WIRE]


@pytest.mark.parametrize("wire", WIRES, ids=own.label)
def test_both_ends_hold_the_same_of_what_is_sent(wire, monkeypatch):
    """Also where so much is said at once that it is encoded in parts."""
    encoding = encodings.of(wire)
    for shape in SHAPES:
        v = spread(shape, torch.float32)
        types, lengths = zip(*encoding.streams(shape[-1]), strict=True)
        streams = [given.to(dtype) for given, dtype in zip(encoding.encode(v), types, strict=True)]
        assert [stream.shape for stream in streams] == [(*shape[:-1], length) for length in lengths]
        assert encoding.bytes(shape[-1]) * v[..., 0].numel() == sum(stream.nbytes for stream in streams)
        sent = [torch.frombuffer(bytearray(s.contiguous().view(torch.uint8).numpy()), dtype=s.dtype) for s in streams]
        there = encoding.decode([s.view(stream.shape) for s, stream in zip(sent, streams, strict=True)], *like(v))
        assert torch.equal(there, encoding.arrives(v))  # bits: a copy
        with monkeypatch.context() as patched:
            patched.setattr(encodings, "MOST_AT_ONCE", 1)
            assert_same_to_rounding(encoding.arrives(v), there)
        assert not encoding.arrives(0 * v).any()
        for wrong in (torch.nan, torch.inf):
            assert not encoding.arrives(v.index_fill(-1, torch.tensor([0]), wrong)).isfinite().all()


def like(v):
    return v.shape[-1], v.dtype


@pytest.mark.parametrize("wire", WIRES, ids=own.label)
def test_slices_are_encoded_as_the_whole_is(wire):
    encoding, v = encodings.of(wire), spread((1000,), torch.float32)
    parts = [v[:256], v[256:768], v[768:]]
    for stream, *pieces in zip(encoding.encode(v), *map(encoding.encode, parts), strict=True):
        assert torch.equal(torch.cat(pieces), stream)  # bits: same call
    assert sum(map(encoding.bytes, map(len, parts))) == encoding.bytes(len(v))


@pytest.mark.parametrize("wire", WIRES, ids=own.label)
@pytest.mark.parametrize("name", ["ring", "one_peer_exponential"])
def test_the_mean_is_kept_to_rounding_whatever_is_encoded(wire, name):
    """And nodes get nearer to each other."""
    graph, made = tp.make(name, 5, wire=wire), rules.make("dsgd", lr=0.01)
    start = torch.randn(5, 1, 300, generator=torch.Generator().manual_seed(0)).double()
    rule, mix = carried(made, graph), StackedMix(graph, dtype=torch.float64, device=torch.device("cpu"))
    state = rule.init(start)
    for t in range(1, 300):
        state = rule.update(state, 0 * start, mix.in_round(t), t, 0.01)
    torch.testing.assert_close(state["w"].mean(0), start.mean(0), rtol=0, atol=1e-13)
    assert state["w"].std(0).mean() < (0.95 if "0.001" in wire else 0.7) * start.std(0).mean()


def test_a_simulation_makes_its_encoding_once(monkeypatch):
    """One of a user's own may take long to load, and remember something."""
    made, make = [], encodings.of
    monkeypatch.setattr(encodings, "of", lambda wire: made.append(wire) or make(wire))
    problem, graph = problems.LeastSquares(5, dim=3), tp.make("ring", 5, wire=signs.WIRE)
    klatsch.simulate(problem, rules.make("dsgd", lr=0.01), graph, 50, [50], progress=False, engine="torch")
    assert len(made) < 10


OWN = """
import torch
from klatsch.encodings import Encoding

class Wrong(Encoding):
    def streams(self, numbers):
        return [(torch.float32, numbers)]
    def encode(self, v):
        return [v]
    def decode(self, streams, numbers, dtype):
        return streams[0].to(dtype)
"""


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("return [v]", "return [v[1:]]", r"encode makes streams of \[699\] numbers of 700, where streams\(700\) says"),
        ("return [v]", "return [v + 1]", r"decode\(encode\(0\)\) is not 0"),
        ("return [v]", "return [v.nan_to_num()]", "what is not finite arrives as finite"),
        ("return [v]", "return [v - v.mean()]", "a slice arrives as other numbers; encode each block of 256 by itself"),
        ("return [v]", "return 1 / 0", "line 9: ZeroDivisionError"),
        ("to(dtype)", "double()", "decode makes torch.float64"),
        ("(Encoding)", "", "makes a Wrong; let it make a klatsch.encodings.Encoding"),
    ],
)
def test_an_encoding_that_does_not_work_is_refused_with_the_reason(old, new, reason, tmp_path):
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    with pytest.raises(ValueError, match=reason):
        tp.make("ring", 4, wire=f"{tmp_path}/own.py:Wrong")
    (tmp_path / "own.py").write_text(OWN)
    assert tp.make("ring", 4, wire=f"{tmp_path}/own.py:Wrong").encoding.bytes(10) == 40
