"""The language problem: every node learns to predict the bytes of its own text, with a small GPT.

The text needs no download: it is the source of Python's standard library, or any folder, cut into windows of bytes.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache, partial
from itertools import accumulate, groupby
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from klatsch.arguments import whole
from klatsch.columns import WeightMatrix
from klatsch.problems import base as core
from klatsch.problems import draws
from klatsch.problems.sharded import Sharded, check_split, equal_parts, evenly

# Of the standard library. Tests are more than half of it, would make half of the nodes alike, and are not installed
# everywhere; the last two differ between two builds of one version.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "config-*", "_sysconfigdata*")
INSTALLED = "site-packages"  # as a folder: where the packages beside klatsch are installed, a few hundred MB
HELD_OUT = 0.1  # of the text of every package
BYTES = 256  # values of a byte: what is read and predicted
SPREAD = 0.02  # of the weights at the start, as in GPT-2
# Bytes in all models together, and these times the width of all blocks: what is kept for the gradient fits memory.
BYTES_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}
KEPT_AT_ONCE = 1 << 28
EVALUATED_AT_ONCE = 16  # models
BRIEF = 50  # windows of held-out text for a brief look, at most


class File(NamedTuple):
    """A file, by its path in the folder."""

    path: PurePath
    content: bytes

    @property
    def package(self) -> str:
        """What it belongs to: the folder or file at the top, which in Python's library is what one imports."""
        return self.path.parts[0]

    @property
    def folder(self) -> str:
        """The folder at the top; empty for files that lie there."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""


class Windows(NamedTuple):
    """Windows of text, bytes of shape (windows, size): those to learn from, and those that are held out."""

    learnt: Tensor
    held_out: Tensor


def library() -> Path:
    """Where the source of Python's standard library is."""
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=4)
def load(folder: str | Path | None, pattern: str, size: int) -> tuple[Windows, NDArray[np.int64]]:
    """The files of a folder, or the standard library, in windows of `size` bytes; and the package of each to learn."""
    kept, held_out = [], []
    for _, files in _grouped(_read(folder, pattern), lambda file: file.folder):
        apart = _apart(files)
        held_out += [file for file in files if file in apart]
        kept += [file for file in files if file not in apart]
    learnt = [_windows(files, size) for _, files in _grouped(kept, lambda file: file.package)]
    measured = [_windows(files, size) for _, files in _grouped(held_out, lambda file: file.folder)]
    for what, windows in (("to learn from", learnt), ("held out", measured)):
        if not sum(map(len, windows)):
            raise ValueError(
                f"{_place(folder)} has no {size:,} bytes of text {what}, of {len(kept)} and {len(held_out)} files; "
                "give more or longer files, or a shorter context"
            )
    return Windows(torch.cat(learnt), torch.cat(measured)), np.repeat(np.arange(len(learnt)), list(map(len, learnt)))


def _apart(files: Sequence[File]) -> set[File]:
    """The files of a folder that are held out: whole ones, about a tenth of its text, at least one of several."""
    chosen: set[File] = set()
    room = HELD_OUT * sum(len(file.content) for file in files)
    for file in sorted(files, key=lambda file: hashlib.sha256(file.path.as_posix().encode()).digest()):
        if len(file.content) <= room:
            chosen.add(file)
            room -= len(file.content)
    if len(files) > 1 and not chosen:
        chosen.add(min(files, key=lambda file: (len(file.content), file.path)))
    return chosen


def _windows(files: Iterable[File], size: int) -> Tensor:
    """The text of files, one after the other, in windows that do not overlap; the rest is not used."""
    joined = bytearray(b"".join(file.content for file in files))
    whole = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return whole[: len(whole) // size * size].view(-1, size)


def _grouped(files: Iterable[File], name: Callable[[File], str]) -> list[tuple[str, list[File]]]:
    return [(key, list(group)) for key, group in groupby(sorted(files, key=lambda file: (name(file), file.path)), name)]


@lru_cache(maxsize=4)
def _read(folder: str | Path | None, pattern: str) -> tuple[File, ...]:
    root = library() if folder is None else Path(folder).expanduser()
    if folder == INSTALLED:
        root = Path(sysconfig.get_paths()["purelib"])
    if not root.is_dir():
        raise ValueError(f"{_place(folder)} is not a folder; give one with text, or none for Python's own source")
    left_out = LEFT_OUT if folder is None else ()
    try:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError
        paths = sorted(path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
        names = [p for p in paths if not any(fnmatch(part, name) for part in p.parts for name in left_out)]
        files = [File(PurePath(path), (root / path).read_bytes()) for path in names]
    except (NotImplementedError, ValueError, IndexError):  # pathlib's refusals
        raise ValueError(f"pattern = {pattern!r}; give names of files, such as *.txt") from None
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}; give a folder of readable files") from None
    if not any(file.content for file in files):
        raise ValueError(f"{_place(folder)} has no text in files named {pattern}; give another pattern or folder")
    return tuple(file for file in files if file.content)


def _place(folder: str | Path | None) -> str:
    return f"Python's standard library in {library()}" if folder is None else f"folder = {folder}"


@dataclass(frozen=True)
class StackedGPT:
    """S transformers, each with its own parameters, computed as one: parameters are rows (S, d).

    They have pre-norm, learned positions, GELU, one matrix for bytes that go in and come out, and no biases. Norms have
    no parameters either: the matrix that follows can learn them. Products run over the stack, a matrix for each model;
    attention runs over all windows of all models at once.
    """

    context: int  # T, the most bytes that a prediction sees
    width: int
    depth: int
    heads: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The matrices of a model: bytes, positions, and four of every block."""
        width = self.width
        block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        return [(BYTES, width), (self.context, width), *self.depth * block]

    @property
    def sizes(self) -> list[int]:
        return [rows * columns for rows, columns in self.shapes]

    @property
    def dim(self) -> int:
        """Number of parameters d of one model."""
        return sum(self.sizes)

    @property
    def matrices(self) -> list[WeightMatrix]:
        """Those of the blocks, whose rows are inputs."""
        places = zip(accumulate(self.sizes, initial=0), self.shapes, strict=False)
        return [WeightMatrix(start, columns, rows, turned=True) for start, (rows, columns) in places][2:]

    def start(self, seed: int) -> Tensor:
        """The parameters of a fresh model, (d,)."""
        once = torch.zeros(1, dtype=torch.long)
        parts = [draws.normals(seed, draws.WEIGHTS, once, once + k, size)[0, 0] for k, size in enumerate(self.sizes)]
        for out, down in zip(parts[3::4], parts[5::4], strict=True):  # those that add to the stream
            out.div_((2 * self.depth) ** 0.5)
            down.div_((2 * self.depth) ** 0.5)
        return SPREAD * torch.cat(parts)

    def logits(self, x: Tensor, given: Tensor) -> Tensor:
        """What models x, (S, d), say about the byte after each of the given ones, (S, B, T): (S, B T, 256)."""
        S, B, T = given.shape
        pieces = torch.split(x, self.sizes, dim=1)  # one operation: its gradient is one concatenation
        embedding, positions, *matrices = (p.view(S, *shape) for p, shape in zip(pieces, self.shapes, strict=True))
        rows = given + BYTES * torch.arange(S, device=x.device)[:, None, None]
        stream = functional.embedding(rows, embedding.flatten(0, 1)) + positions[:, None, :T]
        stream = stream.flatten(1, 2)  # (S, B T, width)
        normed, by_head = partial(functional.layer_norm, normalized_shape=(self.width,)), (S * B, T, self.heads, -1)
        for first in range(0, len(matrices), 4):
            inner, out, up, down = matrices[first : first + 4]
            triple = torch.split(normed(stream) @ inner, self.width, dim=2)  # queries, keys and values
            q, k, v = (part.view(by_head).transpose(1, 2) for part in triple)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            stream = stream + mixed.transpose(1, 2).reshape(stream.shape) @ out
            stream = stream + functional.gelu(normed(stream) @ up) @ down
        return normed(stream) @ embedding.mT

    def losses(self, x: Tensor, windows: Tensor) -> Tensor:
        """The mean cross-entropy of each model, (S,), over windows of T + 1 bytes, (S, B, T + 1), in nats."""
        windows = windows.long()
        said, wanted = self.logits(x, windows[:, :, :-1]), windows[:, :, 1:]
        losses = functional.cross_entropy(said.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(len(x), -1).mean(1)


class Language(Sharded):
    """A small GPT that predicts the bytes of a text: Python's standard library, or the files of a folder.

    f_i(x) = mean over the windows of node i of the cross-entropy, in nats per byte, of a GPT with parameters x. The
    text of a package (what lies at the top of the folder: a folder, or a file) is cut into windows of context + 1
    bytes, which are split over the nodes by package, as images are by class. Whole files of every folder are held out,
    about a tenth; bits per byte are measured on everybody's. A run knows the SHA-256 of its text.

    Args:
        nodes: number of nodes M.
        alpha: how much the nodes' texts differ: Dirichlet(alpha) over the packages; small is different.
        batch: windows per node and round.
        context: the most bytes that a prediction sees.
        width: numbers per byte in the model.
        depth: blocks of attention and MLP.
        heads: attention heads, which divide the width.
        folder: of your own text, or "site-packages" for all packages that are installed; the standard library by
            default, without its tests.
        pattern: names of the files in it.
        test: the most windows of held-out text on which bits per byte are measured.
        autocast: compute products in bfloat16, as torch.autocast does.
        seed: of start, partition and mini-batches.
    """

    score, alone = "bits", ("bits",)
    headline = core.Headline(
        "bits", "bits per byte on held-out text, mean over nodes", of_mean="bits_of_mean", of_worst="bits_max"
    )
    data: Windows

    def __init__(
        self,
        nodes: int,
        alpha: float = 0.1,
        batch: int = 16,
        context: int = 256,
        width: int = 96,
        depth: int = 3,
        heads: int = 3,
        folder: str | None = None,
        pattern: str = "*.py",
        test: int = 500,
        autocast: bool = False,
        seed: int = 0,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self.check(**given)
        windows, packages = load(folder, pattern, context + 1)
        self._split(packages, nodes, alpha, batch, seed)
        self.autocast, self.gpt = autocast, StackedGPT(context, width, depth, heads)
        some = evenly(len(windows.held_out), test)  # of every folder
        self.data = windows._replace(held_out=windows.held_out[some])
        self.fresh, self.dim = self.gpt.start(seed), self.gpt.dim
        self.matrices = self.gpt.matrices
        self._seal(self.content(folder, pattern), len(self.data.held_out))

    @classmethod
    def check(cls, nodes: int, **options: Any) -> None:
        given = core.settings(Language, nodes, options)
        for name in ("context", "width", "depth", "heads", "test"):
            whole(given[name], name, 1)
        width, heads, autocast, size = given["width"], given["heads"], given["autocast"], given["context"] + 1
        if width % heads:
            raise ValueError(f"heads = {heads} do not divide width = {width}; give a multiple, such as {32 * heads}")
        if not isinstance(given["folder"], str | Path | None):
            raise ValueError(f"folder = {given['folder']!r}; give the name of one folder")
        if not isinstance(autocast, bool):
            raise ValueError(f"autocast = {autocast!r}; give true or false")
        _, packages = load(given["folder"], given["pattern"], size)
        split = {name: given[name] for name in ("nodes", "alpha", "batch", "seed")}
        what, more = f"windows of {size} bytes", ", or a shorter context or more text"
        check_split(**split, samples=len(packages), what=what, more=more)

    @staticmethod
    def content(folder: str | Path | None = None, pattern: str = "*.py", **_: object) -> str:
        """SHA-256 of the files, with their names; Python's own are others with every version."""
        hashed = hashlib.sha256()
        for path, data in _read(folder, pattern):
            hashed.update(f"{path.as_posix()}\0{len(data)}\0".encode())
            hashed.update(data)
        return hashed.hexdigest()

    @classmethod
    def dim_of(cls, nodes: int, **options: Any) -> int:
        given = core.settings(Language, nodes, options)
        return StackedGPT(given["context"], given["width"], given["depth"], heads=1).dim

    @property
    def model(self) -> str:
        return f"{self.gpt} autocast {self.autocast}"

    def loss(self, models: Tensor, numbers: Tensor) -> Tensor:
        return self._losses(models, self.data.learnt[numbers]).sum()

    def portions(self, models: Tensor, batch: int) -> list[int]:
        size = equal_parts(len(models), max(1, self._at_once(models) // batch))
        return [len(part) for part in torch.split(models, size)]

    def scores(self, models: Tensor) -> Tensor:
        windows = self.data.held_out
        return self.bits(models, windows[evenly(len(windows), BRIEF)] if self.brief else windows)

    @torch.no_grad()
    def bits(self, models: Tensor, windows: Tensor | None = None) -> Tensor:
        """Bits per byte of models, (S, d), on windows of text, by default all that are held out, some at a time."""
        windows, bits = self.data.held_out if windows is None else windows, []
        for some in torch.split(models, EVALUATED_AT_ONCE):
            size = equal_parts(len(windows), max(1, self._at_once(models) // len(some)))
            parts = (part.expand(len(some), -1, -1) for part in torch.split(windows, size))
            nats = torch.stack([part.shape[1] * self._losses(some, part).double() for part in parts]).sum(0)
            bits.append(nats / len(windows) / math.log(2.0))
        return torch.cat(bits)

    def _at_once(self, models: Tensor) -> int:
        """Windows, of all models together."""
        most = min(BYTES_AT_ONCE[models.device.type], KEPT_AT_ONCE // (self.gpt.depth * self.gpt.width))
        return most // self.gpt.context

    def _losses(self, models: Tensor, windows: Tensor) -> Tensor:
        # A cache of rounded matrices would not survive the capture of a CUDA graph.
        with torch.autocast(models.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return self.gpt.losses(models, windows)
