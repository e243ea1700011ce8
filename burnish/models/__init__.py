"""Models: loading, canonical names, packed attention, log-probs, FLOPs."""
