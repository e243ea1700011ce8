"""For tests with hostile or random input: files of checkpoints, whole first commands, valid configurations."""
