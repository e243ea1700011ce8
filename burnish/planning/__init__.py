"""What a run will need and how long it will take, from its configuration alone; neither torch nor transformers."""
