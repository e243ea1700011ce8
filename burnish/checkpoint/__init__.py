"""Checkpoints, format 1: a Hugging Face model and a resumable training state, safe across crashes.

`manager.Checkpoints` saves into and resumes from a run's `checkpoints/`. `layout` plans a step's files, `save` commits it,
`background` saves beside training, and `load` reads shards. `manifest` describes a step, `steps` finds and checks steps,
`retention` removes them; these three load no torch.
"""
