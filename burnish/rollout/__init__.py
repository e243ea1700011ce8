"""Generators of completions."""
