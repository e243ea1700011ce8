"""The package verifiers, unchanged, trains through the gateway; and the OpenAI client is an agent."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.models.tokenizers import SPECIAL
from support.runs.training_files import done, metrics, outcome, rollouts

from burnish.config.environment import EnvironmentConfig
from burnish.environments.pool import EnvironmentPool
from burnish.errors import MissingError, UsageError

INSTALLED = find_spec("verifiers") is not None
needs_package = pytest.mark.skipif(
    not INSTALLED, reason="make nightly-verifiers installs verifiers"
)
HERE = Path(__file__).parent
RL = [
    *("rl", "rl.yaml", "reward.functions=[]", "data.train=[]", "steps=3"),
    *("model.fresh.max_position_embeddings=256", "batch.tokens_per_device=512"),
    *("rollout.max_response_length=150", "data.max_prompt_length=100"),
    *("evaluation.every=0", "data.validation=[]"),
]
VERIFIERS = [
    "rollout.environment.verifiers=sums_taskset",
    "rollout.environment.kwargs={agent: {runtime: {type: subprocess}}, taskset: {size: 6}, renderer: {name: default}}",
    "rollout.environment.timeout_seconds=300",
    "rollout.environment.workers=2",
]


@needs_package
@pytest.mark.nightly
def test_a_task_set_of_verifiers_is_trained_on(work: Path):
    shutil.copy(HERE / "sums_taskset.py", work)
    run = done(work, *RL, *VERIFIERS, "name=verifiers")
    rows = rollouts(run, 3)
    # A first turn that takes all room is the only one. If it leaves too little for the second request, the package's agent raises.
    assert {row["end"] for row in rows} <= {"done", "length", "failed"}
    failed = [row for row in rows if row["end"] == "failed"]
    assert all("rollout.max_response_length" in row["reward_error"] for row in failed)
    # Text that its renderer tokenizes otherwise begins a branch.
    whole = [row for row in rows if len(row["conversation"]) == 3]
    assert whole
    for row in whole:
        assert row["prompt"].startswith("<|im_start|>system\nAdd.")
        roles = [message["role"] for message in row["conversation"]]
        assert roles == ["assistant", "user", "assistant"]
        told = [m["content"] for m in row["conversation"] if m["role"] == "assistant"]
        pairs = zip(row["tokens"]["texts"], row["tokens"]["by_model"], strict=True)
        said = [text for text, own in pairs if own]
        assert "".join(text for text in said if text not in SPECIAL) == "".join(told)
        share = sum(letter.isupper() for letter in "".join(told)) / max(len("".join(told)), 1)
        assert row["reward_parts"]["capitals"] == pytest.approx(share / 2, abs=0.2)
    last = metrics(run)[-1]
    assert last["rollout/mismatch_kl"] < 1e-5
    assert 1 < last["environment/turns"] <= 2
    assert outcome(done(work, *RL, *VERIFIERS, "name=again")) == outcome(run)


@needs_package
@pytest.mark.nightly
def test_the_client_of_openai_is_an_agent(work: Path):
    (work / "loop.py").write_text(OPENAI)
    argv = [part for part in RL if part != "data.train=[]"]
    run = done(
        work,
        *argv,
        "data.string_prompts=user",
        "rollout.environment.agent=loop.py:loop",
        "rollout.environment.timeout_seconds=300",
    )
    assert {row["end"] for row in rollouts(run, 3)} <= {"done", "length"}
    assert metrics(run)[-1]["environment/turns"] == 2


OPENAI = """
from openai import OpenAI

def loop(row, url, seed):
    client = OpenAI(base_url=url, api_key="none")
    messages = list(row["prompt"])
    first = client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
    messages += [first.choices[0].message, {"role": "user", "content": "again"}]
    text = ""
    for chunk in client.chat.completions.create(
        model="policy", messages=messages, stream=True, max_completion_tokens=20
    ):
        text += chunk.choices[0].delta.content or ""
    return {"length": len(text) / 20}
"""


@needs_package
@pytest.mark.nightly
@pytest.mark.parametrize(
    "kwargs",
    [
        {"taskset": {"size": "many"}},
        {"renderer": {"name": "nobody"}},
        {"select": {"limit": 0}},
        {"nonsense": 1},
    ],
)
def test_settings_that_verifiers_refuses_are_one_sentence(kwargs, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(UsageError):
        EnvironmentPool(EnvironmentConfig(verifiers="sums_taskset", kwargs=kwargs), asks_rows=True)


@needs_package
@pytest.mark.nightly
def test_an_unknown_task_set_is_refused():
    with pytest.raises(UsageError):
        EnvironmentPool(EnvironmentConfig(verifiers="nowhere-at-all"))


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_the_error_says_how_to_install_it():
    with pytest.raises(MissingError):
        EnvironmentPool(EnvironmentConfig(verifiers="gsm8k"))
