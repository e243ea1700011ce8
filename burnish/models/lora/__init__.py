"""LoRA adapters: modules, names, files, merging."""
