"""Which point the model holds: the one where gradients are taken, or the one to evaluate and keep.

For most rules they are the same. Where they are apart (`beta` below 1, or an average of iterates kept beside them), the
model holds the query point while it trains, and x, the rule's output, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from klatsch.optim.share import Point, Share
from klatsch.optim.watch import Watch

SINCE = {"output": "optimizer.eval()", "merged": "average_(model, parameters=True)"}


class Points(Optimizer):
    """The part of an optimizer that puts one point or another into the model."""

    _shares: list[Share]
    _holds: Point = "query"
    _watch: Watch | None = None  # None where the points are not apart

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return self._shares[0].node.rounds

    def eval(self) -> None:
        """Put x, the point to evaluate and save, into the model; `train()` puts the query point back.

        Does nothing where gradients are taken at x, as with beta = 1.

        Raises:
            ValueError: somebody else has written to the parameters.
        """
        self._show_output()
        if self._watch is not None:
            self._watch.warn_of_statistics()

    def train(self) -> None:
        """Put the point back at which gradients are taken, after `eval()` or `average_`.

        Raises:
            ValueError: somebody else has written to the parameters.
        """
        if self._holds != "query":
            if self._watch is not None:
                self._check_untouched()
            self._show("query")

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate or save inside: the model holds x there, and afterwards what it held before."""
        before = self._holds
        self.eval()
        try:
            yield
        finally:
            self._return_to(before)

    def output(self) -> list[Tensor]:
        """The rule's output, shaped like the trained parameters: x, or the average of iterates if it keeps one."""
        found: dict[int, Tensor] = {}
        for share in self._shares:
            vector = share.rule.output(share.node.state).to(share.flat.values.dtype)
            found |= {id(p): v.clone() for p, v in zip(share.flat.parameters, share.flat.views(vector), strict=True)}
        return [found[id(p)] for entry in self.param_groups for p in entry["params"] if id(p) in found]

    # --- for the neighbours ------------------------------------------------------------------------------------

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the parameters that are trained here."""
        return any(share.flat.holds(tensor) for share in self._shares)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Average the model over ranks inside: it holds x there. Where that fails, it holds what it held before."""
        before = self._holds
        self._show_output()
        try:
            yield
        except BaseException:
            self._return_to(before)
            raise
        if self.rounds == 0:  # all points are one, and training starts from whatever the model holds
            self._return_to(before)
            return
        self._holds = "merged"
        if self._watch is not None:
            for share in self._shares:
                share.flat.written()
            if before == "query":
                self._watch.warn(
                    "merged",
                    "average_ has put the mean of all ranks' x into the model, which is the point to evaluate and "
                    "save, in place of the query point; optimizer.train() puts that back",
                )

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Take the model's state_dict() inside for what else is in it, without a warning."""
        if self._watch is None:
            yield
        else:
            with self._watch.paused():
                yield

    def recalibrated(self) -> None:
        """Be told that somebody takes care of statistics such as BatchNorm's, so that no warning is needed."""
        if self._watch is not None:
            self._watch.said.add("statistics")

    # --- inside ------------------------------------------------------------------------------------------------

    def _check_training(self) -> None:
        """Refuse a step from another point than the one of training."""
        if self._watch is not None and self._holds != "query":
            raise ValueError(
                f"the model holds x, to evaluate or save, since {SINCE[self._holds]}, and takes no steps from there; "
                "call optimizer.train() before the forward pass, or evaluate inside `with optimizer.averaged():`"
            )

    def _check_untouched(self) -> None:
        for share in self._shares:
            share.check_untouched(self._holds if self._watch is not None else "query")

    def _show_output(self) -> None:
        if self._watch is not None:
            self._check_untouched()
            if self._holds == "query":
                self._show("output")

    def _return_to(self, before: Point) -> None:
        if before == "query":
            self.train()
        elif self._holds != before:
            self._show("output")  # what was merged before is gone

    @torch.no_grad()
    def _show(self, point: Point) -> None:
        for share in self._shares:
            share.show(point)
        self._holds = point
        if self._watch is not None:
            self._watch.attached(point == "query")
