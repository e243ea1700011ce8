"""Checks of a layout and of a machine."""
