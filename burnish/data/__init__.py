"""Make batches from files."""
