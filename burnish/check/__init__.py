"""The layout's self-check."""
