"""For runs on two layouts or engines: whether both learned the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.tracking.rollouts import read_rollouts, rollout_files
from support.checkpoints.states import committed
from support.runs.training_files import metrics, weights

RL = ["rl", "rl.yaml", "algorithm.kl.coef=0.1", "batch.minibatches=2", "optim.lr=0.005"]
"""A run of reinforcement learning with a reference and more than one update a step; at twice the rate other sums of the same numbers end a hundred times as far apart."""
POSITION = {"step", "cursor", "tokens", "optimizer_steps", "skipped_in_a_row", "roles", "inputs"}
"""What state.json says that does not depend on the layout."""


def assert_same(run: Path, other: Path) -> None:
    """Equal up to the order of sums, which AdamW makes more of from step to step; what was sampled, to the token."""
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        tolerance = 1e-5 if mine["step"] <= 2 else 2e-3
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance / 5)
    found, wanted = weights(run), weights(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if "model.safetensors" in name:  # or adapter_model.safetensors
            torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)
        elif "training/exp_avg" in name:
            assert (found[name] - tensor).norm() <= 5e-2 * tensor.norm(), name
    assert sampled(run) == sampled(other)
    assert position(run) == position(other)


def position(run: Path) -> dict[str, Any]:
    """Where the newest step says that the run is, in its data above all."""
    state = committed(run / "checkpoints")[-1].state
    assert state.keys() >= POSITION
    return {name: state[name] for name in sorted(POSITION)}


def sampled(run: Path) -> list[tuple[Any, ...]]:
    """What was generated, to the token, and how it was judged."""
    return sorted(
        (row["step"], row["prompt_index"], row["sample"], row["completion"], row["reward"])
        for _, path in rollout_files(run / "rollouts")
        for row in read_rollouts(path)
    )
