"""Call reward functions in a pool."""
