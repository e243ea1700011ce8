"""Agents that speak HTTP, against the same conversations with an environment."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from environments.test_conversations import CALL, Scripted, play, said
from environments.test_conversations import _closed_pools as _closed_pools_of_environments  # noqa: F401
from support.models.tokenizers import CHATML, char_tokenizer
from support.models.tool_templates import calling_tokenizer

from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig
from burnish.data.turn_bridge import TurnBridge
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError
from burnish.methods.parts.sessions import Sessions
from burnish.records import Prompt, Request
from burnish.rollout.base import Sampling

CALLERS = Path(__file__).with_name("callers.py")
ASKED = [{"role": "user", "content": "What is 3 times 4?"}]
OPEN = []
"""The pools that are open: one for all tests of an agent."""


@cache
def pool_of(name, timeout_seconds=60.0):
    config = EnvironmentConfig(
        agent=f"{CALLERS}:{name}", workers=1, timeout_seconds=timeout_seconds
    )
    OPEN.append(EnvironmentPool(config))
    return OPEN[-1]


@pytest.fixture(scope="module", autouse=True)
def _closed_pools():
    yield
    pool_of.cache_clear()
    while OPEN:
        OPEN.pop().close()


class Answers(Scripted):
    """Says lines by sample and number of its requests, whatever their key."""

    def __call__(self, requests):
        return [
            [self.line(replace(request, samples=1, first_sample=sample)) for sample in samples]
            for request in requests
            for samples in [range(request.first_sample, request.first_sample + request.samples)]
        ]

    def line(self, request):
        told = sum(each.first_sample == request.first_sample for each in self.requests)
        self.requests.append(request)
        script = {request.first_sample: {request.turn: self.scripts[request.first_sample][told]}}
        return Scripted(self.tokenizer, script).turn(request, request.first_sample)


def hold(name, scripts, *, messages=ASKED, timeout=60.0, max_tokens=1000, **settings):
    """One conversation a script with an agent; returns rollouts, the script's reader and the tokenizer."""
    row = settings.pop("row", {})
    tools = row.get("schemas", [])
    tokenizer = calling_tokenizer() if tools else char_tokenizer(CHATML)
    config = EnvironmentConfig(agent=f"{CALLERS}:{name}", timeout_seconds=timeout, **settings)
    stops = [tokenizer.eos_token_id]

    def bridge_of(tools):
        return TurnBridge(tokenizer, DataConfig(), tools, stops)

    own = bridge_of(tools)
    ids = np.array(own.first(messages, "a test"), np.int64)
    columns = {"prompt": messages, "ids": ids.tolist(), **row}
    columns["more"] = tokenizer("<|im_start|>user\nagain<|im_end|>\n")["input_ids"]
    prompt = Prompt(5, ids, tokenizer.decode(ids), messages, None, "", columns)
    request = Request(9, ids, len(scripts), prompt=prompt)
    generate = Answers(tokenizer, scripts)
    sessions = Sessions(
        config,
        pool_of(name, timeout),
        bridge_of([]),
        bridge_of=bridge_of,
        stop_token_ids=stops,
        vocabulary=len(tokenizer),
    )
    sampling = Sampling(max_tokens, seed=1, step=2)
    (rollouts,) = sessions.play([prompt], [request], sampling, generate, lambda: None)
    return rollouts, generate, tokenizer


@pytest.mark.nightly
def test_an_agent_s_tool_loop_gives_the_tokens_of_an_environment():
    scripts = [[CALL, "It is 12."], [f"{CALL}\n{CALL}", CALL, "13"], ["no"]]
    theirs, drawn, _, tools = play("Calculator", scripts)
    ours, asked, _ = hold("calculator", scripts, row={"schemas": tools})
    for rollout, other in zip(ours, theirs, strict=True):
        for array in ("token_ids", "logprobs", "sampled_logprobs"):
            mine = getattr(rollout.completion, array)
            assert mine.tobytes() == getattr(other.completion, array).tobytes()
        masks = [each.completion.response_mask for each in (rollout, other)]
        assert (masks[0] is None) == (masks[1] is None)
        assert masks[0] is None or (masks[0] == masks[1]).all()
        assert rollout.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()
        assert rollout.end == other.end == "done"
        assert rollout.completion.versions.tolist() == other.completion.versions.tolist()
    keys = [(each.first_sample, each.turn) for each in asked.requests]
    assert keys == [
        (each.first_sample + number, each.turn)
        for each in drawn.requests
        for number in range(each.samples)
    ]
    assert [rollout.reward for rollout in ours] == [1.0, 0.0, 0.0]
    assert [rollout.metrics["branches"] for rollout in ours] == [0, 0, 0]


@pytest.mark.nightly
def test_token_ids_come_back_as_they_were_and_go_on_in_their_sequence():
    (rollout,), generate, tokenizer = hold("in_ids", [["one", "two"]])
    more = "<|im_start|>user\nagain<|im_end|>\n"
    text = tokenizer.decode(rollout.completion.token_ids)
    assert text == f"one<|im_end|>{more}two<|im_end|>"
    assert said(rollout, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert [request.turn for request in generate.requests] == [0, 1]
    assert rollout.reward == 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_a_rendered_history_is_what_the_template_writes_of_a_request(thought):
    # The agent does not send thoughts back.
    rollouts, generate, tokenizer = hold(
        "echo", [[f"{thought}hello", "you"]], history="rendered", max_turns=2
    )
    texts = [f"{thought}hello<|im_end|>", "you<|im_end|>"]
    own = [said(rollout, tokenizer) for rollout in rollouts]
    assert own == ([texts[1:], texts[:1]] if thought else [texts])
    second = generate.requests[1].token_ids.tolist()
    whole = [*rollouts[0].prompt.token_ids, *rollouts[0].completion.token_ids]
    assert whole[: len(second)] == second
    assert "hm" not in tokenizer.decode(second)


@pytest.mark.nightly
def test_agents_of_a_wave_are_drawn_together_and_coroutines_are_agents():
    rollouts, generate, _ = hold("waits", [["a"], ["abc"], ["ab"]])
    assert [rollout.reward for rollout in rollouts] == [1, 3, 2]
    assert len(generate.requests) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["streams", "repeats", "refused", "echo"])
def test_answers_have_the_forms_of_openai_s_api(name):
    (rollout,), generate, tokenizer = hold(name, [["hello", "you"]])
    assert rollout.reward_error is None
    assert rollout.reward == (5.0 if name == "streams" else 1.0)
    spoken = {"refused": ["he"], "echo": ["hello<|im_end|>", "you<|im_end|>"]}
    assert said(rollout, tokenizer) == spoken.get(name, ["hello<|im_end|>"])
    assert len(generate.requests) == len(said(rollout, tokenizer))


@pytest.mark.nightly
def test_parts_that_ask_at_the_same_time_draw_the_same_in_each_order():
    keys = set()
    sequences = set()
    for order in ([["a", 0], ["b", 0.2], ["c", 0.1]], [["a", 0.2], ["b", 0], ["c", 0.1]]):
        rollouts, generate, tokenizer = hold("parts", [["x", "x", "x", "x"]], row={"order": order})
        assert [rollout.branch for rollout in rollouts] == [0, 1, 2]
        assert {rollout.metrics["branches"] for rollout in rollouts} == {2}
        assert [len(said(rollout, tokenizer)) for rollout in rollouts] == [2, 1, 1]
        sequences.add(
            tuple(
                tokenizer.decode([*rollout.prompt.token_ids, *rollout.completion.token_ids])
                for rollout in rollouts
            )
        )
        keys.add(
            frozenset((tokenizer.decode(each.token_ids), each.turn) for each in generate.requests)
        )
    assert len(keys) == 1
    assert len({turn for _, turn in next(iter(keys))}) == 4
    assert len(sequences) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["nothing", "raise", "exit", "text", "hang", "die"])
def test_a_wrong_agent_loses_its_own_conversation(what):
    asked = [{"role": "user", "content": what}]
    seconds = 3.0 if what == "hang" else 60.0
    (rollout,), *_ = hold("wrong", [["hello"]], messages=asked, timeout=seconds)
    assert rollout.end == "failed"
    assert rollout.reward_error is not None
    (rollout,), *_ = hold("wrong", [["hello"]], timeout=seconds)  # the next one goes on
    assert (rollout.end, rollout.reward_error) == ("done", None)


@pytest.mark.nightly
def test_the_agent_that_ends_its_process_is_found_among_those_that_run_in_it():
    rollouts, *_ = hold("wrong", [["hello"], ["hello"], ["die"], ["hello"]])
    assert [rollout.end for rollout in rollouts] == ["done", "done", "failed", "done"]


@pytest.mark.nightly
def test_an_agent_that_never_ends_reaches_the_limit_of_turns():
    asked = [{"role": "user", "content": "forever"}]
    rollouts, generate, _ = hold("wrong", [["a"] * 9], messages=asked, max_turns=3)
    assert len(generate.requests) == len(rollouts) == 3  # each begins anew
    assert "max_turns" in rollouts[0].reward_error  # the agent raises what the gateway tells it


@pytest.mark.nightly
def test_the_limit_of_tokens_is_for_the_whole_conversation():
    (rollout,), generate, _ = hold("echo", [["hello", "you"]], max_tokens=50)
    first, second = generate.requests
    assert first.max_tokens == 50
    assert second.max_tokens == 50 - (len(second.token_ids) - len(first.token_ids))
    assert len(rollout.completion.token_ids) <= 50


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["two_arguments", "nobody"])
def test_a_function_that_is_no_agent_is_refused(name):
    with pytest.raises(UsageError):
        EnvironmentPool(EnvironmentConfig(agent=f"{CALLERS}:{name}"))


@pytest.mark.nightly
def test_an_agent_that_fails_by_a_refusal_says_which():
    (rollout,), *_ = hold("echo", [["hello, I am here"]], max_tokens=12)
    assert rollout.end == "failed"
    assert "400" in rollout.reward_error
    assert "rollout.max_response_length" in rollout.reward_error.rpartition("400")[2]
