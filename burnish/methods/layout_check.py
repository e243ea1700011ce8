"""`burnish check`: compare one step of a small model at the run's layout with plain transformers in one process.

The comparison is the one before a run (`burnish.check.family_proof`), with the run's own settings of the engine, in fp32, and nothing is
remembered. The generator and speed are not checked.
"""

from __future__ import annotations

import torch

from burnish.check.comparison import report, require_equal
from burnish.check.family_proof import compare_layout
from burnish.check.plain_model import Difference
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.method import Method
from burnish.methods.parts.critic import critic_foundation
from burnish.runs.download_inputs import local_inputs
from burnish.runs.setup import Foundation, lay_foundation


def check_layout(config: RunConfig, method: Method) -> None:
    """Compare the models that a method trains, and print the distances. Raises `BurnishError` naming the first tensor that differs."""

    def run(layout: Layout, device: torch.device) -> None:
        policy = lay_foundation(local_inputs(config, device, layout, method=method)[1])
        for name, foundation in checked_models(policy).items():
            differences = compare_model(foundation, layout, device)
            if layout.is_main:
                print(f"{name}:", *report(differences), sep="\n")
            require_equal(differences, layout)
        if layout.is_main:
            print(f"{layout.world} processes compute what one plain process does")

    launch(run, config.distributed, config.engine)


def checked_models(policy: Foundation) -> dict[str, Foundation]:
    """Return the models that a run trains, by name."""
    config = policy.config
    if config.scores and config.algorithm.advantage.name == "gae":
        return {"policy": policy, "critic": critic_foundation(policy)}
    return {"policy": policy}


def compare_model(foundation: Foundation, layout: Layout, device: torch.device) -> list[Difference]:
    """Compare a small model like that of a run. Collective."""
    settings = foundation.config.engine.model_copy(update={"precision": "fp32"})
    lora = foundation.config.model.adapter if foundation.adapter else None
    return compare_layout(foundation.hf_config, settings, lora, layout, device)
