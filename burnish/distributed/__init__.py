"""Processes, devices, collectives, memory of the host."""
