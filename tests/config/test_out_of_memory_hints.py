"""Settings that need less memory: those of the largest part come first, and what is set is not named."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from burnish.config.frozen_models import reward_models
from burnish.config.out_of_memory_hints import remedies
from burnish.config.schema import RunConfig


def asked(
    trainer: Literal["sft", "rl"], phase: str, *parts: str, on_cpu: bool = False, **sections: Any
) -> list[str]:
    config = RunConfig.model_validate(sections)
    beside = [*reward_models(config)]
    return remedies(config, trainer == "rl", phase, parts, beside, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("part", "phase", "sections", "first"),
    [
        ("activations", "update", {}, "engine.activation_checkpointing=full"),
        ("optimizer", "update", {}, "engine.optimizer_offload=true"),
        ("gathered", "update", {"engine": {"reshard_after_forward": False}}, "engine.reshard_after_forward=true"),
        ("gradients", "update", {"engine": {"reduce_each_microbatch": False}}, "engine.reduce_each_microbatch=true"),
        ("logits", "update", {"engine": {"logprob_chunk": 512}}, "engine.logprob_chunk=128"),
        ("kv cache", "rollout", {"rollout": {"slots": 64}}, "rollout.slots=32"),
        ("weights", "rollout", {}, "engine.offload_during_rollout=true"),
        ("reference", "update", {"algorithm": {"kl": {"coef": 0.1}}}, "algorithm.kl.coef=0"),
        ("reward models", "rollout", {"reward": {"models": [{"path": "m"}]}}, "a smaller model in reward.models[0].path"),
        ("staging", "save", {"checkpoint": {"background": True}}, "checkpoint.background=false"),
        ("weights", "update", {"engine": {"replicas": 2}}, "engine.replicas=1"),
        ("weights", "update", {"engine": {"kind": "megatron"}}, "engine.pipeline_parallel=2"),
        ("gradients", "update", {}, "engine.parameter_offload=true"),
        ("weights", "update", {"optim": {"kind": "muon"}}, "model.lora.rank=16"),
    ],
)  # fmt: skip
def test_the_largest_part_comes_first(
    part: str, phase: str, sections: dict[str, Any], first: str
) -> None:
    others = [each for each in ("activations", "weights", "generator") if each != part]
    assert asked("rl", phase, part, *others, **sections)[0] == first


def test_automatic_slots_are_lowered_where_a_run_has_no_memory_for_them() -> None:
    assert "rollout.slots=256" in asked("rl", "rollout")
    assert not [each for each in asked("rl", "rollout", "kv cache") if "slots" in each]


def test_settings_that_are_set_are_not_named() -> None:
    engine = {
        "activation_checkpointing": "full",
        "optimizer_offload": True,
        "offload_during_rollout": True,
    }
    found = asked("rl", "update", engine=engine) + asked("rl", "rollout", engine=engine)
    names = (
        "engine.activation_checkpointing",
        "engine.optimizer_offload",
        "engine.offload_during_rollout",
    )
    assert not [setting for setting in found if setting.startswith(names)]


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    found = asked("rl", "rollout", on_cpu=True) + asked("sft", "update", on_cpu=True)
    assert not {"engine.offload_during_rollout=true", "engine.optimizer_offload=true"} & set(found)
    assert asked("sft", "update", "host", on_cpu=True, engine={"optimizer_offload": True})[
        0
    ].startswith("no offloading")


def test_supervised_fine_tuning_gets_no_advice_for_reinforcement_learning() -> None:
    found = asked("sft", "update", algorithm={"kl": {"coef": 0.1}})
    assert not [setting for setting in found if "kl" in setting or "rollout" in setting]
    assert found[-1] == "more devices"
