"""The training loops: SFT, RL and evaluation, as functions that run in every process."""
