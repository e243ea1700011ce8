"""Checkpoints, format 1: a Hugging Face model and a resumable training state, safe across crashes.

`manager.Checkpoints` opens a run's `checkpoints/` for saving and resuming. `layout` plans a step's files, `save` writes and commits
it, `background` has a process beside training do that, and `load` fills shards from it. `manifest` is what a step says of itself;
`steps` finds steps and checks what is read of them; `retention` lets steps go. These last three load no torch.
"""
