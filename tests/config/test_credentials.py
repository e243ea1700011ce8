"""Credentials in a configuration are refused; their keys may name environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.credentials import with_environment, without_credentials
from burnish.config.document import dump_yaml, recorded
from burnish.config.load import load_settings, read_config
from burnish.config.resume import settings_difference
from burnish.config.schema import RewardConfig, RewardFunctionConfig, RunConfig
from burnish.errors import UsageError

SECRET = "hunter2"
FUNCTION = "reward.functions=[{function: f.py:f, kwargs: %s}]"
REFUSED = [
    f'tracking.traces.endpoint="http://u:{SECRET}@127.0.0.1:1"',
    f'tracking.traces.endpoint="http://{SECRET}@127.0.0.1:1"',
    f'tracking.traces.endpoint="https://host/v1/traces?api_key={SECRET}"',
    f'rollout.url="http://u:{SECRET}@127.0.0.1:1/v1"',
    f"checkpoint.mirror=s3://key:{SECRET}@bucket/runs",
    f"output_dir=s3://key:{SECRET}@bucket/runs",
    f"data.train=[a.jsonl,gs://{SECRET}@bucket/b.jsonl]",
    f"model.path=s3://key:{SECRET}@bucket/model",
    f"model.fresh={{model_type: llama, api_key: {SECRET}}}",
    f"data.chat_template_kwargs={{token: {SECRET}}}",
    FUNCTION % f"{{api_key: {SECRET}}}",
    FUNCTION % f"{{apiKey: {SECRET}}}",
    FUNCTION % f"{{judge: {{headers: {{Authorization: Bearer {SECRET}}}}}}}",
    FUNCTION % f"{{clients: [{{password: {SECRET}}}]}}",
    FUNCTION % f"{{X-Api-Key: {SECRET}}}",
    FUNCTION % f"{{url: 'http://u:{SECRET}@judge/score'}}",
    FUNCTION % f"{{key: sk-{SECRET}-0123456789abcdef}}",
    # also where something else is wrong
    f"reward.api_key={SECRET}",
    f"tracking.traces={{endpoint: 'ftp://u:{SECRET}@host'}}",
    f"http://u:{SECRET}@host",
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_credential_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(None, [override])
    assert SECRET not in str(caught.value)


def test_every_credential_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "reward:\n  functions:\n  - function: f.py:f\n    kwargs: {api_key: hunter2}\n"
        "tracking:\n  traces:\n    endpoint: http://u:hunter2@host\n"
    )
    with pytest.raises(UsageError) as caught:
        read_config(file)
    for name in ("reward.functions[0].kwargs.api_key", "tracking.traces.endpoint", "a.yaml:"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        'tracking.traces.endpoint="http://127.0.0.1:4318"',
        "rollout.url=http://localhost:8000/v1",
        "model.path=hf://owner/name@main",
        "model.path=owner/name@main",
        "data.train=[hf://datasets/owner/name@main]",
        "model.fresh={model_type: llama, eos_token: </s>, pad_token_id: 0}",
        "data.chat_template_kwargs={max_tokens: '5', think_token: <think>}",
        FUNCTION % "{api_key: $JUDGE_KEY, password: '${JUDGE}', token: ''}",
        FUNCTION % "{url: 'http://judge:8080/score@v2', key: answer, secretary: Ann}",
        "data.system_prompt='Never say password: or http://u:p@host'",
    ],
)
def test_other_values_are_none(override: str) -> None:
    read_config(None, [override])


def rewarded(**kwargs: Any) -> RewardConfig:
    return RewardConfig(functions=[RewardFunctionConfig(function="f.py:f", kwargs=kwargs)])


def test_keys_for_credentials_take_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    given = {"api_key": "$JUDGE_KEY", "headers": {"Authorization": "${JUDGE_KEY}"}, "cost": "$5"}
    found, values = with_environment(rewarded(**given, price="$JUDGE_KEY"))
    [function] = found.functions
    assert values == {SECRET}
    assert function.kwargs == {
        "api_key": SECRET,
        "headers": {"Authorization": SECRET},
        "cost": "$5",
        "price": "$JUDGE_KEY",
    }


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UsageError, match="JUDGE_KEY"):
        with_environment(rewarded(api_key="$JUDGE_KEY"))


def test_a_run_resumes_with_another_credential_and_not_with_another_argument(
    tmp_path: Path,
) -> None:
    """Also one that an earlier version recorded with its credential."""
    before = RunConfig(reward=rewarded(api_key=SECRET, strict=True))
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(before))
    moved = RunConfig(reward=rewarded(api_key="$JUDGE_KEY", strict=True))
    assert settings_difference(recorded(file), moved) == {}
    changed = RunConfig(reward=rewarded(api_key="$JUDGE_KEY", strict=False))
    [(name, values)] = settings_difference(recorded(file), changed).items()
    assert name == "reward.functions"
    assert SECRET not in str(values)


def test_settings_of_the_python_interface_are_held_to_it() -> None:
    given = {"reward": {"functions": [{"function": "f.py:f", "kwargs": {"api_key": SECRET}}]}}
    for source, settings in ((given, {}), ({}, given)):
        with pytest.raises(UsageError) as caught:
            load_settings(source, settings)
        assert SECRET not in str(caught.value)


def test_what_stands_for_a_credential() -> None:
    values = {"a": [{"password": "x", "n": 1}], "token": "", "eos_token": "</s>"}
    assert without_credentials(values) == {
        "a": [{"password": "***", "n": 1}],
        "token": "",
        "eos_token": "</s>",
    }
