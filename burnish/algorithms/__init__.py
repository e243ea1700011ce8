"""The formulas of post-training as pure functions: advantages, losses, KL, aggregation, schedules."""
