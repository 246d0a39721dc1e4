"""When: how long the rounds of a network take, computed beside a run, whose numbers do not depend on it."""

from klatsch.clock.network import NETWORKS, Links, Sites, Table, links
from klatsch.clock.rounds import Clock
from klatsch.clock.times import Exponential, Lognormal, Slow, Times, Trace, times

__all__ = ["NETWORKS", "Clock", "Exponential", "Links", "Lognormal", "Sites", "Slow", "Table", "Times", "Trace"]
__all__ += ["links", "times"]
