"""Rollouts with vLLM."""
