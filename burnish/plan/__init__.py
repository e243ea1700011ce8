"""Memory and time of a run, without torch."""
