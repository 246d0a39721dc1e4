"""When: how long the rounds of a network take, computed beside a run, whose numbers do not depend on it."""

from klatsch.clock.network import NETWORKS, Links, Random, Sites, Table, Times, Trace, Uneven, links, times
from klatsch.clock.rounds import Clock, Deaths

__all__ = ["NETWORKS", "Clock", "Deaths", "Links", "Random", "Sites", "Table", "Times", "Trace", "Uneven"]
__all__ += ["links", "times"]
