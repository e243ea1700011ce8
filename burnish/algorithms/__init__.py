"""The formulas of post-training as pure functions."""
