"""Checkpoints, format 1: a Hugging Face model, a resumable training state, and something to trust after a crash.

`directory.Checkpoints` is a run's `checkpoints/`, opened for saving and resuming; `committed`
lists what is on disk; `load.CheckpointSource` fills shards; `verify` checks every byte. The last
three of the modules below it (`committed`, `manifest`, `verify`) load no torch.
"""
