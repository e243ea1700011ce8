"""`burnish eval` of an endpoint with OpenAI's API: what it is asked, what its answers are worth, and how its failures end."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.tokenizers import CHATML, char_tokenizer, save_char_tokenizer
from support.ranks.fork_server import TESTS
from support.runs.endpoints import Answer, answer, serving, text_of
from support.runs.training_files import FRESH, RL, Command, rollouts, write_rows

KEY = "OPENAI_API_KEY"
ROLLOUT = {"engine": "openai", "model": "tiny", "max_response_length": 4}


@pytest.fixture
def sums(work: Path) -> str:
    """The configuration of an evaluation of six sums without any model."""
    sums = [(a, b) for a in (1, 2, 3) for b in (4, 5)]
    write_rows(
        work / "sums.jsonl",
        [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums],
    )
    config = {
        "model": {"tokenizer": "tokenizer"},
        "data": {"validation": ["sums.jsonl"]},
        "rollout": ROLLOUT,
        "reward": {"functions": [{"function": "exact_match"}], "workers": 1},
        "evaluation": {"n": 2, "temperature": 0.5, "top_p": 0.9},
    }
    (work / "endpoint.yaml").write_text(json.dumps(config))
    return "endpoint.yaml"


def evaluated(
    work: Path, argv: Sequence[str], environ: dict[str, str] | None = None
) -> tuple[int, dict[str, float], str]:
    """Exit status, numbers and output of `burnish eval`."""
    command = Command(work, ["eval", *argv, "--json"], environ)
    status = command.wait()
    lines = [line for line in command.output.splitlines() if line.startswith("{")]
    return status, json.loads(lines[-1]) if lines else {}, command.output


def test_texts_are_asked_sample_by_sample_and_scored_as_they_are_said(
    work: Path, sums: str
) -> None:
    def script(body: dict[str, Any], number: int) -> Answer | None:
        return (200, answer(body, "9999", "length")) if text_of(body) == "1+4=" else None

    with serving(script) as endpoint:
        argv = [sums, f"rollout.url={endpoint.url}", "rollout.stop=[';']", "rollout.slots=3"]
        status, found, output = evaluated(work, argv, {KEY: "secret"})
        again = [*endpoint.asked]
        endpoint.asked.clear()
        evaluated(work, argv)
    assert status == 0, output
    assert found["val/mean@2"] == pytest.approx(5 / 6)
    kept = rollouts(work / "runs" / "tiny-rl" / "evaluations" / "1", 0, "validation")
    assert [row["completion"] for row in kept] == ["9999"] * 2 + list("6666777788")
    assert not any("tokens" in row for row in kept)  # they are the endpoint's
    assert found["val/response_length/mean"] == pytest.approx((5 * 1 + 4) / 6)
    assert found["val/response_length/clip_ratio"] == pytest.approx(1 / 6)
    assert len(again) == 12
    assert {(path, key) for path, key, _ in again} == {("/v1/completions", "Bearer secret")}
    bodies = [body for _, _, body in again]
    assert len({body.pop("seed") for body in bodies}) == 12
    assert {body.pop("prompt") for body in bodies} == {
        f"{a}+{b}=" for a in (1, 2, 3) for b in (4, 5)
    }
    wanted = {"model": "tiny", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "stop": [";"]}
    assert all(body == wanted for body in bodies)
    assert 1 <= endpoint.most <= 3
    assert {key for _, key, _ in endpoint.asked} == {None}
    assert "secret" not in output


@pytest.mark.nightly
def test_the_same_evaluation_asks_the_same_and_another_seed_asks_others(
    work: Path, sums: str
) -> None:
    asked = []
    for seed in (0, 0, 1):
        with serving(lambda *_: None) as endpoint:
            status, _, output = evaluated(
                work, [sums, f"rollout.url={endpoint.url}", f"seed={seed}"]
            )
            assert status == 0, output
            asked.append({(text_of(body), body["seed"]) for *_, body in endpoint.asked})
    assert asked[0] == asked[1]
    assert not asked[0] & asked[2]


def test_conversations_are_asked_as_messages(work: Path, sums: str) -> None:
    settings = ["data.string_prompts=user", "data.system_prompt='Add.'", "evaluation.top_k=5"]
    settings += ["data.chat_template_kwargs={enable_thinking: false}"]
    with serving(lambda *_: None) as endpoint:
        status, found, output = evaluated(work, [sums, f"rollout.url={endpoint.url}", *settings])
    assert status == 0, output
    assert found["val/mean@2"] == 1
    assert {path for path, *_ in endpoint.asked} == {"/v1/chat/completions"}
    for *_, body in endpoint.asked:
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["top_k"] == 5
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_passes_is_asked_again(work: Path, sums: str) -> None:
    """The first attempts at three of the sums end in three ways."""
    failures: dict[str, Answer] = {
        "1+4=": (-429, "slowly"),
        "2+4=": (503, "loading"),
        "3+4=": (200, None),
    }

    def script(body: dict[str, Any], number: int) -> Answer | None:
        return failures.get(text_of(body)) if number == 1 else None

    with serving(script) as endpoint:
        status, found, output = evaluated(work, [sums, f"rollout.url={endpoint.url}"])
    assert status == 0, output
    assert found["val/mean@2"] == 1
    assert Counter(text_of(body) for *_, body in endpoint.asked) == Counter(
        {f"{a}+{b}=": 2 + 2 * (b == 4) for a in (1, 2, 3) for b in (4, 5)}
    )


@pytest.mark.parametrize(
    "said",
    [
        (401, {"error": {"message": "Incorrect API key provided"}}),
        (404, {"error": {"message": "The model does not exist"}}),
        (400, {"error": {"message": "Unknown parameter: top_k"}}),
        (200, "<html>"),
        (200, {"choices": []}),
    ],
)
def test_what_stays_ends_by_name(work: Path, sums: str, said: Answer) -> None:
    with serving(lambda *_: said) as endpoint:
        argv = [sums, f"rollout.url={endpoint.url}", "rollout.slots=1"]
        status, found, output = evaluated(work, argv)
    assert status == 1
    assert not found
    assert len(endpoint.asked) == 1
    assert "Traceback" not in output
    assert endpoint.url in output


def test_the_judge_of_the_guide_asks_an_endpoint() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text()
    (code,) = re.findall(r'^```python title="judge.py"\n(.*?)^```$', guide, re.M | re.S)

    def script(body: dict[str, Any], number: int) -> Answer:
        said = "Yes." if "'five'" in text_of(body) else "no"
        return 200, {"choices": [{"message": {"role": "assistant", "content": said}}]}

    with serving(script) as endpoint:
        judge: dict[str, Any] = {}
        exec(code.replace("http://localhost:8000/v1", endpoint.url), judge)
        assert asyncio.run(judge["agrees"]("", "five", "5")) == 1
        assert asyncio.run(judge["agrees"]("", "six", "5")) == 0
    assert {path for path, *_ in endpoint.asked} == {"/v1/chat/completions"}


@pytest.mark.nightly
def test_an_endpoint_that_never_recovers_ends_by_name(work: Path, sums: str) -> None:
    with serving(lambda *_: (500, "out of order")) as endpoint:
        argv = [sums, f"rollout.url={endpoint.url}", "rollout.slots=1"]
        status, _, output = evaluated(work, argv)
    assert status == 1
    assert len(endpoint.asked) > 2
    assert "Traceback" not in output
    assert "out of order" in output


def test_a_key_that_no_header_can_hold_is_refused(work: Path, sums: str) -> None:
    with serving(lambda *_: None) as endpoint:
        argv = [sums, f"rollout.url={endpoint.url}"]
        status, _, output = evaluated(work, argv, {KEY: "one\ntwo"})
        assert not endpoint.asked
        assert evaluated(work, argv, {KEY: "secret\r\n"})[0] == 0
    assert status == 2, output
    assert KEY in output
    assert endpoint.asked[0][1] == "Bearer secret"


REFUSED = {
    "rollout.url": ["rollout.model=tiny"],
    "rollout.model": ["rollout.url=http://localhost:1/v1"],
    "reward.functions": [
        "rollout.model=tiny",
        "rollout.url=http://localhost:1/v1",
        "reward.functions=[]",
    ],
    "model.tokenizer": [
        "rollout.model=tiny",
        "rollout.url=http://localhost:1/v1",
        "model.tokenizer=null",
    ],
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_dry_run_refuses_what_is_missing(work: Path, sums: str, setting: str) -> None:
    given = ["rollout.model=null", *REFUSED[setting]]
    command = Command(work, ["eval", sums, "--dry-run", *given])
    assert command.wait() == 2
    assert setting in command.output


def test_a_dry_run_asks_nobody(work: Path, sums: str) -> None:
    with serving(lambda *_: None) as endpoint:
        command = Command(work, ["eval", sums, "--dry-run", f"rollout.url={endpoint.url}"])
        assert command.wait() == 0, command.output
    assert not endpoint.asked
    assert endpoint.url in command.output


def test_reinforcement_learning_refuses_it(work: Path) -> None:
    config = {**RL, "rollout": {**RL["rollout"], **ROLLOUT, "url": "http://localhost:1/v1"}}
    (work / "learns.yaml").write_text(json.dumps(config))
    for argv in (["rl", "learns.yaml", "--dry-run"], ["serve", "learns.yaml"]):
        command = Command(work, argv)
        assert command.wait() == 2
        assert "rollout.engine" in command.output


def test_a_run_that_has_a_model_needs_none_of_its_weights(work: Path, sums: str) -> None:
    """`model.path` gives only the tokenizer, and here has nothing else."""
    save_char_tokenizer(work / "unweighted")
    (work / "unweighted" / "config.json").write_text(json.dumps(FRESH))
    with serving(lambda *_: None) as endpoint:
        argv = [
            sums,
            f"rollout.url={endpoint.url}",
            "model.path=unweighted",
            "model.tokenizer=null",
        ]
        status, found, output = evaluated(work, argv)
    assert status == 0, output
    assert found["val/mean@2"] == 1


@pytest.mark.nightly
def test_an_environment_goes_on_in_the_endpoint_s_token_ids(work: Path, sums: str) -> None:
    """Each turn is asked with the ids of all turns before it."""
    tokenizer = char_tokenizer(CHATML)
    said = tokenizer("Ab")["input_ids"] + [tokenizer.eos_token_id]

    def script(body: dict[str, Any], number: int) -> Answer | None:
        choice = {"finish_reason": "stop", "text": "Ab", "token_ids": said}
        return 200, {"choices": [choice]}

    talkers = TESTS / "environments" / "talkers.py"
    played = [
        *(sums, f"environment={talkers}:Capitals", "reward.functions=[]", "evaluation.n=1"),
        *("data.string_prompts=user", "rollout.max_response_length=200"),
    ]
    with serving(script) as endpoint:
        argv = [*played, f"rollout.url={endpoint.url}"]
        status, found, output = evaluated(work, argv)
    assert status == 0, output
    assert found["val/environment/turns"] == 3
    assert found["val/reward"] == pytest.approx(1.5)
    messages: list[dict[str, str]] = [{"role": "user", "content": "1+4="}]
    first: list[int] = []
    for _ in range(3):
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # fmt: skip
        [body] = [body for _, _, body in endpoint.asked if body["prompt"] == wanted]
        assert tokenizer.eos_token_id in body["stop_token_ids"]
        first = first or wanted
        assert body["max_tokens"] == 200 - (len(wanted) - len(first))
        messages += [{"role": "assistant", "content": "Ab"}, {"role": "user", "content": "5!"}]
    assert {path for path, *_ in endpoint.asked} == {"/v1/completions"}

    def without(body: dict[str, Any], number: int) -> Answer | None:
        return 200, {"choices": [{"finish_reason": "stop", "text": "Ab"}]}

    with serving(without) as endpoint:
        status, _, output = evaluated(work, [*played, f"rollout.url={endpoint.url}"])
    assert status == 1, output
    assert "token ids" in output
    assert "Traceback" not in output
    agent = [f"rollout.environment.agent={talkers}:Capitals", "rollout.url=http://localhost:1/v1"]
    assert evaluated(work, [sums, *agent, "reward.functions=[]"])[0] == 2
