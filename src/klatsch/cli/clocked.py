"""The options of a clock, for commands that show how long runs would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from klatsch import catalogue
from klatsch.cli.terminal import option, text

if TYPE_CHECKING:
    from klatsch.clock import Clock


@dataclass(frozen=True)
class Timing:
    """How long gradients and messages take, and what figures have across."""

    gradient: Annotated[
        str | None,
        text("Shows how long runs would take: seconds of a gradient, 0.05 or 'lognormal(0.05, 0.5)'.", metavar="X"),
    ] = None
    network: Annotated[
        str | None, text(f"With --gradient: {', '.join(catalogue.NETWORKS)}, or a CSV file of links (10gbe).")
    ] = None
    gpus: Annotated[int, option("With --gradient: GPUs of a node, if nodes are hosts.")] = 1
    against: Annotated[str, text("Across in figures: rounds, seconds (with --gradient) or bytes.")] = "rounds"

    def clock(self) -> Clock | None:
        """The clock, if there is one."""
        from klatsch.arguments import named
        from klatsch.clock import Clock

        named("axis", self.against, dict.fromkeys(("rounds", "seconds", "bytes")))
        if self.gradient is not None:
            return Clock(self.gradient, self.network or "10gbe", gpus=self.gpus)
        if self.network is not None or self.gpus != 1 or self.against == "seconds":
            what = "--against seconds" if self.against == "seconds" else "--network" if self.network else "--gpus"
            raise ValueError(f"{what} needs to know how long a gradient takes; give --gradient 0.05, in seconds")
        return None
