"""Typed configuration: the schema, reading it, checking it, telling two of them apart."""
