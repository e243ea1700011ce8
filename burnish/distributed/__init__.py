"""Processes, devices, collectives, host memory."""
