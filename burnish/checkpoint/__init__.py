"""Checkpoints, format 1: a Hugging Face model and a resumable training state, safe across crashes.

`manager.Checkpoints` opens a run's `checkpoints/` for saving and resuming. `steps.newest` finds committed steps,
`load.CheckpointSource` fills shards from one, `verify.verify` checks every byte. `steps`, `manifest` and `verify` load no torch.
"""
