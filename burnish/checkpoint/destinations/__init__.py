"""Mirrors: copies of a run behind a URL."""
