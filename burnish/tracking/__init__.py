"""Record a run's numbers: metrics and sinks, progress, timing, the run directory, the report."""
