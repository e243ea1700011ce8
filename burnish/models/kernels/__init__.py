"""Attention, fused layers, Ulysses: one dispatch each."""
