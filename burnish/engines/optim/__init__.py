"""Optimizers and where their state is kept."""
