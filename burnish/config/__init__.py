"""Typed configuration: the schema, reading, checking and comparing."""
