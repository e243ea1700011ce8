"""Translate arguments of other frameworks: an option that only its command loads."""
