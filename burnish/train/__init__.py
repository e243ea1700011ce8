"""SFT, RL and evaluation."""
