"""Checkpoints, format 1: a Hugging Face model, a resumable training state, and something to trust after a crash.

`directory.Checkpoints` is a run's `checkpoints/`, opened for saving and resuming;
`committed.newest` finds what is on disk; `load.CheckpointSource` fills shards from it;
`verify.verify` checks every byte; `mirror.Sync` copies steps to a URL, from which `resuming.Resuming`
takes them as well. `committed`, `manifest`, `verify` and `mirror` load no torch.
"""
