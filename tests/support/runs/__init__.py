"""For tests that train: the files of a run of seconds, the command in a process, and what two runs have in common."""
