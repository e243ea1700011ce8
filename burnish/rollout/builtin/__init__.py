"""The built-in generator."""
