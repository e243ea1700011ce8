"""The command line: reads arguments, checks what can be checked without torch, starts trainers."""
