"""Let model and environments take turns.

In waves, all conversations of a call take turn k, then all environments answer, then turn k + 1 begins. So which sequences share a decoding
step follows from the data alone, and a run in fp32 repeats to the bit. Free ones go on as soon as their environment has answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from burnish.config.environment import EnvironmentConfig
from burnish.data.messages import messages_of
from burnish.data.turn_bridge import TurnBridge, call_id, prove_bridge, require_messages
from burnish.environments.base import Action, EndedConversation, Observation, ToolCall
from burnish.environments.calls import Answered, Key, Step
from burnish.environments.pool import EnvironmentPool
from burnish.errors import BurnishError
from burnish.records import Completion, Prompt, Request, RewardCall, Rollout
from burnish.records.samples import (
    End,
    StopReason,
    Turn,
    TurnSpan,
    joined_completions,
    of_environment,
)
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Sampling

_UNSEEN_CHARACTERS = 2000
Generate = Callable[..., list[list[Completion]]]
"""Draws a turn of each request, and of what a `Follow` asks for."""
Measure = Callable[[str], AbstractContextManager[object]]
"""A `burnish.tracking.spans.Spans`, or what measures nothing."""


@dataclass(slots=True, eq=False)
class _Conversation:
    """One conversation as it grows."""

    prompt: Prompt
    sample: int
    key: Key
    ids: list[int]
    """The token ids so far."""
    opening: int
    """How many of them stand before the first turn of the model."""
    parts: list[Completion] = field(default_factory=list)
    """Turns of the model, each with the environment's tokens before it, if any."""
    heard: list[int] = field(default_factory=list)
    """The environment's tokens after the last turn."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Sums over the turns, by name."""
    turn_rewards: list[float] = field(default_factory=list)
    """Of each turn that was answered."""
    states: list[int] = field(default_factory=list)
    """A digest of what was heard before each turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over the turns, by name."""
    record: list[Mapping[str, Any]] = field(default_factory=list)
    """What was said and heard, for people."""
    spans: list[TurnSpan] = field(default_factory=list)
    calls: int = 0
    failed_calls: int = 0
    """Calls that told the model of an error."""
    calling: int = 0
    """Turns with a call."""
    unread: int = 0
    """Turns in a row with a call that cannot be read."""
    end: End | None = None
    error: str | None = None

    @property
    def turns(self) -> int:
        """Return how many turns the model has taken."""
        return len(self.parts)


class Conversations:
    """Plays conversations with the environments of `rollout.environment`."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        bridge: TurnBridge,
        spans: Measure = nullcontext,
    ) -> None:
        """`spans` measures what the model and the environments take."""
        self._spans = spans
        self._config = config
        self._pool = pool
        self._bridge = bridge
        self._proven = config.history == "appended" or not pool.described.tools
        """Whether a user may answer. The setup proves tools' answers where there are tools."""

    def apart(self) -> Conversations:
        """Return conversations for another thread, which measures nothing."""
        others = copy(self)
        others._spans = nullcontext
        return others

    def play(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: Sampling,
        generate: Generate,
        check: Callable[[], None],
        moved: Callable[[int], None] = lambda _: None,
    ) -> list[list[Rollout]]:
        """Return rollouts by prompt, with the environments' rewards.

        `moved` gets the number of conversations that ended. A rollout whose environment failed has a `reward_error`.
        """
        with self._spans("environment"):
            talks = self._begun(prompts, requests, sampling, check)
        everyone = list(talks)
        try:
            if self._config.pace == "free":
                with self._spans("generate"):
                    self._play_freely(talks, sampling, generate, check, moved)
                talks = []
            while talks:
                with self._spans("generate"):
                    self._say(talks, sampling, generate)
                with self._spans("environment"):
                    self._hear(talks, sampling, check)
                    self._score(talks, check)
                going_on = [talk for talk in talks if talk.end is None]
                self._pool.end([talk.key for talk in talks if talk.end is not None])
                moved(len(talks) - len(going_on))
                talks = going_on
        except BaseException:
            self._pool.end([talk.key for talk in talks])
            raise
        if self._pool.described.scores_groups:
            with self._spans("environment"):
                self._score_groups(everyone, check)
        rollouts = iter(everyone)
        return [
            self._finished([next(rollouts) for _ in range(request.samples)]) for request in requests
        ]

    def _begun(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sampling: Sampling,
        check: Callable[[], None],
    ) -> list[_Conversation]:
        greedy = "greedy" if sampling.temperature == 0 else "sampled"
        tasks = {}
        talks = []
        for prompt, request in zip(prompts, requests, strict=True):
            require_messages(prompt)
            for sample in range(request.first_sample, request.first_sample + request.samples):
                key = (request.prompt_key, sample)
                seed = derive_seed(sampling.seed, "environment", greedy, sampling.step, *key)
                tasks[key] = ({**prompt.columns, "prompt": prompt.messages}, seed)
                ids = prompt.token_ids.tolist()
                talks.append(_Conversation(prompt, sample, key, ids, len(ids)))
        asked = time.time()
        answers = self._pool.begin(tasks, check)
        for talk in talks:
            answer = answers[talk.key]
            _note(talk, answer, asked)
            if answer.observation is None:
                self._fail(talk, answer)
            else:
                talk.states.append(_state(answer.observation.messages))
                self._open(talk, answer.observation, sampling)
        return talks

    def _open(self, talk: _Conversation, observation: Observation, sampling: Sampling) -> None:
        """Put what the environment says first after the row's prompt."""
        if not observation.messages:
            return
        name = f"the conversation with prompt {talk.prompt.index}"
        before = () if observation.replaces_prompt else talk.prompt.messages or ()
        new = messages_of(list(observation.messages), name)
        talk.ids = self._bridge.first([*before, *new], name)
        talk.opening = len(talk.ids)
        talk.record += new
        if tokens_left(talk, sampling) < 1:
            talk.end = "length"

    def _play_freely(
        self,
        talks: Sequence[_Conversation],
        sampling: Sampling,
        generate: Generate,
        check: Callable[[], None],
        moved: Callable[[int], None],
    ) -> None:
        """Let each conversation go on as soon as its environment has answered."""
        by_key = {talk.key: talk for talk in talks}
        actions: dict[Key, Any] = {}
        asked_at: dict[Key, float] = {}

        def follow(ended: Sequence[tuple[Request, Completion]], idle: bool) -> list[Request]:
            for request, said in ended:
                talk = by_key[request.prompt_key, request.first_sample]
                self._said(talk, said, time.time())
                actions[talk.key] = self._action(talk)
                asked_at[talk.key] = time.time()
                self._pool.ask([Step(talk.key, actions[talk.key])])
            going_on: list[_Conversation] = []
            while self._pool.is_asked and not going_on:
                answers = self._pool.answers(check, 1.0 if idle else 0.0)
                for key, answer in answers.items():
                    self._answered(by_key[key], actions[key], answer, asked_at[key], sampling)
                heard = [by_key[key] for key in answers]
                going_on += [talk for talk in heard if talk.end is None]
                moved(len(heard) - len(going_on))
                if not idle:
                    break
            return self._requests(going_on, sampling)

        moved(sum(talk.end is not None for talk in talks))
        requests = self._requests([talk for talk in talks if talk.end is None], sampling)
        if requests:
            generate(requests, follow=follow)
        # Here no call waits any more, so that no answer of a score is taken for one of a step.
        self._score(talks, check)
        self._pool.end([talk.key for talk in talks])

    def _requests(self, talks: Sequence[_Conversation], sampling: Sampling) -> list[Request]:
        """Return requests for the next turns of conversations."""
        requests = []
        for alike in _alike(talks):
            talk = alike[0]
            requests.append(
                Request(
                    talk.key[0],
                    np.array(talk.ids, np.int64),
                    samples=len(alike),
                    first_sample=talk.sample,
                    turn=talk.turns,
                    max_tokens=tokens_left(talk, sampling),
                    prompt=talk.prompt,
                )
            )
        return requests

    def _say(self, talks: Sequence[_Conversation], sampling: Sampling, generate: Generate) -> None:
        """Draw a turn of each conversation."""
        asking = [talk for talk in talks if talk.end is None]
        requests = self._requests(asking, sampling)
        began = time.time()
        drawn = [each for group in (generate(requests) if requests else []) for each in group]
        for talk, said in zip(asking, drawn, strict=True):
            self._said(talk, said, began)

    def _said(self, talk: _Conversation, said: Completion, began: float) -> None:
        """Take in what the model said."""
        first, _, last = said.times or (began, began, time.time())
        talk.spans.append(TurnSpan("model", "model", talk.turns, first, last - first))
        if talk.heard:
            said = joined_completions([of_environment(talk.heard, said.weights_version), said])
        talk.parts.append(said)
        talk.ids += said.token_ids[len(talk.heard) :].tolist()
        talk.heard = []

    def _hear(
        self, talks: Sequence[_Conversation], sampling: Sampling, check: Callable[[], None]
    ) -> None:
        """Tell the environments what was said, and take in their answers."""
        by_key = {talk.key: talk for talk in talks if talk.end is None}
        actions = {key: self._action(talk) for key, talk in by_key.items()}
        asked = time.time()
        for key, answer in self._pool.step(actions, check).items():
            self._answered(by_key[key], actions[key], answer, asked, sampling)

    def _answered(
        self,
        talk: _Conversation,
        action: Any,
        answer: Answered,
        asked: float,
        sampling: Sampling,
    ) -> None:
        _note(talk, answer, asked)
        if answer.observation is None:
            self._fail(talk, answer)
        else:
            self._take_in(talk, action, answer, sampling)

    def _score(self, talks: Sequence[_Conversation], check: Callable[[], None]) -> None:
        """Add the rewards that environments give at the end."""
        ended = {talk.key: talk for talk in talks if talk.end not in (None, "failed")}
        asked = time.time()
        for key, answer in self._pool.score([*ended], check).items():
            talk = ended[key]
            _note(talk, answer, asked)
            if answer.observation is None:
                self._fail(talk, answer)
                continue
            self._take_rewards(talk, answer.observation)

    def _score_groups(self, talks: Sequence[_Conversation], check: Callable[[], None]) -> None:
        """Let the environment compare the conversations of each prompt, and add its rewards to the last turns."""
        groups: dict[Key, list[_Conversation]] = {}
        for talk in talks:
            if talk.end not in (None, "failed"):
                groups.setdefault((talk.key[0], -1), []).append(talk)
        ended = {key: [_as_ended(talk) for talk in group] for key, group in groups.items()}
        asked = time.time()
        for key, answer in self._pool.score_groups(ended, check).items():
            for place, talk in enumerate(groups[key]):
                _note(talk, answer, asked)
                if answer.observation is None:
                    self._fail(talk, answer)
                else:
                    self._take_rewards(talk, Observation(rewards=answer.rewards[place]))

    def _take_rewards(self, talk: _Conversation, observation: Observation) -> None:
        """Add rewards and numbers, and note the rewards at what the model said last."""
        rewards = _named(observation.rewards)
        _add(talk.rewards, rewards)
        _add(talk.metrics, observation.metrics)
        if talk.turn_rewards:
            talk.turn_rewards[-1] += float(sum(rewards.values()))
        said = [place for place, m in enumerate(talk.record) if m["role"] == "assistant"]
        if said and rewards:
            earlier = talk.record[said[-1]].get("rewards", {})
            talk.record[said[-1]] = {**talk.record[said[-1]], "rewards": {**earlier, **rewards}}

    def _action(self, talk: _Conversation) -> Any:
        """Return what the environment is told."""
        said = talk.parts[-1]
        ids = said.token_ids[said.drawn].tolist()
        turn = self._bridge.read(ids)
        calls = tuple(
            ToolCall(name, arguments, call_id(number))
            for number, (name, arguments) in enumerate(turn.calls, talk.calls)
        )
        allowed = calls[: max(self._config.max_calls - talk.calls, 0)]
        talk.calls += len(calls)
        talk.calling += bool(calls)
        talk.unread = talk.unread + 1 if turn.problem else 0
        text = self._bridge.text_of(ids)
        is_cut = said.stop_reason == "length"
        talk.record.append(
            {
                "role": "assistant",
                "content": text,
                "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in calls],
                "tokens": len(ids),
                **({"problem": turn.problem} if turn.problem else {}),
            }
        )
        return Action(text, turn.content, allowed, turn.problem, is_cut)

    def _take_in(
        self, talk: _Conversation, action: Action, answer: Answered, sampling: Sampling
    ) -> None:
        observation = answer.observation
        assert observation is not None
        talk.turn_rewards.append(0.0)
        talk.states.append(_state(observation.messages))
        self._take_rewards(talk, observation)
        talk.end = self._end(talk, action, observation)
        if talk.end is not None:
            talk.record += map(_unseen, observation.messages)
            return
        if not self._proven and any(each["role"] == "user" for each in observation.messages):
            prove_bridge(self._bridge, "user")
            self._proven = True
        try:
            name = f"the environment's answer to prompt {talk.prompt.index}"
            new = messages_of(list(observation.messages), name)
            calls = [(call.name, dict(call.arguments)) for call in action.calls]
            said = talk.parts[-1]
            heard = self._bridge.following(
                calls,
                new,
                ended_by=self._bridge.end_of(said.token_ids),
                earlier=talk.calls - len(calls),
            )
        except BurnishError as error:
            self._fail(talk, answer._replace(error=str(error)))
            return
        if len(heard) > self._config.max_reply_tokens or len(heard) >= tokens_left(talk, sampling):
            talk.end = "length"
            talk.record += map(_unseen, new)
            return
        talk.record += [
            {**message, "is_error": True} if note.get("is_error") else message
            for message, note in zip(new, answer.notes, strict=True)
        ]
        talk.heard = heard
        talk.ids += heard

    def _end(self, talk: _Conversation, action: Action, observation: Observation) -> End | None:
        """Return why a conversation ends after an answer, by the limits in this order; None if it goes on."""
        config = self._config
        if action.is_cut:
            return "length"
        if talk.calls > config.max_calls:
            return "calls"
        if observation.done or not observation.messages:
            return "done"
        if talk.turns >= config.max_turns:
            return "turns"
        return "unreadable" if talk.unread > config.max_unreadable_turns else None

    def _fail(self, talk: _Conversation, answer: Answered) -> None:
        talk.end = "failed"
        talk.error = f"environment: {answer.error}"

    def _finished(self, talks: Sequence[_Conversation]) -> list[Rollout]:
        """Return a group's rollouts. Their prompt is what their ids have in common, if environments began otherwise."""
        prompt = talks[0].prompt
        openings = [talk.ids[: talk.opening] for talk in talks]
        shared = _common(openings)
        if shared != prompt.token_ids.tolist():
            text = self._bridge.text_of(shared, special=True)
            prompt = replace(prompt, token_ids=np.array(shared, np.int64), text=text)
        own = [opening[len(shared) :] for opening in openings]
        return [self._rollout(prompt, *each) for each in zip(talks, own, strict=True)]

    def _rollout(self, prompt: Prompt, talk: _Conversation, opening: Sequence[int]) -> Rollout:
        first = talk.parts[0].weights_version if talk.parts else 0
        parts = [*talk.parts]
        if opening or not parts:
            parts.insert(0, of_environment(opening, first))
        completion = joined_completions(parts)
        is_cut = talk.end in ("length", "turns", "calls", "unreadable")
        stop: StopReason = "length" if is_cut else "stop"
        completion = replace(completion, stop_reason=stop)
        text = self._bridge.text_of(completion.token_ids.tolist())
        metrics = {
            **talk.metrics,
            "turns": float(talk.turns),
            "calls": float(talk.calls),
            "failed_calls": float(talk.failed_calls),
            "calling_turns": talk.calling / max(talk.turns, 1),
        }
        rewards = [*talk.turn_rewards, 0.0]  # a turn that the environment failed to answer has none
        turns = [
            Turn(part.count_drawn, reward, state)
            for part, reward, state in zip(talk.parts, rewards, talk.states, strict=False)
        ]
        if len(turns) < len(talk.parts):  # an agent took turns that no step of its own rewards
            turns = []
        reward = float(sum(talk.rewards.values()))
        began = completion.times[0] if completion.times else None
        seconds = sum(span.seconds for span in talk.spans if span.kind == "environment")
        return Rollout(
            prompt,
            talk.sample,
            completion,
            text,
            calls=(RewardCall("environment", reward, talk.error, began, seconds),),
            reward=reward,
            reward_parts=talk.rewards,
            metrics=metrics,
            turns=tuple(turns),
            reward_error=talk.error,
            conversation=tuple(talk.record),
            spans=tuple(talk.spans),
            end=talk.end,
        )


def _alike(talks: Sequence[_Conversation]) -> list[list[_Conversation]]:
    """Group conversations of one prompt that have said the same so far: a generator reads their beginning once."""
    groups: list[list[_Conversation]] = []
    for talk in talks:
        last = groups[-1][-1] if groups else None
        follows = last is not None and talk.key == (last.key[0], last.sample + 1)
        if last is not None and follows and (talk.turns, talk.ids) == (last.turns, last.ids):
            groups[-1].append(talk)
        else:
            groups.append([talk])
    return groups


def tokens_left(talk: _Conversation, sampling: Sampling) -> int:
    """Return how many tokens are left after the row's prompt. What an environment says first counts too, as memory is planned so."""
    return sampling.max_tokens - (len(talk.ids) - len(talk.prompt.token_ids))


def _note(talk: _Conversation, answer: Answered, asked: float) -> None:
    """Take in how long the environment and its tools took, and which tools failed."""
    turn = talk.turns - 1
    began = asked if answer.began is None else answer.began
    spent = TurnSpan("environment", "environment", turn, began, answer.seconds, answer.error)
    talk.spans.append(spent)
    messages = answer.observation.messages if answer.observation else ()
    for message, note in zip(messages, answer.notes, strict=True):
        talk.failed_calls += note.get("is_error", False)
        if "seconds" in note:
            name = str(message.get("name", "tool"))
            error = str(message["content"]) if note.get("is_error") else None
            when = note.get("began", began), note["seconds"]
            talk.spans.append(TurnSpan("tool", name, turn, *when, error))


def _unseen(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer for the record that the model does not get, because the conversation has ended. A long one is cut."""
    content = message["content"]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    cut = len(text) - _UNSEEN_CHARACTERS
    more = f" … {cut:,} more characters" if cut > 0 else ""
    return {**message, "content": text[:_UNSEEN_CHARACTERS] + more, "unseen": True}


def _named(rewards: Mapping[str, float] | float) -> Mapping[str, float]:
    return rewards if isinstance(rewards, Mapping) else {"reward": float(rewards)}


def _as_ended(talk: _Conversation) -> EndedConversation:
    messages = tuple(talk.record)
    rewards = dict(talk.rewards)
    return EndedConversation(talk.prompt.columns, talk.sample, messages, rewards, str(talk.end))


def _state(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a digest of what an environment says."""
    return xxhash.xxh3_64_intdigest(json.dumps(messages, sort_keys=True).encode())


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _common(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the beginning that all lists have."""
    first, *others = lists
    length = min(map(len, lists))
    for other in others:
        length = next((place for place in range(length) if first[place] != other[place]), length)
    return list(first[:length])
