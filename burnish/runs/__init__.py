"""The life of a run: its directory, inputs, models, state, saves and end."""
