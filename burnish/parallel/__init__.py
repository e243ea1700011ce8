"""Processes, what they hold, and what they say to each other."""
