"""What `batch.tokens_per_device: auto` is: from lengths alone, and on described devices."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.known_sizes import QWEN3_8B, QWEN3_30B_A3B
from support.nightly import draws
from support.ranks.processes import run_ranks
from support.runs.training_files import burnish, make_files

from burnish.cli.main import main
from burnish.config.document import dump_yaml, recorded
from burnish.config.out_of_memory_hints import remedies
from burnish.config.schema import AUTO_TOKENS, RunConfig
from burnish.distributed.device import device_name
from burnish.distributed.layout import Layout
from burnish.launch import accelerated
from burnish.launch.elastic import planned_tokens, planner_of
from burnish.methods.table import METHODS
from burnish.plan.devices import Devices, parse_devices
from burnish.plan.layout_search import Plan
from burnish.tracking.rundir import RunDirectory

EIGHT = parse_devices("8xH100-80G")
MIXTURE = {
    "model": {"fresh": QWEN3_30B_A3B, "tokenizer": "t"},
    "engine": {"activation_checkpointing": "full"},
    "data": {"train": ["t.jsonl"], "max_length": 4096},
    "batch": {"examples": 512},
}


def config_of(values: dict[str, Any] = MIXTURE, **more: dict[str, Any]) -> RunConfig:
    whole = values | {name: values.get(name, {}) | each for name, each in more.items()}
    return RunConfig.model_validate(whole)


def plan_of(config: RunConfig, devices: Devices = EIGHT, method: str = "sft") -> Plan:
    plan, refused = planner_of(config, METHODS[method], devices).as_configured()
    assert plan is not None
    assert refused is None
    return plan


def decided(
    config: RunConfig, devices: Devices | None, method: str = "sft", run: RunDirectory | None = None
) -> tuple[int, str]:
    """What a run takes on the devices, and why."""
    tokens, why = planned_tokens(partial(planner_of, config, METHODS[method]), devices, run)
    return METHODS[method].with_tokens(config, tokens).batch.tokens, why


LENGTHS = st.integers(2, 100_000)


@draws(60)
@given(
    method=st.sampled_from(["sft", "dpo", "rl", "online-dpo"]),
    longest=st.none() | LENGTHS,
    prompt=st.none() | LENGTHS,
    response=LENGTHS,
    sharing=st.sampled_from([1, 2, 4]),
)
def test_without_a_device_it_is_what_the_lengths_need(
    method: str, longest: int | None, prompt: int | None, response: int, sharing: int
) -> None:
    config = config_of(
        data={"max_length": longest, "max_prompt_length": prompt},
        rollout={"max_response_length": response},
        engine={"sequence_parallel": sharing},
        reward={"functions": [{"function": "numeric"}]},
        algorithm={"overlong": {"buffer": 0}},
    )
    METHODS[method].size_problems(config, 1)
    assert [*METHODS[method].size_problems(config, 1)] == []
    least = METHODS[method].with_tokens(config)
    completed = response + (prompt or 0)
    needed = {"sft": longest or 0, "dpo": 2 * (longest or 0), "rl": completed}
    needed["online-dpo"] = 2 * completed
    assert least.microbatch_tokens >= max(needed[method], AUTO_TOKENS * sharing)
    if prompt:  # otherwise there is room for one
        assert least.batch.tokens == max(AUTO_TOKENS, -(-needed[method] // sharing))
    limit = config.sequence_limit(needed[method])
    larger = METHODS[method].with_tokens(config, 8 * least.batch.tokens)
    assert larger.batch.tokens == 8 * least.batch.tokens
    assert larger.sequence_limit(needed[method]) == least.sequence_limit(needed[method]) == limit


@pytest.mark.parametrize("number", [2, 8192, 65536])
def test_a_number_stays_as_it_is(number: int) -> None:
    config = config_of(batch={"tokens_per_device": number}, data={"max_length": None})
    assert METHODS["sft"].with_tokens(config, 4 * number) == config
    assert config.sequence_limit(9) == config.microbatch_tokens == number


def test_a_mixture_gets_more_where_it_fits() -> None:
    tokens, _ = decided(config_of(), EIGHT)
    assert tokens > AUTO_TOKENS
    plan = plan_of(config_of(batch={"tokens_per_device": f"auto:{tokens}"}))
    least = plan_of(config_of(batch={"tokens_per_device": AUTO_TOKENS}))
    assert plan == plan_of(config_of()) == plan_of(config_of(batch={"tokens_per_device": tokens}))
    assert plan.fits
    assert plan.step_seconds < 0.95 * least.step_seconds
    of_tokens = plan.need - plan.phases["update"]["weights"] - plan.phases["update"]["optimizer"]
    assert plan.need + 0.25 * of_tokens <= EIGHT.usable


def test_it_stays_the_least_where_more_gains_nothing_or_does_not_fit() -> None:
    dense = config_of(model={"fresh": QWEN3_8B})
    tight = replace(EIGHT, memory=1.001 * plan_of(config_of()).need / 0.94)
    for config, devices in ((dense, EIGHT), (config_of(), tight)):
        assert decided(config, devices)[0] == AUTO_TOKENS
    cpus = parse_devices("8xCPU-800G")
    assert decided(config_of(), cpus)[0] == AUTO_TOKENS
    assert plan_of(config_of(), cpus).tokens == AUTO_TOKENS


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        (config_of(model={"fresh": {"model_type": "unheard_of"}}), EIGHT),
        (config_of(model={"fresh": QWEN3_8B | {"num_hidden_layers": "many"}}), EIGHT),
        (config_of(model={"fresh": None, "path": "/nowhere"}), EIGHT),
        (config_of(engine={"kind": "mine.py:Engine"}), EIGHT),
        (config_of(data={"max_length": 20_000}), None),
        (config_of(), parse_devices("1xH100-80G")),
    ],
)
def test_it_stays_the_least_where_nothing_can_be_planned(
    config: RunConfig, devices: Devices | None
) -> None:
    tokens, why = decided(config, devices)
    assert tokens == METHODS["sft"].with_tokens(config).batch.tokens
    assert why


def test_a_run_goes_on_with_what_it_recorded_on_equal_devices(tmp_path: Path) -> None:
    def begun(tokens: int | str, device: str = "H100", processes: int = 8) -> int:
        config = config_of({**MIXTURE, "output_dir": str(tmp_path), "name": "run"})
        before = {"batch": MIXTURE["batch"] | {"tokens_per_device": tokens}}
        directory = RunDirectory(config.directory)
        directory.root.mkdir(exist_ok=True)
        directory.config.write_text(dump_yaml(config.model_copy(update=_validated(before))))
        directory.write_environment({"device": device, "processes": processes})
        return decided(config, EIGHT, run=directory)[0]

    planned = plan_of(config_of()).tokens
    assert begun("auto:81920") == 81920
    assert begun("auto:81920", device="H200") == planned
    assert begun("auto:81920", processes=4) == planned
    assert begun("auto") == planned
    assert begun(8192) == 8192  # what it was by default in earlier versions
    assert begun(16384) == planned  # who chose a number and removes it wants another


def _validated(values: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(RunConfig.model_validate(values), name) for name in values}


def test_the_settings_may_name_what_a_run_recorded() -> None:
    config = config_of(batch={"tokens_per_device": "auto:24576"})
    assert METHODS["sft"].with_tokens(config) == config
    assert plan_of(config).tokens == 24576
    longer = config_of(batch={"tokens_per_device": "auto:24576"}, data={"max_length": 30_000})
    assert METHODS["sft"].with_tokens(longer).batch.tokens == 30_000
    measured = METHODS["eval"].with_tokens(config)  # perhaps on other devices
    assert measured.batch.tokens == AUTO_TOKENS


def test_a_layout_that_shares_sequences_has_as_much_room_as_they_need() -> None:
    config = config_of(data={"max_length": 3 * AUTO_TOKENS})
    plans = planner_of(config, METHODS["sft"], EIGHT).all_plans()
    shared = {plan.engine.sequence_parallel for plan in plans}
    assert len(shared) > 1
    for plan in plans:
        assert plan.tokens * plan.engine.sequence_parallel >= 3 * AUTO_TOKENS
        assert plan.tokens >= AUTO_TOKENS


def test_less_memory_is_a_number_too() -> None:
    for tokens, wanted in (
        (65536, "batch.tokens_per_device=32768"),
        ("auto:65536", "batch.tokens_per_device=auto:32768"),
        ("auto:8192", "batch.tokens_per_device=4096"),
        ("auto", "batch.tokens_per_device=4096"),
    ):
        config = config_of(batch={"tokens_per_device": tokens})
        assert wanted in remedies(config, False, "update", on_cpu=False)
    long = config_of(batch={"tokens_per_device": "auto:20000"}, data={"max_length": 20_000})
    # A pair of answers needs twice as much, so auto would be 20,000 again.
    for method, wanted in (("sft", "auto:10000"), ("dpo", "10000")):
        config = config_of(batch={"tokens_per_device": "auto:20000"}, data={"max_length": 9_000})
        longest = METHODS[method].longest(config)
        hints = remedies(config, False, "update", on_cpu=False, longest=longest)
        assert f"batch.tokens_per_device={wanted}" in hints
    longest = METHODS["sft"].longest(long)
    hints = remedies(long, False, "update", on_cpu=False, longest=longest)
    assert "batch.tokens_per_device=10000" in hints


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_plan_and_dry_run_show_what_a_run_takes(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = {**MIXTURE, "engine": {"activation_checkpointing": "full"}}
    if command == "rl":
        values["reward"] = {"functions": [{"function": "numeric"}]}
        values["batch"] = {"prompts": 128}
        values["rollout"] = {"max_response_length": 4096, "engine": "vllm", "place": "child"}
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(RunConfig.model_validate(values)))
    argv = ["plan", str(path), "--devices", "64xH100-80G"]
    assert main([*argv, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    devices = parse_devices("64xH100-80G")
    config = METHODS[command].named(RunConfig.model_validate(values))
    tokens, _ = decided(config, devices, command)
    assert said["configured"]["plan"]["tokens_per_device"] == tokens
    assert main(argv) == 0
    best = said["plans"][0]["tokens_per_device"]
    assert f"at most {best} tokens on each device (auto)" in capsys.readouterr().out


def _decide(layout: Layout) -> RunConfig:
    with_tokens = partial(METHODS["sft"].with_tokens, config_of())
    planner = partial(planner_of, config_of(), METHODS["sft"])
    return accelerated.decided(with_tokens, planner, None, layout, torch.device("cpu"))


def test_ranks_agree_on_a_device_that_the_planner_does_not_know() -> None:
    # A CPU stands in for it: its name is in no table.
    assert run_ranks(_decide, 2) == [METHODS["sft"].with_tokens(config_of())] * 2


def test_devices_are_those_that_torch_sees() -> None:
    name = "NVIDIA H100 80GB HBM3"
    seen = accelerated._devices(Layout(world=8), name, 20e9)  # a part of one, as MIG makes
    assert seen is not None
    assert (seen.count, seen.memory, seen.kind) == (8, 20e9, EIGHT.kind)
    assert accelerated._devices(Layout(), device_name(torch.device("cpu")), 1e9) is None


def test_a_run_on_the_cpu_records_it_and_longer_rows_need_no_second_setting(tmp_path: Path) -> None:
    make_files(tmp_path)
    more = ["steps=1", "batch.tokens_per_device=auto"]
    for length, tokens in ((9000, 9000), (64, AUTO_TOKENS)):
        argv = ["sft", "sft.yaml", *more, f"name=to-{length}", f"data.max_length={length}"]
        code, output = burnish(tmp_path, *argv)
        assert code == 0, output
        before = recorded(tmp_path / f"runs/to-{length}/config.yaml")
        assert before.batch.tokens_per_device == f"auto:{tokens}"
