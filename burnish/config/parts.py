"""Names of the parts of a reward: in metrics, rollout files and settings.

Further numbers of a verl function are FUNCTION/NAME; only its answers tell which (`burnish.rewards.pool`).
"""

from __future__ import annotations

from burnish.config.schema import RewardConfig, RewardModelConfig


def model_name(model: RewardModelConfig) -> str:
    """What a reward model is called: as its settings say, or after its directory."""
    return model.name or model.path.rstrip("/").rpartition("/")[2]


def part_names(config: RewardConfig) -> list[str]:
    """The functions' own names, then those of the models; the second of a name is `name_2`."""
    given = [function.function.rpartition(":")[2] for function in config.functions]
    given += [model_name(model) for model in config.models]
    names: list[str] = []
    for base in given:
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return names
