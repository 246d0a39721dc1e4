"""When: how long the rounds of a network take, computed beside a run, whose numbers do not depend on it."""

from klatsch.clock.network import NETWORKS, Links, Random, Sites, Table, Times, Trace, links, times
from klatsch.clock.rounds import Clock

__all__ = ["NETWORKS", "Clock", "Links", "Random", "Sites", "Table", "Times", "Trace", "links", "times"]
