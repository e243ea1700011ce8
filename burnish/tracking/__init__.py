"""Where the numbers of a run go: metrics and sinks, progress, timing, the run directory, the report."""
