"""One process per node: `node` runs its rounds, `links` carry its messages, `membership` knows who is left."""
