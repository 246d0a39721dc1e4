"""The paper's least-squares problem (Section 5.1), and any other given as arrays."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klatsch import columns as cols
from klatsch.arguments import whole
from klatsch.problems import base as core
from klatsch.problems import draws
from klatsch.problems.base import Quadratic
from klatsch.problems.joined import JoinedLeastSquares

NOT_NEGATIVE = "0 or a positive number, or a list with one per column"


class LeastSquares:
    """f_i(x) = ½ ||A_i x - b_i||², with Gaussian noise on every gradient (Section 5.1).

        A_i standard normal (d x d);   b_i = A_i (x# - delta_i);   x# ~ N(0, I/d);   delta_i ~ N(0, zeta² I/d)
        g_i = A_i' (A_i x - b_i) + xi,   xi ~ N(0, sigma² I/d)

    The data of node i depend on the seed and i only, not on the number of nodes. Columns may differ in `noise` and
    `heterogeneity` on the same A_i, and see the same draws, scaled.

    Args:
        nodes: number of nodes M.
        dim: number of parameters d.
        noise: sigma, a number or a list with one per column.
        heterogeneity: zeta, a number or a list with one per column.
        seed: of data and noise.
    """

    per_column = ("noise", "heterogeneity")  # options that may differ between the columns of one run

    def __init__(self, nodes: int, dim: int = 50, noise: Any = 1.0, heterogeneity: Any = 1.0, seed: int = 0) -> None:
        M, d = whole(nodes, "nodes", 1), whole(dim, "dim", 1)
        seed = whole(seed, "seed", 0)
        zeta = _column(cols.hyper("heterogeneity", heterogeneity, lambda v: v >= 0, NOT_NEGATIVE))
        every, once = torch.arange(M), torch.zeros(1, dtype=torch.long)
        A = draws.normals(seed, draws.MATRICES, once, every, d * d)[0].reshape(M, d, d)
        centre = draws.normals(seed, draws.CENTRE, once, once, d)[0, 0] / d**0.5
        shifts = draws.normals(seed, draws.SHIFTS, once, every, d)[0] / d**0.5
        H = A.mT @ A
        # A'b = H x# - zeta H delta: two rows, of which the second is scaled per column.
        rows = torch.stack((-(H @ centre), (H @ shifts[:, :, None])[:, :, 0]), dim=1)
        scale = torch.stack((torch.ones_like(zeta), zeta), dim=1)
        self._fill(H, rows, scale, noise, seed)

    @classmethod
    def from_arrays(cls, A: Any, b: Any, noise: Any = 0.0, seed: int = 0) -> LeastSquares:
        """The same problem from your own data.

        Args:
            A: one matrix per node, (M, n, d): n samples of d features each.
            b: one target vector per node, (M, n).
            noise: sigma, added to the exact gradients; a number or a list with one per column.
            seed: of the noise.

        Raises:
            ValueError: the shapes do not fit each other, or a number is not finite.
        """
        A, b = core.array("A", A, 3, "(nodes, samples, parameters)"), core.array("b", b, 2, "(nodes, samples)")
        if A.shape[:2] != b.shape:
            raise ValueError(
                f"A has shape {tuple(A.shape)} but b has {tuple(b.shape)}; "
                f"give b of shape {tuple(A.shape[:2])}, one target per sample of every node"
            )
        if 0 in A.shape:
            raise ValueError(f"A has shape {tuple(A.shape)}; give at least one node, one sample and one parameter")
        seed = whole(seed, "seed", 0)
        self = cls.__new__(cls)
        rows = -(A.mT @ b[:, :, None]).mT
        self._fill(A.mT @ A, rows, torch.ones(1, 1, dtype=torch.float64), noise, seed)
        return self

    def _fill(self, H: Tensor, rows: Tensor, scale: Tensor, noise: Any, seed: int) -> None:
        sigma = _column(cols.hyper("noise", noise, lambda v: v >= 0, NOT_NEGATIVE))
        C = max(len(sigma), len(scale))
        if not {len(sigma), len(scale)} <= {1, C}:
            raise ValueError(
                f"noise has {len(sigma)} columns and heterogeneity {len(scale)}; give both the same number, or one"
            )
        self.seed = seed
        self.columns = C
        self.sigma = sigma.expand(C).contiguous()
        self._quadratic = Quadratic(H, rows, scale.expand(C, -1).contiguous(), self.sigma / H.shape[-1] ** 0.5)
        self._offset: Tensor = self._quadratic.scale @ rows  # (M, C, d): the gradients at 0
        self._mean_H: Tensor = H.mean(0)
        self.optimum: Tensor = -torch.linalg.lstsq(self._mean_H, self._offset.mean(0).mT, driver="gelsd").solution.mT
        self._fingerprint = core.digest(*self._quadratic, seed)

    # --- what the theory asks of a problem ---------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Number of nodes M."""
        return self._quadratic.H.shape[0]

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        return self._quadratic.H.shape[-1]

    @property
    def L(self) -> float:
        """Smoothness: the largest eigenvalue of any A_i' A_i (Assumption 2.1)."""
        return float(torch.linalg.eigvalsh(self._quadratic.H.double()).max())

    @property
    def D1(self) -> Tensor:
        """The distance ||w_1 - x*|| of the start from the optimum, per column."""
        return self.optimum.square().sum(-1).sqrt()

    @property
    def zeta(self) -> Tensor:
        """Heterogeneity at the optimum, sqrt(1/M sum_i ||grad f_i(x*)||²), per column; measured, not the argument."""
        exact: Tensor = self.gradient(self.optimum.expand(self.nodes, -1, -1), None)
        return exact.square().sum(-1).mean(0).sqrt()

    # --- gradients ---------------------------------------------------------------------------------------------

    def start(self) -> Tensor:
        """The origin."""
        return torch.zeros(self.dim, dtype=self._quadratic.H.dtype, device=self._quadratic.H.device)

    def draw(self, t: Tensor) -> Tensor:
        """Standard normals for rounds t, (len(t), M, d)."""
        q = self._quadratic
        every = torch.arange(self.nodes, device=q.H.device)
        return draws.normals(self.seed, draws.NOISE, t.to(q.H.device), every, self.dim, q.H.dtype)

    def gradient(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """The gradients at x, (M, C, d), exact where nothing is drawn."""
        g = torch.baddbmm(self._offset, x, self._quadratic.H)  # few operations: on a GPU each one is a launch
        return g if drawn is None else g.addcmul_(self._quadratic.noise[:, None], drawn[:, None, :])

    def exact(self, x: Tensor) -> Tensor:
        """The gradients at x, (M, C, d), without noise."""
        return self.gradient(x, None)

    def grad(self, x: Tensor, t: int, nodes: Sequence[int] | None = None) -> Tensor:
        """Stochastic gradients of round t at x, (m, C, d), for these m nodes (all by default).

        Where the problem has one column, x may also be (m, d), or (d,) for a single node.
        """
        asked = core.chosen(nodes, self.nodes)
        points = core.points(x, len(asked), self.dim, self.columns)
        drawn = draws.normals(self.seed, draws.NOISE, torch.tensor([t]), asked, self.dim)[0].to(x)
        asked = asked.to(self._quadratic.H.device)
        H, offset = (v[asked].to(x) for v in (self._quadratic.H, self._offset))
        return (points @ H + offset + self._quadratic.noise.to(x)[:, None] * drawn[:, None, :]).reshape(x.shape)

    def quadratic(self) -> Quadratic:
        """The parts of the gradient, for the fused engine."""
        return self._quadratic

    @staticmethod
    def joined(problems: Sequence[LeastSquares]) -> JoinedLeastSquares:
        """Several such problems as one stack, for `simulate_together`."""
        return JoinedLeastSquares(problems)

    # --- how good a point is -----------------------------------------------------------------------------------

    def loss_gap(self, x: Tensor) -> Tensor:
        """f(x) - f* for points (..., C, d): ½ (x - x*)' H (x - x*), free of cancellation."""
        apart = x - self.optimum
        return 0.5 * ((apart @ self._mean_H) * apart).sum(-1)

    def metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Squared distance to the optimum, mean over nodes; loss gap at the network mean and at the worst node."""
        return {
            "distance": (x - self.optimum).square().sum(-1).mean(0),
            "loss_gap": self.loss_gap(x.mean(0)),
            "worst_loss_gap": self.loss_gap(x).amax(0),
        }

    def to(self, dtype: torch.dtype, device: torch.device) -> LeastSquares:
        """The same problem with its tensors in another dtype or on another device."""
        other = copy.copy(self)
        other._quadratic = Quadratic(*(tensor.to(device, dtype) for tensor in self._quadratic))
        own = (self._offset, self._mean_H, self.optimum)
        other._offset, other._mean_H, other.optimum = (v.to(device, dtype) for v in own)
        return other

    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the gradients."""
        return self._fingerprint

    def __repr__(self) -> str:
        return f"<LeastSquares: {self.nodes} nodes, {self.dim} parameters, {self.columns} columns, seed {self.seed}>"


def _column(value: cols.Number) -> Tensor:
    return torch.tensor([value], dtype=torch.float64) if isinstance(value, float) else value[:, 0].double()
