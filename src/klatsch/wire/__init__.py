"""How a mix travels: what a rule sends in a round, and when it may leave."""
