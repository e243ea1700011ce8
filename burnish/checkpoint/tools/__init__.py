"""Diff, export, import."""
