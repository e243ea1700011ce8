from __future__ import annotations

import pytest
from pydantic import ValidationError

from burnish.config.keys import known_keys
from burnish.config.schema import OptimConfig, RolloutConfig, RunConfig


def test_there_are_few_settings() -> None:
    assert sum(not key.section for key in known_keys().values()) <= 240


def test_every_field_and_section_says_what_it_means() -> None:
    undocumented = [name for name, key in known_keys().items() if len(key.doc) < 10]
    assert undocumented == []
    assert RunConfig.__doc__


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (RolloutConfig, "n", True),
        (RolloutConfig, "temperature", False),
        (RolloutConfig, "temperature", float("nan")),
        (OptimConfig, "lr", float("inf")),
        (OptimConfig, "betas", [0.9, 1.0]),
        (OptimConfig, "betas", [0.9]),
        (RolloutConfig, "stop", [""]),
        (RolloutConfig, "stop_token_ids", [-1]),
        (RolloutConfig, "stop_token_ids", [True]),
        (RunConfig, "nam", "x"),
    ],
)
def test_refused_values(section: type[RunConfig], field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        section.model_validate({field: value})


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        RunConfig().seed = 3
