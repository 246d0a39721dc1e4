"""The names of rules: each stands for a product of parts, with defaults of its own.

A product is a pattern, maybe a direction, maybe `outer`, maybe `anytime`: "corrected+anytime", "push+adam". One without
a name here is written like that, wherever a rule has a name. An option goes to the part that has it.
"""

ROBUST = "robust to heterogeneous data"
SCHEDULE_FREE = {"averaging": "lr(2)", "beta": 0.9, "beta1": 0.0}

# By name: the product, its own defaults, and a line about it. A rule's place is its colour and marker in figures: add
# new ones at the end. `klatsch list` runs this file by itself, so it imports nothing.
ALIASES: dict[str, tuple[str, dict[str, object], str]] = {
    "dsgd": ("plain", {}, "D-SGD, the baseline: step along your own gradient, then average with your neighbours."),
    "dat": ("plain+anytime", {}, "DAT-SGD, the paper's rule: gradients at, or near, an average x of the iterates."),
    "d2": ("corrected", {}, f"D2, {ROBUST}; on static symmetric graphs."),
    "gt": ("tracked", {}, f"Gradient tracking, {ROBUST}; twice the messages of D-SGD."),
    "sgp": ("push", {}, "Stochastic gradient push, for directed graphs."),
    "decentlam": ("decentlam", {}, "DecentLaM: momentum that does not amplify the differences between nodes."),
    "dat-gt": ("tracked+anytime", {}, "DAT over gradient tracking."),
    "dat-d2": ("corrected+anytime", {}, f"DAT over D2, {ROBUST}."),
    "dat-sgp": ("push+anytime", {}, "DAT over push-sum, for directed graphs."),
    "qg": ("qg", {}, "QG-DSGDm: momentum that follows the models after gossip, for heterogeneous data."),
    "diloco": ("plain+outer", {}, "DiLoCo: local steps, then an outer step with Nesterov momentum; use complete/16."),
    "dadam": ("plain+adam", {}, "AdamW on every node, then gossip: for transformers, best with shared=true."),
    "dat-adam": ("plain+adam+anytime", SCHEDULE_FREE, "Schedule-free AdamW on every node, with gossip of w and x."),
    "d2-adam": ("corrected+adam", {"shared": "v"}, "AdamW with the correction of D2, on static symmetric graphs."),
    "gt-adam": ("tracked+adam", {}, f"AdamW of the tracked gradient, {ROBUST}."),
    "dat-d2-adam": ("corrected+adam+anytime", SCHEDULE_FREE | {"shared": "v"}, "Schedule-free d2-adam."),
    "dat-gt-adam": ("tracked+adam+anytime", SCHEDULE_FREE, f"Schedule-free AdamW of the tracked gradient, {ROBUST}."),
    "diloco-adam": ("plain+adam+outer", {}, "DiLoCo as published: local steps of AdamW, then outer Nesterov steps."),
    "kgt": ("kgt", {}, f"K-GT: gradient tracking for local steps, {ROBUST}; use a graph such as ring/4."),
    "muon": ("plain+muon", {}, "Muon on every node, then gossip: for hidden matrices, best with shared=true."),
    "gasloc": ("plain+outer", {"outer_lr": 1.0, "outer_momentum": 0.5}, "GASLoC: gossip that accelerates itself."),
    "noloco": (
        "plain+outer",
        {"outer_momentum": 0.5, "nesterov": False},
        "NoLoCo's outer step with its gamma = 1; use a graph such as random_matching/16.",
    ),
}
NAMES = {product: name for name, (product, _, _) in reversed(ALIASES.items())}  # the first one, if it has several
