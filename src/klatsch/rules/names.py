"""The names of rules: each stands for a product of parts, with defaults of its own.

A product is a pattern, maybe a direction, and maybe `anytime`: "corrected+anytime", "push+adam". One that has no name
here is written like that, wherever a rule has a name. An option goes to the part that has it.
"""

# By name: the product, its own defaults, and a line about it. A rule's place is its colour and marker in figures: add
# new ones at the end. `klatsch list` reads this table without importing it.
ALIASES: dict[str, tuple[str, dict[str, object], str]] = {
    "dsgd": ("plain", {}, "D-SGD, the baseline: step along your own gradient, then average with your neighbours."),
    "dat": (
        "plain+anytime",
        {},
        "DAT-SGD, the paper's rule: D-SGD with gradients at, or near, an average x of the iterates.",
    ),
    "d2": ("corrected", {}, "D2, robust to heterogeneous data; on static symmetric graphs."),
    "gt": ("tracked", {}, "Gradient tracking, robust to heterogeneous data; twice the messages of D-SGD."),
    "sgp": ("push", {}, "Stochastic gradient push, for directed graphs."),
    "decentlam": ("decentlam", {}, "DecentLaM: momentum that does not amplify the differences between nodes."),
    "dat-gt": ("tracked+anytime", {}, "DAT over gradient tracking."),
    "dat-d2": ("corrected+anytime", {}, "DAT over D2, robust to heterogeneous data."),
    "dat-sgp": ("push+anytime", {}, "DAT over push-sum, for directed graphs."),
    "qg": ("qg", {}, "QG-DSGDm: momentum that follows the models after gossip, for heterogeneous data."),
    "diloco": ("diloco", {}, "DiLoCo: local steps, then outer steps with Nesterov momentum; on complete/16, say."),
    "dadam": ("plain+adam", {}, "AdamW on every node, then gossip: the rule to begin with for transformers."),
    "dat-adam": (
        "plain+adam+anytime",
        {"averaging": "lr(2)", "beta": 0.9, "beta1": 0.0},
        "Schedule-free AdamW on every node, with gossip of iterate and average.",
    ),
    "d2-adam": (
        "corrected+adam",
        {"shared": True},
        "AdamW with the correction of D2, on static symmetric graphs.",
    ),
    "gt-adam": ("tracked+adam", {}, "AdamW of the tracked gradient, robust to heterogeneous data."),
    "dat-d2-adam": (
        "corrected+adam+anytime",
        {"averaging": "lr(2)", "beta": 0.9, "beta1": 0.0, "shared": True},
        "Schedule-free AdamW with the correction of D2, on static symmetric graphs.",
    ),
    "dat-gt-adam": (
        "tracked+adam+anytime",
        {"averaging": "lr(2)", "beta": 0.9, "beta1": 0.0},
        "Schedule-free AdamW of the tracked gradient, robust to heterogeneous data.",
    ),
    "diloco-adam": ("diloco+adam", {}, "DiLoCo as published: local steps of AdamW, then outer Nesterov steps."),
}
NAMES = {product: name for name, (product, _, _) in ALIASES.items()}
