"""The command line: read arguments, check settings without torch, start trainers."""
