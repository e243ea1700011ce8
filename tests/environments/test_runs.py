"""Training with conversations: it learns, and does the same on other layouts and after kills."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.models.tokenizers import CHATML, SPECIAL, char_tokenizer
from support.runs.same_runs import assert_same
from support.runs.training_files import At, burnish, done, metrics, outcome, rollouts

from burnish.tracking.rollouts import rollouts_path
from burnish.tracking.traces import read_traces
from burnish.tracking.trackers import read_metrics

TALKERS = Path(__file__).with_name("talkers.py")
LETTERS = char_tokenizer().convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz"])
RL = [
    *("rl", "rl.yaml", "reward.functions=[]", "data.string_prompts=user"),
    *("model.fresh.max_position_embeddings=192", "batch.tokens_per_device=384"),
    f"rollout.environment.function={TALKERS}:Capitals",
    *("rollout.max_response_length=120", f"rollout.stop_token_ids={LETTERS}", "steps=4"),
]


def test_conversations_are_trained_on(work):
    run = done(work, *RL, "name=talks")
    rows = rollouts(run, 4)
    assert {row["end"] for row in rows} == {"done"}
    turns = [[m["role"] for m in row["conversation"]] for row in rows]
    assert turns == [["assistant", "user"] * 3] * len(rows)
    assert [m.get("unseen") for m in rows[0]["conversation"]] == [None] * 5 + [True]
    for row in rows:
        mask = row["tokens"]["by_model"]
        said = [text for text, ours in zip(row["tokens"]["texts"], mask, strict=True) if ours]
        told = [m["content"] for m in row["conversation"] if m["role"] == "assistant"]
        assert "".join(text for text in said if text not in SPECIAL) == "".join(told)
        assert row["length"] == sum(mask) < len(mask)
    last = metrics(run)[-1]
    assert last["environment/turns"] == 3
    assert last["environment/ended_done"] == 1
    assert last["environment/failed"] == last["environment/ended_length"] == 0
    timed = read_metrics(run / "metrics.jsonl")[-1]
    parts = timed["timing_s/rollout.generate"], timed["timing_s/rollout.environment"]
    assert 0 < sum(parts) <= timed["timing_s/rollout"]
    trace, *_ = read_traces(rollouts_path(run / "traces", 4))
    kinds = [span["name"].split()[0] for span in trace["spans"]]
    assert kinds == ["rollout", *["environment", "chat"] * 3, "environment"]
    output = (run / "logs" / "rank-0.log").read_text()
    assert "turns 3.0" in output
    assert "failed" not in output
    assert last["rollout/mismatch_kl"] < 1e-5  # what the engine trains is what the generator drew


def rewriting(work):
    """Settings with a template that writes earlier turns in capitals, so that most turns begin a branch."""
    loud = CHATML.replace(
        "message['content'] +",
        "(message['content'] | upper if message['role'] == 'assistant' else message['content']) +",
    )
    (work / "loud.jinja").write_text(loud)
    return ["model.chat_template=loud.jinja", "rollout.environment.history=rendered"]


@pytest.mark.nightly
@pytest.mark.parametrize("history", ["exact", "rendered"])
def test_tokens_have_the_advantage_of_their_turn(work, history):
    settings = ["steps=1", "algorithm.advantage=turn_grpo", f"name=by_turn_{history}"]
    run = done(work, *RL, *settings, *(rewriting(work) if history == "rendered" else ()))
    assert metrics(run)[-1]["rollout/mismatch_kl"] < 1e-5
    talks = defaultdict[tuple[int, int], list](list)
    for row in sorted(rollouts(run, 1), key=lambda row: -row.get("branch", 0)):
        talks[row["prompt_index"], row["sample"]].append(row)
    assert (max(map(len, talks.values())) > 1) == (history == "rendered")
    assert metrics(run)[-1]["environment/turns"] == 3
    paid = {
        key: [
            m["rewards"]["capitals"] for m in rows[-1]["conversation"] if m["role"] == "assistant"
        ]
        for key, rows in talks.items()
    }
    known = 0
    for (prompt, sample), rows in talks.items():
        if "advantages" not in rows[0].get("tokens", {}):
            continue
        group = [turns for (other, _), turns in paid.items() if other == prompt]
        wanted = []
        said = [m for m in rows[-1]["conversation"] if m["role"] == "assistant"]
        for k, message in enumerate(said):
            returns = [sum(turns[k:]) for turns in group]
            own = sum(paid[prompt, sample][k:])
            spread = np.std(returns, ddof=1)
            advantage = (own - np.mean(returns)) / (spread + 1e-6) if spread else 0
            wanted += [advantage] * message["tokens"]
        found = [
            np.array(row["tokens"]["advantages"])[row["tokens"].get("by_model") or slice(None)]
            for row in rows
        ]
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-3)
        known += 1
    assert known


@pytest.mark.nightly
def test_it_learns(work):
    run = done(work, *RL, "name=learns", "steps=40", "optim.lr=0.02", "evaluation.every=0")
    rewards = [row["reward/mean"] for row in metrics(run) if "reward/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["algorithm.advantage=gae", "critic.lr=0.01"],
        [
            "algorithm.advantage=reinforce_plus_plus",
            "algorithm.kl.coef=0.1",
            "algorithm.kl.place=reward",
        ],
        ["rollout.place=child"],
        ["rollout.environment.pace=free"],
        ["algorithm.advantage=turn_grpo"],
        [
            *("algorithm.advantage=turn_grpo", "rollout.environment.history=rendered"),
            *("algorithm.kl.coef=0.1", "algorithm.kl.place=reward"),
        ],
    ],
    ids=["grpo", "ppo", "by token", "child", "free", "by turn", "rendered"],
)
def test_two_processes_do_what_one_does(work, request, settings):
    name = request.node.callspec.id.replace(" ", "_")
    settings = [*settings, *(rewriting(work) if name == "rendered" else ())]
    one = done(work, *RL, *settings, f"name=one_{name}")
    assert_same(done(work, *RL, *settings, f"name=two_{name}", world=2), one)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "place",
    [
        "burnish.methods.parts.conversations:Conversations._say",
        "burnish.methods.parts.conversations:Conversations._hear",
        "burnish.environments.pool:EnvironmentPool.step",
    ],
)
@pytest.mark.parametrize(
    ("nth", "ahead", "history"),
    [(2, 0, "exact"), (9, 0, "exact"), (13, 1, "exact"), (10, 1, "rendered")],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(work, place, nth, ahead, history):
    settings = [*RL, "checkpoint.save_every=1", f"rollout.ahead={ahead}"]
    settings += rewriting(work) if history == "rendered" else []
    whole = done(work, *settings, f"name=whole_{ahead}_{history}")
    argv = [*settings, f"name=killed_{place.rpartition('.')[2]}_{nth}"]
    code, _ = burnish(work, *argv, at=At(place, nth, signal.SIGKILL))
    assert code == -signal.SIGKILL
    assert outcome(done(work, *argv)) == outcome(whole)


PHASES = {
    "sampling": "burnish.methods.parts.conversations:Conversations._say",
    "tools": "burnish.environments.pool:EnvironmentPool.step",
    "scoring": "burnish.rewards.pool:RewardPool.score",
    "backward": "burnish.engines.torch.torch_engine:TorchEngine.forward_backward",
    "optimizer": "burnish.engines.torch.torch_engine:TorchEngine.optim_step",
    "publishing": "burnish.methods.parts.rollouts:RolloutQueue.publish",
    "saving": "burnish.runs.step_saver:StepSaver.save",
    "logging": "burnish.runs.run:Run.finish",
}
"""Where a step's time goes, and the function that takes it."""


@pytest.mark.nightly
@pytest.mark.parametrize("phase", PHASES)
def test_kills_at_random_moments_change_nothing(work, phase):
    """Five for each phase, 40 in all."""
    reward = f"reward.functions=[{{function: '{TALKERS}:capitals'}}]"
    settings = [*RL, reward, "checkpoint.save_every=1"]
    calm = outcome(done(work, *settings, "name=calm"))
    moments = random.Random(phase)
    for number in range(5):
        at = At(PHASES[phase], moments.randint(1, 4), signal.SIGKILL, moments.uniform(0, 0.1))
        argv = [*settings, f"name=killed_{phase}_{number}"]
        code, output = burnish(work, *argv, at=at)
        assert code == -signal.SIGKILL, output
        assert outcome(done(work, *argv)) == calm, at


@pytest.mark.nightly
def test_an_evaluation_plays_held_out_rows_or_those_that_the_environment_brings(work):
    run = done(work, *RL, "name=played", "steps=1")
    played = json.loads(burnish(work, "eval", str(run), "--json")[1].splitlines()[-1])
    rows = [row for row in metrics(run) if "val/reward" in row]
    assert rows[-1] | played == rows[-1]
    assert played["val/environment/turns"] == 3
    brings = [f"environment={TALKERS}:Bringing", "rollout.environment.kwargs.size=3"]
    for rows in ("data.validation=[]", "data.validation=[validation.jsonl]"):
        code, output = burnish(work, "eval", *RL[1:], *brings, rows, "evaluation.n=2")
        assert code == 0, output
    one, other = (work / "runs" / "run" / "evaluations" / name for name in "12")
    assert len(rollouts(one, 0, "validation")) == 3 * 2
    assert len(rollouts(other, 0, "validation")) > 3 * 2
    assert burnish(work, "eval", *RL[1:], "data.validation=[]")[0] == 2


@pytest.mark.parametrize(
    "settings",
    [
        [*RL, "data.string_prompts=raw"],
        ["rl", "rl.yaml", "rollout.environment.max_turns=3"],
        [*RL, "rollout.environment.reasoning_gym=chain_sum"],
        [*RL, "rollout.place=child", "rollout.ahead=1", "rollout.in_flight=true"],
        [*RL, "rollout.environment.history=rendered", "algorithm.advantage=gae"],
    ],
    ids=["texts", "no environment", "two environments", "in flight", "several sequences"],
)
def test_settings_that_make_no_conversation_are_refused(work, settings):
    code, output = burnish(work, *settings, "--dry-run")
    assert code == 2, output
    assert "Traceback" not in output
