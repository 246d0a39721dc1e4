"""Keys of runs: which settings are the same run."""

import pytest

from klatsch import rules
from klatsch.study import expand, parse

SMALL = {"name": "small", "steps": 40, "nodes": 5, "seeds": 1, "record": 2, "lr": [0.001, 0.01], "problem": {"dim": 4}}


def keys(**content):
    return {case.key for case in expand(parse({**SMALL, **content}))[0]}


def test_d2_is_lazy_by_itself_once_or_twice():
    lazy_ring = [{"name": "ring", "lazy": True}]
    once = keys(rules=["d2"], topologies=["ring"])
    assert once == keys(rules=[{"name": "d2", "lazy": True}], topologies=["ring"])
    never = keys(rules=[{"name": "d2", "lazy": False}], topologies=["ring"])
    twice = keys(rules=["d2"], topologies=lazy_ring)
    assert len(once | never | twice) == 6


def test_options_change_a_key_only_where_they_differ_from_their_defaults():
    for rule, changes in {
        "dat": {"beta": 0.9},
        "d2": {"momentum": 0.9, "average": "constant"},
        "gt": {"momentum": 0.9},
        "dsgd": {"order": "cta"},
        "dat-d2": {"beta": 0.5, "momentum": 0.9, "lazy": False},
    }.items():
        plain = keys(rules=[rule], topologies=["ring"])
        standard = {"beta": 1, "momentum": 0, "order": "atc", "lazy": True}
        for option, value in changes.items():
            assert not plain & keys(rules=[{"name": rule, option: value}], topologies=["ring"])
            if option in standard:
                assert plain == keys(rules=[{"name": rule, option: standard[option]}], topologies=["ring"])


def test_rules_that_are_not_lazy_say_how_to_be():
    with pytest.raises(ValueError, match=r"dat has no lazy: .* topology.lazy\(graph\)"):
        parse({**SMALL, "rules": [{"name": "dat", "lazy": True}], "topologies": ["ring"]})


def test_defaults_of_a_rule_that_is_new_may_be_written_out(monkeypatch):
    monkeypatch.setitem(
        rules.RULES,
        "new",
        lambda lr, momentum=0.0, average=None: rules.make("gt", lr, momentum=momentum, average=average),
    )

    def key(**options):
        content = {"steps": 9, "nodes": 4, "rules": [{"name": "new", **options}], "topologies": ["ring"], "lr": 0.1}
        return expand(parse(content | {"seeds": 1}))[0][0].key

    assert key() == key(momentum=0.0)
    assert key(average="fixed(0.90)") == key(average="fixed(0.9)") != key()
