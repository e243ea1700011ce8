"""What a model talks with during a rollout: tools, games, simulated users. One object of a class is one conversation."""
