"""What methods share: rollouts, updates of a policy, critics, judges, evaluations."""
