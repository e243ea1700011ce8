"""Runs whose completions vLLM draws: those of the built-in generator, to the byte. Runs in .venv-vllm (see the Makefile)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import committed
from support.models.tiny import save_base
from support.models.tokenizers import char_tokenizer
from support.ranks.fork_server import ANEW, TESTS
from support.runs.served import IN_FLIGHT, STILL, Servers, beside, drawn, written
from support.runs.training_files import FRESH, RL, Command, burnish, done, metrics, rollouts

pytest.importorskip("vllm", exc_type=ImportError)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

WIDE = {**FRESH, "hidden_size": 64, "head_dim": 32}
"""vLLM's attention on CPUs wants heads of 32 and more."""
UNTIED = {**WIDE, "tie_word_embeddings": False}
MIXTURE = {
    **WIDE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tied": (1, "child", {"model": {**RL["model"], "fresh": WIDE}}),
    "untied": (1, "servers", {"model": {**RL["model"], "fresh": UNTIED}}),
    "ranks": (2, "child", {"model": {**RL["model"], "fresh": WIDE}}),
    "shared": (2, "child", {"model": {**RL["model"], "fresh": WIDE}}),
    "mixture": (1, "child", {"model": {**RL["model"], "fresh": MIXTURE}}),
    "replay": (
        2,
        "servers",
        {"model": {**RL["model"], "fresh": MIXTURE}, "algorithm": {"router_replay": "rollout"}},
    ),
    "merged": (1, "child", {"model": {"path": "wide", "lora": {"rank": 4}}}),
}
"""Processes, who generates, and settings."""


def digest(run: Path) -> str:
    newest = committed(run / "checkpoints")[-1].path
    files = sorted((newest / "model").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(autouse=True)
def _companions_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Companions start as those of users do, so that the system names the process that started each."""
    monkeypatch.setenv(ANEW, "1")


@pytest.mark.parametrize("case", CASES)
def test_vllm_draws_what_the_built_in_generator_draws(work: Path, case: str) -> None:
    save_base(work / "wide", 0, **WIDE)
    world, place, settings = CASES[case]
    given = {**RL, **settings, "steps": 3, "evaluation": {"before": False, "every": 0}}
    found = []
    for engine, where in (("builtin", "inside"), ("vllm", place)):
        name = f"{case}_{engine}"
        how = {**RL["rollout"], "ahead": 1, "engine": engine, "place": where}
        if (engine, case) == ("vllm", "shared"):
            how["tensor_parallel"] = 2  # one process beside both ranks
        config = work / f"{name}.yaml"
        config.write_text(json.dumps({**given, "name": name, "rollout": how}))
        with Servers(work, str(config), int(where == "servers")):
            run = done(work, "rl", str(config), f"name={name}", world=world)
        found.append(([rollouts(run, step) for step in range(1, 4)], digest(run)))
    assert found[0] == found[1]


PLAYERS = [
    (1, "builtin", "inside"),
    (1, "builtin", "child"),
    (2, "builtin", "inside"),
    (1, "vllm", "child"),
    (1, "vllm", "servers"),
    (2, "vllm", "child"),
    (2, "vllm", "servers"),
]
"""Processes, and who takes the model's turns."""
TALKERS = TESTS / "environments"
TALKING = {
    "model": {**RL["model"], "fresh": {**WIDE, "max_position_embeddings": 192}},
    "data": {**RL["data"], "string_prompts": "user"},
    "batch": {"prompts": 4, "tokens_per_device": 384},
    "reward": {"functions": []},
    "steps": 3,
}
"""Settings of a run with conversations."""
TALKS = {
    "max_response_length": 120,
    "stop_token_ids": char_tokenizer().convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz"]),
    "ahead": 1,
}
"""Settings of its rollouts."""


def test_conversations_have_the_same_bytes_whoever_takes_the_turns(work: Path) -> None:
    """Trajectories and rewards by turn of an environment in waves; weights too, of as many processes."""
    how = {**TALKS, "environment": {"function": f"{TALKERS}/talkers.py:Capitals"}}
    played = {}
    for world, engine, place in PLAYERS:
        name = f"talks_{world}_{engine}_{place}"
        config = written(work, name, TALKING, **how, engine=engine, place=place)
        with Servers(work, config, world * (place == "servers")):
            run = done(work, "rl", config, f"name={name}", world=world)
        played[world, engine, place] = [rollouts(run, step) for step in range(1, 4)], digest(run)
    first, _ = played[PLAYERS[0]]
    assert {row["end"] for step in first for row in step} == {"done"}
    noted = [_without_logprobs(rows) for rows, _ in played.values()]
    assert [each for each in noted if each != noted[0]] == []
    for world in (1, 2):
        assert len({weights for player, (_, weights) in played.items() if player[0] == world}) == 1


@pytest.mark.parametrize("agent", ["capitals", "forgets"])
def test_agents_get_the_same_bytes_from_vllm(work: Path, agent: str) -> None:
    """Agents that ask over HTTP: one goes on in its conversation, one begins a branch."""
    how = {**TALKS, "environment": {"agent": f"{TALKERS}/callers.py:{agent}"}}
    played = []
    for engine, place in (("builtin", "inside"), ("vllm", "child")):
        name = f"{agent}_{engine}"
        config = written(work, name, TALKING, **how, engine=engine, place=place)
        run = done(work, "rl", config, f"name={name}")
        rows = [rollouts(run, step) for step in range(1, 4)]
        assert {row["end"] for step in rows for row in step} == {"done"}
        assert metrics(run)[-1]["environment/branches"] == float(agent == "forgets")
        played.append((_without_logprobs(rows), digest(run)))
    assert played[0] == played[1]


def _without_logprobs(steps: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Their fourth digit may differ, as fp32 rounds sums in another order."""
    none = {"logprobs": None}
    return [[row | {"tokens": row["tokens"] | none} for row in step] for step in steps]


def test_an_adapter_beside_the_model_is_drawn_with_as_a_merged_one(work: Path) -> None:
    """The guard finds no difference at any version, and what the generator says is what the engine says."""
    save_base(work / "wide", 0, **WIDE)
    model = {"path": "wide", "lora": {"rank": 4, "publish": "adapter"}}
    more = {"engine": "vllm", "place": "child", "check_every": 1, "max_disagreement": 1e-4}
    settings = {"model": model, "steps": 3, "evaluation": {"before": False, "every": 0}}
    config = written(work, "beside", {**settings, "optim": {"lr": 1e-2}}, **more)
    rows = [row for row in metrics(done(work, "rl", config, "name=beside")) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/mismatch_kl"] < 1e-6 for row in rows)


@pytest.mark.parametrize(
    ("victim", "rollout"),
    [("child", {"ahead": 1}), ("child", IN_FLIGHT), ("trainer", IN_FLIGHT)],
    ids=["child", "child in flight", "trainer in flight"],
)
def test_a_run_whose_process_is_killed_ends_by_name_and_goes_on(
    work: Path, victim: str, rollout: dict[str, Any]
) -> None:
    name = f"killed_{victim}_{rollout['ahead']}"
    model = {**RL["model"], "fresh": WIDE}
    more = {**rollout, "engine": "vllm", "place": "child"}
    config = written(work, name, {**STILL, "model": model, "steps": 6}, **more)
    training = Command(work, ["rl", config])
    assert training.reached(1), training.output
    (child,) = beside(training)
    if victim == "trainer":
        training.send(signal.SIGKILL)
        assert training.wait() == -signal.SIGKILL
    else:
        os.kill(child, signal.SIGKILL)
        assert training.wait() in (0, 1)  # where nothing is drawn, another one is started
        assert "lost" in training.output
        assert "Traceback" not in training.output
    run = done(work, "rl", config, f"name={name}")
    inside = ("rollout.engine=builtin", "rollout.place=inside", "rollout.in_flight=false")
    wanted = done(work, "rl", config, f"name={name}_in_peace", *inside)
    assert drawn(run, 6) == drawn(wanted, 6)
    if not rollout.get("in_flight"):
        assert digest(run) == digest(wanted)


def test_a_model_that_vllm_does_not_know_is_refused_by_name(work: Path) -> None:
    fresh = json.dumps({**WIDE, "model_type": "helium"})
    asked = [f"model.fresh={fresh}", "rollout.engine=vllm", "rollout.place=child", "name=unknown"]
    for how in ((), ("--dry-run",)):
        code, output = burnish(work, "rl", "rl.yaml", *asked, *how)
        assert code == 4
        assert "helium" in output
        assert "Traceback" not in output
