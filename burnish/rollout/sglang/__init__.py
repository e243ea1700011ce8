"""Rollouts with SGLang."""
