"""`burnish plan`: memory and time of a run, without torch."""
