"""Call reward functions with TRL's or verl's signature in a pool."""
