"""Start the processes of a run, and restart them when one dies."""
