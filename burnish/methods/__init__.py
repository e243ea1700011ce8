"""The methods: what a run learns, from rows to updates."""
