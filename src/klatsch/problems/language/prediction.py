"""The language problem: every node learns to predict the bytes of its own text."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from klatsch.arguments import whole
from klatsch.problems import base as core
from klatsch.problems.language import text
from klatsch.problems.language.gpt import StackedGPT
from klatsch.problems.language.text import Windows
from klatsch.problems.partition import check_alpha, dirichlet
from klatsch.problems.sharded import Sharded, equal_parts, evenly

BYTES_AT_ONCE = {"cpu": 1 << 14, "cuda": 1 << 18}  # in all models together: what is kept for the gradient fits memory
EVALUATED_AT_ONCE = 16  # models
BRIEF = 50  # windows of held-out text for a brief look, at most


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
        folder: of your own text; the standard library by default, without its tests.
        pattern: names of the files in it.
        test: the most windows of held-out text on which bits per byte are measured.
        autocast: compute products in bfloat16, as torch.autocast does.
        seed: of start, partition and mini-batches.
    """

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
        self.check(nodes, alpha, batch, context, width, depth, heads, folder, pattern, test, autocast, seed)
        found = text.load(folder, pattern, context + 1)
        self.nodes, self.batch, self.seed, self.alpha, self.autocast = nodes, batch, seed, float(alpha), autocast
        self.shards = torch.as_tensor(dirichlet(found.packages, nodes, alpha, seed))  # (M, n)
        self.numbers, self.drawn = torch.arange(nodes), batch
        measured = found.windows.held_out
        some = evenly(len(measured), test)  # windows of every folder
        self.data = found.windows._replace(held_out=measured[some])
        self.gpt = StackedGPT(context, width, depth, heads)
        self._start, self.dim = self.gpt.start(seed), self.gpt.dim
        self._content = text.content(folder, pattern)

    @staticmethod
    def check(
        nodes: int,
        alpha: float = 0.1,
        batch: int = 16,
        context: int = 256,
        width: int = 96,
        depth: int = 3,
        heads: int = 3,
        folder: str | Path | None = None,
        pattern: str = "*.py",
        test: int = 500,
        autocast: bool = False,
        seed: int = 0,
    ) -> None:
        """Refuse options that do not fit each other or the text."""
        sizes = {"nodes": nodes, "batch": batch, "context": context, "width": width, "depth": depth, "heads": heads}
        for name, value in (sizes | {"test": test}).items():
            whole(value, name, 1)
        whole(seed, "seed", 0)
        check_alpha(alpha)
        if width % heads:
            raise ValueError(f"heads = {heads} do not divide width = {width}; give a multiple, such as {32 * heads}")
        if not isinstance(autocast, bool):
            raise ValueError(f"autocast = {autocast!r}; give true or false")
        windows = len(text.load(folder, pattern, context + 1).packages)
        if nodes * batch > windows:
            raise ValueError(
                f"nodes = {nodes} and batch = {batch}, but the text has {windows:,} windows of {context + 1} bytes to "
                "learn from; give fewer nodes, a smaller batch, a shorter context, or more text"
            )

    @staticmethod
    def content(folder: str | Path | None = None, pattern: str = "*.py", **_: object) -> str:
        """SHA-256 of the text, which is another one with every version of Python."""
        return text.content(folder, pattern)

    @staticmethod
    def dim_of(nodes: int, context: int = 256, width: int = 96, depth: int = 3, **_: object) -> int:
        """The number of parameters, from the options."""
        return StackedGPT(context, width, depth, heads=1).dim

    @property
    def model(self) -> str:
        return f"{self.gpt} autocast {self.autocast}"

    def start(self) -> Tensor:
        """The parameters of the fresh model, (d,), the same for all nodes."""
        return self._start

    def slope(self, models: Tensor, numbers: Tensor) -> Tensor:
        found, size = [], equal_parts(len(models), max(1, self._at_once(models) // numbers.shape[1]))
        for some, chosen in zip(torch.split(models, size), torch.split(numbers, size), strict=True):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                # Models share nothing, so the gradient of the sum is each model's own.
                loss = self._losses(leaf, self.data.learnt[chosen]).sum()
                found.append(torch.autograd.grad(loss, leaf)[0])
        return found[0] if len(found) == 1 else torch.cat(found)

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Bits per byte on held-out text: mean, smallest and largest over nodes, and of the averaged model."""
        M, C, d = x.shape
        if self.brief:
            some = self.data.held_out[evenly(len(self.data.held_out), BRIEF)]
            return {"bits": self.bits(x.reshape(-1, d), some).view(M, C).mean(0)}
        bits = self.bits(torch.cat([x, x.mean(0, keepdim=True)]).view(-1, d)).view(M + 1, C)
        return {
            "bits": bits[:M].mean(0),
            "bits_min": bits[:M].amin(0),
            "bits_max": bits[:M].amax(0),
            "bits_of_mean": bits[M],
        }

    def by_node(self, x: Tensor) -> dict[str, Tensor]:
        """Bits per byte of every node on held-out text."""
        return {"bits": self.bits(x.reshape(-1, self.dim)).view(x.shape[:2])}

    def briefly(self) -> Self:
        """With the bits of all nodes' models alone, on some windows."""
        return core.shortened(self, Language.metrics, "bits")

    @torch.no_grad()
    def bits(self, models: Tensor, windows: Tensor | None = None) -> Tensor:
        """Bits per byte of models, (S, d), on windows of text, by default all that are held out, some at a time."""
        windows, found = self.data.held_out if windows is None else windows, []
        for some in torch.split(models, EVALUATED_AT_ONCE):
            size = equal_parts(len(windows), max(1, self._at_once(models) // len(some)))
            parts = (part.expand(len(some), -1, -1) for part in torch.split(windows, size))
            nats = torch.stack([part.shape[1] * self._losses(some, part).double() for part in parts]).sum(0)
            found.append(nats / len(windows) / math.log(2.0))
        return torch.cat(found)

    def _at_once(self, models: Tensor) -> int:
        """Windows, of all models together."""
        return BYTES_AT_ONCE[models.device.type] // self.gpt.context

    def _losses(self, models: Tensor, windows: Tensor) -> Tensor:
        # A cache of rounded matrices would not survive the capture of a CUDA graph.
        with torch.autocast(models.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return self.gpt.losses(models, windows)

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the gradients."""
        facts = f"{self._content} {self.model} {len(self.data.held_out)}"
        number = int(hashlib.sha256(facts.encode()).hexdigest()[:15], 16)
        return core.digest(self.shards.cpu(), self.batch, self.seed, number)

    def __repr__(self) -> str:
        return (
            f"<Language: {self.nodes} nodes, {self.dim} parameters, alpha {self.alpha:g}, batch {self.batch}, "
            f"context {self.gpt.context}, seed {self.seed}>"
        )
