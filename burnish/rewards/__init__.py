"""What completions are worth: reward functions in the signatures of TRL and verl, and the pool that calls them."""
