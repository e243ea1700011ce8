"""Reward functions with TRL's or verl's signature, and the pool that calls them."""
