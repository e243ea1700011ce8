"""A plan for rows as they are, and for rows as long as allowed."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.cli.plan import fit
from burnish.config.schema import RunConfig
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner

LLAMA = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
DEVICES = parse_devices("1xCPU-64G")


def planner(method: str, row_tokens: int | None = None, **settings: Any) -> Planner:
    config = RunConfig.model_validate({"engine": {"precision": "fp32"}, **settings})
    return Planner(
        ModelShape.of(LLAMA),
        config,
        METHODS[method],
        DEVICES,
        positions=8192,
        row_tokens=row_tokens,
    )


@pytest.mark.parametrize(
    ("method", "settings", "length"),
    [
        ("sft", {"batch": {"tokens_per_device": 16384}}, 8192),
        ("sft", {"data": {"max_length": 9000}, "batch": {"tokens_per_device": 16384}}, 8192),
        ("sft", {"data": {"max_length": 300}}, 300),
        ("rl", {"rollout": {"max_response_length": 24}}, 512 + 24),
        ("rl", {"rollout": {"max_response_length": 8000}}, 8192),
    ],
)
def test_no_sequence_is_longer_than_the_model_has_positions(
    method: str, settings: dict[str, Any], length: int
) -> None:
    assert planner(method, **settings).work.length == length


def test_known_rows_take_the_place_of_the_limits() -> None:
    assert planner("sft", 44).work.length == 44
    assert planner("rl", 50, rollout={"max_response_length": 24}).work.length == 74
    assert planner("sft", 9000).work.length == 8192


def test_a_dry_run_plans_both_and_short_rows_take_their_share_of_the_time() -> None:
    plans = {rows: planner("sft", rows).as_configured()[0] for rows in (None, 44)}
    limit, known = plans[None], plans[44]
    assert limit is not None
    assert known is not None
    assert limit.step_seconds > 50 * known.step_seconds
    assert limit.need > known.need
    rows = [
        [name for name, _ in fit(lambda _, mean=None: planner("sft", mean), DEVICES, lengths)]
        for lengths in ([], [40, 44, 48])
    ]
    assert rows == [["at most"], ["as rows are", "at most"]]
