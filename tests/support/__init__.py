"""What tests of several packages share. `tests/README.md` says which package has the helper for a job."""
