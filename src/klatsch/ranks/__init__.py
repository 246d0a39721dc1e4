"""One process per node: its share of the rule, its links to neighbours, and who is left."""
