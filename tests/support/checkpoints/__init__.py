"""For tests that save and load: small states, states of real engines, pairs of layouts, layouts cut at random."""
