"""Generation: what samples from the current weights."""
