"""Generators in processes of their own: the run is that of a generator inside, to the bit, and a lost one stops nobody else."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import committed
from support.models.tiny import save_base, save_classifier
from support.runs.same_runs import assert_same
from support.runs.served import IN_FLIGHT, STILL, Servers, drawn, written
from support.runs.training_files import RL, Command, done, metrics, outcome, ranks, rollouts

from burnish.checkpoint.manifest import AHEAD
from burnish.config.schema import RunConfig
from burnish.data.loader import order
from burnish.runs.pending_batches import read_ahead

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (1, 0, {}),
    "ahead": (1, 1, {"algorithm": {"mismatch_cap": 2.0}}),
    "ranks": (2, 1, {}),
    "dynamic": (
        1,
        2,
        {"algorithm": {"dynamic_sampling": {"enabled": True}, "kl": {"coef": 0.1}}},
    ),
    "critic": (
        2,
        1,
        {
            "algorithm": {"advantage": "gae"},
            "critic": {"warmup_steps": 2},
            "engine": {**RL["engine"], "offload_during_rollout": True},
        },
    ),
    "remax": (1, 1, {"algorithm": {"advantage": "remax"}}),
    "judged": (2, 1, {"reward": {"models": [{"path": "judge"}]}}),
    "merged": (2, 1, {"model": {"path": "base", "lora": {"rank": 4}}}),
}
"""Processes, how far ahead, and settings."""


MARKED = [c if c == "ahead" else pytest.param(c, marks=pytest.mark.nightly) for c in CASES]


@pytest.mark.parametrize("case", MARKED)
@pytest.mark.nightly
def test_processes_beside_the_ranks_draw_what_a_generator_inside_draws(
    work: Path, case: str
) -> None:
    save_classifier(work / "judge")
    save_base(work / "base", 0)
    world, ahead, settings = CASES[case]
    found = []
    for place in ("inside", "child"):
        name = f"{case}_{place}"
        config = written(work, name, settings, ahead=ahead, place=place)
        found.append(outcome(done(work, "rl", config, f"name={name}", world=world)))
    assert found[0] == found[1]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_new_weights_in_flight_make_no_token_staler_than_ahead(work: Path, world: int) -> None:
    """Also after a kill in the middle, which loses no batch, repeats none, and goes on with completions that were begun."""
    name = f"flight_{world}"
    config = written(work, name, {**STILL, "steps": 6}, **{**IN_FLIGHT, "ahead": 4})
    begun = {}
    for number, after in ((signal.SIGKILL, 1), (signal.SIGTERM, 2)):
        killed = ranks(work, ["rl", config], world)
        assert killed[0].reached(after)
        for each in killed:
            each.send(number)
        assert {each.wait() for each in killed} <= {-number, 128 + number}
        step = committed(work / "runs" / name / "checkpoints")[-1]
        files = {n: step.path / n for n in step.manifest.files if n.startswith(AHEAD)}
        _, found = read_ahead(step, {n: path.read_bytes() for n, path in files.items()})
        assert any(each.stop_reason is None for each in found.values())
        begun = found | begun
    run = done(work, "rl", config, f"name={name}", world=world)
    assert max(row["rollout/staleness/max"] for row in metrics(run) if row["step"]) <= 4
    places = order(RunConfig.model_fields["seed"].default, 0, 30)
    for key, each in begun.items():
        drawn_in = {(r["prompt_index"], r["sample"]): r for r in rollouts(run, key.step + 1)}
        row = drawn_in[places[key.prompt_key], key.sample]
        assert row["weights_version"] == each.weights_version
    strict = ("rollout.in_flight=false", "rollout.place=inside", "rollout.slots=8")
    wanted = done(work, "rl", config, f"name={name}_strict", *strict)
    assert drawn(run, 6) == drawn(wanted, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_servers_draw_what_as_many_processes_beside_ranks_draw(work: Path, world: int) -> None:
    found = []
    for place in ("child", "servers"):
        name = f"{place}_{world}"
        count = {"servers": world} if place == "servers" else {}
        config = written(work, name, {}, ahead=1, place=place, **count)
        with Servers(work, config, count.get("servers", 0)):
            found.append(outcome(done(work, "rl", config, f"name={name}", world=world)))
    assert found[0] == found[1]
    assert not list((work / "runs" / name / "servers").iterdir())


@pytest.mark.nightly
def test_one_server_is_asked_for_all_ranks(work: Path) -> None:
    config = written(work, "alone", {}, place="servers")
    with Servers(work, config, 1):
        run = done(work, "rl", config, "name=alone", world=2)
    assert_same(run, done(work, "rl", config, "name=beside", "rollout.place=child", world=2))


@pytest.mark.nightly
def test_other_servers_take_over_from_one_that_dies(work: Path) -> None:
    config = written(work, "two", {"steps": 8}, ahead=1, place="servers", servers=2)
    with Servers(work, config, 2) as servers:
        training = Command(work, ["rl", config])
        assert training.reached(3)
        servers.commands[0].send(signal.SIGKILL)
        assert training.wait() == 0, training.output
    wanted = done(
        work, "rl", config, "name=beside_two", "rollout.place=inside", "rollout.servers=1"
    )
    assert_same(work / "runs" / "two", wanted)
    assert "lost" in training.output


@pytest.mark.nightly
def test_a_run_without_servers_ends_by_name_and_goes_on(work: Path) -> None:
    config = written(work, "none_left", {"steps": 8}, ahead=1, place="servers")
    with Servers(work, config, 1) as servers:
        training = Command(work, ["rl", config, "checkpoint.save_every=1"])
        assert training.reached(3)
        servers.commands[0].send(signal.SIGKILL)
        assert training.wait() == 1, training.output
        assert "Traceback" not in training.output
    with Servers(work, config, 1):
        run = done(work, "rl", config, "name=none_left", "checkpoint.save_every=1")
        wanted = done(work, "rl", config, "name=never_lost", "rollout.place=child")
    assert (
        outcome(run).items() >= {k: v for k, v in outcome(wanted).items() if "model" in k}.items()
    )
