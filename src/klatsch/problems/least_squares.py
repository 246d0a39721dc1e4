"""The paper's least-squares problem (Section 5.1), and any other given as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from klatsch import columns as cols
from klatsch.arguments import whole
from klatsch.problems import base as core
from klatsch.problems import draws

NOT_NEGATIVE = "0 or a positive number, or a list with one per column"


class LeastSquares(core.Convex):
    """f_i(x) = ½ ||A_i x - b_i||², with Gaussian noise on every gradient (Section 5.1).

        A_i standard normal (d x d);   b_i = A_i (x# - delta_i);   x# ~ N(0, I/d);   delta_i ~ N(0, zeta² I/d)
        g_i = A_i' (A_i x - b_i) + xi,   xi ~ N(0, sigma² I/d)

    The data of node i depend on the seed and i only. Columns may differ in `noise` and `heterogeneity`; they share A_i
    and the draws, scaled.

    Args:
        nodes: number of nodes M.
        dim: number of parameters d.
        noise: sigma, a number or a list with one per column.
        heterogeneity: zeta, a number or a list with one per column.
        seed: of data and noise.
        pool: the data of so many nodes, a multiple of `nodes`: each holds the mean of several f_i, so that networks of
            different sizes minimise the same function; by default those of `nodes`.
    """

    per_column = ("noise", "heterogeneity")
    of_nodes = ("_H", "_offset")
    shown = ("columns", "seed")

    def __init__(
        self,
        nodes: int,
        dim: int = 50,
        noise: cols.Given = 1.0,
        heterogeneity: cols.Given = 1.0,
        seed: int = 0,
        pool: int | None = None,
    ) -> None:
        M, d = whole(nodes, "nodes", 1), whole(dim, "dim", 1)
        seed, of = whole(seed, "seed", 0), core.pooled(M, pool)
        zeta = _column(cols.hyper("heterogeneity", heterogeneity, lambda v: v >= 0, NOT_NEGATIVE))
        every, once = torch.arange(of), torch.zeros(1, dtype=torch.long)
        A = draws.normals(seed, draws.MATRICES, once, every, d * d)[0].reshape(of, d, d)
        centre = draws.normals(seed, draws.CENTRE, once, once, d)[0, 0] / d**0.5
        shifts = draws.normals(seed, draws.SHIFTS, once, every, d)[0] / d**0.5
        H = A.mT @ A
        # A'b = H x# - zeta H delta: two rows, the second scaled per column.
        rows = torch.stack((-(H @ centre), (H @ shifts[:, :, None])[:, :, 0]), dim=1)
        scale = torch.stack((torch.ones_like(zeta), zeta), dim=1)
        self._fill(*_means(M, H, rows), scale, noise, seed)

    @classmethod
    def from_arrays(
        cls, A: ArrayLike | Tensor, b: ArrayLike | Tensor, noise: cols.Given = 0.0, seed: int = 0
    ) -> LeastSquares:
        """The same problem from your own data: a matrix (n, d) per node in A, (M, n, d), its targets in b, (M, n).

        Noise, a number or a list with one per column, is added to the exact gradients.
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

    def _fill(self, H: Tensor, rows: Tensor, scale: Tensor, noise: cols.Given, seed: int) -> None:
        sigma = _column(cols.hyper("noise", noise, lambda v: v >= 0, NOT_NEGATIVE))
        C = max(len(sigma), len(scale))
        if not {len(sigma), len(scale)} <= {1, C}:
            raise ValueError(
                f"noise has {len(sigma)} columns and heterogeneity {len(scale)}; give both the same number, or one"
            )
        self.nodes, self.dim, self.columns, self.seed = len(H), H.shape[-1], C, seed
        self.numbers, self._seeds = torch.arange(len(H)), torch.tensor([seed])
        self.sigma = sigma.expand(C).contiguous()
        self._H, self._rows, self._scale = H, rows, scale.expand(C, -1).contiguous()
        self._noise = self.sigma / self.dim**0.5
        self._offset = self._scale @ rows  # (M, C, d): the gradients at 0
        self._solve()
        self.sha256 = core.digest(H, rows, self._scale, self._noise, seed)

    def _solve(self) -> None:
        """Find the optimum of the mean over nodes."""
        self._mean_H: Tensor = self._H.mean(0)
        self.optimum = -torch.linalg.lstsq(self._mean_H, self._offset.mean(0).mT, driver="gelsd").solution.mT

    def among(self, nodes: Sequence[int]) -> LeastSquares:
        some = cols.replaced(self.part(nodes), _rows=self._rows[[*nodes]])
        some._solve()
        return some

    def on_fewer(self, nodes: int, seed: int) -> LeastSquares:
        """The same mean of all f_i on so many nodes, each with the mean of several, and noise of another seed."""
        fewer = type(self).__new__(type(self))
        fewer._fill(*_means(nodes, self._H, self._rows), self._scale, self.sigma.tolist(), seed)
        return fewer

    @property
    def L(self) -> float:
        """Smoothness: the largest eigenvalue of any A_i' A_i (Assumption 2.1)."""
        return float(torch.linalg.eigvalsh(self._H.double()).max())

    def draw(self, t: Tensor) -> Tensor:
        t = t.to(self.numbers.device)
        return draws.normals(self._seeds, draws.NOISE, t, self.numbers, self.dim, self._H.dtype)

    def gradient(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        g = torch.baddbmm(self._offset, x, self._H)  # few operations: on a GPU each one is a launch
        return g if drawn is None else g.addcmul_(self._noise[:, None], drawn[:, None, :])

    def quadratic(self) -> core.Quadratic | None:
        """The parts of the gradient, for the fused engine; None in a subclass that changes the gradient."""
        same = type(self).gradient is LeastSquares.gradient and type(self).draw is LeastSquares.draw
        same &= len(self._rows) == self.nodes  # unless problems with other multiples of their rows are joined
        return core.Quadratic(self._H, self._rows, self._scale, self._noise) if same else None

    @staticmethod
    def joined(problems: Sequence[LeastSquares]) -> LeastSquares:
        first = problems[0]
        for other in problems[1:]:
            if other.dim != first.dim or not torch.equal(other.sigma, first.sigma):
                raise ValueError(
                    f"{other!r} does not fit {first!r} in one stack: give all the same parameters and noise levels"
                )
        alike = all(torch.equal(p._scale, first._scale) for p in problems)
        return cols.replaced(
            first,
            nodes=sum(p.nodes for p in problems),
            _rows=torch.cat([p._rows for p in problems if alike or p is first]),
            _seeds=torch.cat([p._seeds.expand(p.nodes) for p in problems]),  # nodes draw as in their own networks
            **{k: torch.cat([vars(p)[k] for p in problems]) for k in ("numbers", *first.of_nodes)},
        )

    def loss_gap(self, x: Tensor) -> Tensor:
        """f(x) - f* for points (..., C, d): ½ (x - x*)' H (x - x*), free of cancellation."""
        apart = x - self.optimum
        return 0.5 * ((apart @ self._mean_H) * apart).sum(-1)


def _means(nodes: int, H: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The means of several nodes' functions, for fewer nodes."""
    if nodes == len(H):
        return H, rows
    return H.reshape(nodes, -1, *H.shape[1:]).mean(1), rows.reshape(nodes, -1, *rows.shape[1:]).mean(1)


def _column(value: cols.Number) -> Tensor:
    return torch.tensor([value], dtype=torch.float64) if isinstance(value, float) else value[:, 0].double()
