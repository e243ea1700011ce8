"""Where the processes of a run come from."""
