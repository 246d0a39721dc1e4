"""What the paper says of its figures, sentence by sentence, checked against the numbers that came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from klatsch.paper.claims import (
    SLACK,
    Answer,
    Verdict,
    best_size,
    falls,
    flat,
    grows_from,
    last_is_worse,
    never_helps,
    no_ceiling,
    per_panel,
    points_of,
    step,
    turns,
)
from klatsch.study.summary import Row

PAPER_ROUNDS = 100_000  # sentences on the network's error term are about so many rounds: it shrinks like 1 / T


def figure_1(rows: Sequence[Row]) -> list[Verdict]:
    """Section 5.1, on the final error against the number of machines."""
    here = "Section 5.1, figure 1"
    ring, torus, peer = "ring", "torus", "one_peer_exponential"
    return [
        per_panel("D-SGD gets worse with M on the ring from M = 4", here, rows, points_of("dsgd", ring, grows_from(4))),
        per_panel(
            "D-SGD gets worse with M on the torus from M = 9", here, rows, points_of("dsgd", torus, grows_from(9))
        ),
        per_panel("D-SGD stays about the same on the exponential graph", here, rows, points_of("dsgd", peer, flat)),
        per_panel(
            "DAT improves steadily with M on the torus", here, rows, points_of("dat", torus, falls()), PAPER_ROUNDS
        ),
        per_panel("DAT improves steadily with M on the exponential graph", here, rows, points_of("dat", peer, falls())),
        per_panel("DAT improves on the ring up to M = 25", here, rows, points_of("dat", ring, falls(25)), PAPER_ROUNDS),
        per_panel(
            "DAT deteriorates on the ring beyond a threshold between M = 25 and M = 49",
            here,
            rows,
            points_of("dat", ring, turns(25, 49)),
            PAPER_ROUNDS,
        ),
        per_panel(
            "DAT enables improvement for larger M: its best M is above D-SGD's on every graph", here, rows, _larger_best
        ),
    ]


def figures_4_to_6(rows: Sequence[Row], topology: str) -> list[Verdict]:
    """Appendix, on the course of the error over the rounds."""
    here = "Appendix, additional experimental results"
    claims = [
        ("D-SGD does not end better with more machines than 9", points_of("dsgd", topology, never_helps(9)), 1),
        ("D-SGD is better with larger M in the first rounds", _first_rounds(relative=False), 1),
        ("D-SGD is so also in relation to where it starts (the start is nearer for larger M)", _first_rounds(True), 1),
    ]
    if topology != "one_peer_exponential":
        claims.append(("D-SGD with larger M falls behind later", points_of("dsgd", topology, last_is_worse), 1))
    if topology == "one_peer_exponential":
        claims.append(("D-SGD ends at about the same error for all M", points_of("dsgd", topology, flat), 1))
    if topology == "ring":
        claims.append(
            ("DAT improves from M = 9 to 25", points_of("dat", topology, step(9, 25, up=False)), PAPER_ROUNDS)
        )
        claims.append(
            ("DAT is worse at M = 100 than at 25", points_of("dat", topology, step(25, 100, up=True)), PAPER_ROUNDS)
        )
    else:
        needed = PAPER_ROUNDS if topology == "torus" else 1
        claims.append(("DAT improves steadily with M", points_of("dat", topology, falls()), needed))
    where = {"one_peer_exponential": "exponential graph"}.get(topology, topology)
    ours = "a check of ours on the sentence before"
    return [
        per_panel(f"{claim}, on the {where}", ours if "in relation to" in claim else here, rows, find, needed)
        for claim, find, needed in claims
    ]


def beyond(rows: Sequence[Row]) -> list[Verdict]:
    """Beyond the paper: whether any variant lifts the ring's ceiling, and whether cta costs accuracy."""
    here = "beyond the paper"
    variants = list(dict.fromkeys(row.rule for row in rows))
    verdicts = [
        per_panel(
            f"{rule} has no ceiling on the ring: its error does not grow up to M = {max(row.nodes for row in rows)}",
            here,
            rows,
            points_of(rule, "ring", no_ceiling),
            PAPER_ROUNDS,
        )
        for rule in variants
    ]
    if {"dat", "dat (cta)"} <= set(variants):
        verdicts.append(per_panel("cta costs accuracy: dat (cta) is worse than dat", here, rows, _cta))
    for rule in ("dsgd", "gt"):
        if f"{rule} (average constant)" in variants:
            claim = f"the average of {rule}'s iterates is better than the last one"
            verdicts.append(per_panel(claim, here, rows, _averages(rule)))
    return verdicts


def _larger_best(rows: Sequence[Row]) -> Answer:
    texts, holds = [], True
    for topology in dict.fromkeys(row.topology for row in rows):
        of = {rule: {r.nodes: r for r in rows if (r.rule, r.topology) == (rule, topology)} for rule in ("dsgd", "dat")}
        if not all(of.values()):
            return None, f"dat or dsgd was not run on {topology}"
        best = {rule: best_size(points) for rule, points in of.items()}
        holds = holds and best["dat"] > best["dsgd"]
        texts.append(f"{topology}: dat is best at M = {best['dat']}, dsgd at {best['dsgd']}")
    return holds, "; ".join(texts)


def _first_rounds(relative: bool) -> Callable[[Sequence[Row]], Answer]:
    """Whether the most machines are ahead of the fewest at some early round, each at its own learning rate."""

    def found(rows: Sequence[Row]) -> Answer:
        mine = {row.nodes: row for row in rows if row.rule == "dsgd"}
        if len(mine) < 2:
            return None, "dsgd was not run at two sizes"
        few, many = mine[min(mine)], mine[max(mine)]
        first, last = few.curve.mean(axis=0), many.curve.mean(axis=0)
        if relative:
            first, last = first / first[0], last / last[0]
        better = [t for t, a, b in zip(few.steps, first, last, strict=True) if b < a / SLACK]
        text = f"M = {many.nodes} against {few.nodes}: "
        if not better:
            return False, text + "never better"
        return better[0] <= few.steps[-1] // 10, text + f"better from round {better[0]:,} to {better[-1]:,}"

    return found


def _cta(rows: Sequence[Row]) -> Answer:
    ratios = _ratios(rows, "dat (cta)", "dat")
    if not ratios:
        return None, "was not run"
    high = max(ratios, key=lambda pair: pair[0])
    middle = median(ratio for ratio, _ in ratios)
    return middle > SLACK, f"{middle:.3g} times dat's error in the middle, at most {high[0]:.3g} ({high[1]})"


def _averages(rule: str) -> Callable[[Sequence[Row]], Answer]:
    def found(rows: Sequence[Row]) -> Answer:
        ratios = _ratios(rows, f"{rule} (average constant)", rule)
        if not ratios:
            return None, "was not run"
        middle, low, high = median(r for r, _ in ratios), min(ratios), max(ratios)
        return (
            middle < 1,
            f"{middle:.3g} times in the middle, from {low[0]:.3g} ({low[1]}) to {high[0]:.3g} ({high[1]})",
        )

    return found


def _ratios(rows: Sequence[Row], above: str, below: str) -> list[tuple[float, str]]:
    error = {(row.rule, row.topology, row.nodes): row.value for row in rows}
    pairs = [
        (error[above, t, M] / error[below, t, M], f"{t}, M = {M}")
        for rule, t, M in error
        if rule == below and (above, t, M) in error
    ]
    return [pair for pair in pairs if math.isfinite(pair[0])]
