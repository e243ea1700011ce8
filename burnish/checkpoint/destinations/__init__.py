"""Mirrors and machines that share no disk."""
