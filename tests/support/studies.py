"""Studies that several test files run: a small one, and a slice of the paper's figure 1."""

SMALL = {"steps": 50, "nodes": [4, 6], "seeds": 2, "lr": [0.001, 0.01], "rules": ["dat"], "topologies": ["ring"]}
SMALL |= {"record": 5}  # every point takes as long as many rounds

# The grid and settings of figure 1, 100,000 rounds.
PAPER = """
steps = 100000
nodes = [25, 36]
seeds = 1
record = 20
dtype = "float32"
rules = ["dat", "dsgd"]
topologies = ["ring"]
problem = { noise = [1.0, 10.0], heterogeneity = [1.0, 10.0] }
"""
