"""Let model and environments take turns.

In waves, all conversations of a call take turn k, then all environments answer, then turn k + 1 begins. So which sequences share a decoding
step follows from the data alone, and a run in fp32 repeats to the bit. Free ones go on as soon as their environment has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.config.environment import EnvironmentConfig
from burnish.data.bridge_proof import prove_bridge
from burnish.data.messages import Message, messages_of
from burnish.data.tool_calls import ParsedTurn
from burnish.data.turn_bridge import TurnBridge, call_id, require_messages
from burnish.environments.base import Action, Observation, ToolCall
from burnish.environments.calls import Answered, Key, Step
from burnish.environments.pool import EnvironmentPool
from burnish.errors import BurnishError
from burnish.methods.parts.open_conversation import Branch, OpenConversation, state_of, unseen
from burnish.records import Completion, Prompt, Request, RewardCall, Rollout
from burnish.records.completion_parts import joined_completions, of_environment
from burnish.records.samples import End, StopReason, TurnSpan
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Sampling

Generate = Callable[..., list[list[Completion]]]
"""Draws a turn of each request, and of what a `Follow` asks for."""
Measure = Callable[[str], AbstractContextManager[object]]
"""A `burnish.tracking.spans.Spans`, or what measures nothing."""


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
        self._proven = config.history != "exact" or not pool.described.tools
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
    ) -> list[OpenConversation]:
        greedy = "greedy" if sampling.temperature == 0 else "sampled"
        tasks = {}
        talks = []
        for prompt, request in zip(prompts, requests, strict=True):
            require_messages(prompt)
            for sample in range(request.first_sample, request.first_sample + request.samples):
                key = (request.prompt_key, sample)
                seed = derive_seed(sampling.seed, "environment", greedy, sampling.step, *key)
                tasks[key] = (self._pool.row_of(prompt), seed)
                ids = prompt.token_ids.tolist()
                branches = [Branch(ids, len(ids))]
                talks.append(OpenConversation(prompt, sample, key, branches, prompt.messages or ()))
        asked = time.time()
        answers = self._pool.begin(tasks, check)
        for talk in talks:
            answer = answers[talk.key]
            talk.note(answer, asked)
            if answer.observation is None:
                talk.fail(answer.error)
            else:
                talk.states.append(state_of(answer.observation.messages))
                self._open(talk, answer.observation, sampling)
        return talks

    def _open(self, talk: OpenConversation, observation: Observation, sampling: Sampling) -> None:
        """Put what the environment says first after the row's prompt."""
        if not observation.messages:
            return
        name = f"the conversation with prompt {talk.prompt.index}"
        if observation.replaces_prompt:
            talk.before = ()
        new = messages_of(list(observation.messages), name)
        ids = self._bridge.first(talk.before, name, foreign=new)
        talk.messages += new
        talk.branches = [Branch(ids, len(ids), record=[*new])]
        if talk.tokens_left(ids, sampling) < 1:
            talk.end = "length"

    def _play_freely(
        self,
        talks: Sequence[OpenConversation],
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
                self._said(talk, talk.branch, said, time.time())
                actions[talk.key] = self._action(talk)
                asked_at[talk.key] = time.time()
                self._pool.ask([Step(talk.key, actions[talk.key])])
            going_on: list[OpenConversation] = []
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

    def _requests(self, talks: Sequence[OpenConversation], sampling: Sampling) -> list[Request]:
        """Return requests for the next turns of conversations."""
        requests = []
        for alike in _alike(talks):
            talk = alike[0]
            requests.append(
                Request(
                    talk.key[0],
                    np.array(talk.branch.ids, np.int64),
                    samples=len(alike),
                    first_sample=talk.sample,
                    turn=talk.turns,
                    max_tokens=talk.tokens_left(talk.branch.ids, sampling),
                    prompt=talk.prompt,
                )
            )
        return requests

    def _say(
        self, talks: Sequence[OpenConversation], sampling: Sampling, generate: Generate
    ) -> None:
        """Draw a turn of each conversation."""
        asking = [talk for talk in talks if talk.end is None]
        requests = self._requests(asking, sampling)
        began = time.time()
        drawn = [each for group in (generate(requests) if requests else []) for each in group]
        for talk, said in zip(asking, drawn, strict=True):
            self._said(talk, talk.branch, said, began)

    def _said(self, talk: OpenConversation, branch: Branch, said: Completion, began: float) -> None:
        """Take in what the model said in a branch."""
        first, _, last = said.times or (began, began, time.time())
        talk.spans.append(TurnSpan("model", "model", talk.turns, first, last - first))
        branch.say(said)

    def _hear(
        self, talks: Sequence[OpenConversation], sampling: Sampling, check: Callable[[], None]
    ) -> None:
        """Tell the environments what was said, and take in their answers."""
        by_key = {talk.key: talk for talk in talks if talk.end is None}
        actions = {key: self._action(talk) for key, talk in by_key.items()}
        asked = time.time()
        for key, answer in self._pool.step(actions, check).items():
            self._answered(by_key[key], actions[key], answer, asked, sampling)

    def _answered(
        self,
        talk: OpenConversation,
        action: Any,
        answer: Answered,
        asked: float,
        sampling: Sampling,
    ) -> None:
        talk.note(answer, asked)
        if answer.observation is None:
            talk.fail(answer.error)
        else:
            self._take_in(talk, action, answer, sampling)

    def _score(self, talks: Sequence[OpenConversation], check: Callable[[], None]) -> None:
        """Add the rewards that environments give at the end."""
        ended = {talk.key: talk for talk in talks if talk.end not in (None, "failed")}
        asked = time.time()
        for key, answer in self._pool.score([*ended], check).items():
            talk = ended[key]
            talk.note(answer, asked)
            if answer.observation is None:
                talk.fail(answer.error)
            else:
                talk.earn(answer.observation)

    def _score_groups(self, talks: Sequence[OpenConversation], check: Callable[[], None]) -> None:
        """Let the environment compare the conversations of each prompt, and add its rewards to the last turns."""
        groups: dict[Key, list[OpenConversation]] = {}
        for talk in talks:
            if talk.end not in (None, "failed"):
                groups.setdefault((talk.key[0], -1), []).append(talk)
        ended = {key: [talk.ended() for talk in group] for key, group in groups.items()}
        asked = time.time()
        for key, answer in self._pool.score_groups(ended, check).items():
            for place, talk in enumerate(groups[key]):
                talk.note(answer, asked)
                if answer.observation is None:
                    talk.fail(answer.error)
                else:
                    talk.earn(Observation(rewards=answer.rewards[place]))

    def _action(self, talk: OpenConversation) -> Any:
        """Return what the environment is told."""
        branch = talk.branch
        said = branch.parts[-1]
        ids = said.token_ids[said.drawn].tolist()
        earlier = talk.calls
        turn, text, calls = self._read(branch, self._bridge, ids, earlier)
        if self._config.history == "rendered":
            talk.messages.append(self._bridge.message_of(turn, text, earlier))
        talk.unread = talk.unread + 1 if turn.problem else 0
        allowed = calls[: max(self._config.max_calls - earlier, 0)]
        is_cut = said.stop_reason == "length"
        return Action(text, turn.content, allowed, turn.problem, is_cut)

    def _read(
        self, branch: Branch, bridge: TurnBridge, ids: list[int], earlier: int
    ) -> tuple[ParsedTurn, str, tuple[ToolCall, ...]]:
        """Read a turn of the model and note it; return it with its text and its calls, which are numbered after `earlier` ones."""
        turn = bridge.read(ids)
        text = bridge.text_of(ids)
        calls = tuple(
            ToolCall(name, arguments, call_id(number))
            for number, (name, arguments) in enumerate(turn.calls, earlier)
        )
        branch.calls += len(calls)
        branch.calling += bool(calls)
        branch.record.append(
            {
                "role": "assistant",
                "content": text,
                "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in calls],
                "tokens": len(ids),
                **({"problem": turn.problem} if turn.problem else {}),
            }
        )
        return turn, text, calls

    def _take_in(
        self, talk: OpenConversation, action: Any, answer: Answered, sampling: Sampling
    ) -> None:
        observation = answer.observation
        assert observation is not None
        talk.turn_rewards.append(0.0)
        talk.states.append(state_of(observation.messages))
        talk.earn(observation)
        talk.end = self._end(talk, action, observation)
        record = talk.branch.record
        messages = list(observation.messages)
        if action.problem is not None:
            messages = self._bridge.told(messages, rendered=self._config.history == "rendered")
        if talk.end is not None:
            record += map(unseen, messages)
            return
        if not self._proven and any(each["role"] == "user" for each in messages):
            prove_bridge(self._bridge, "user")
            self._proven = True
        try:
            name = f"the environment's answer to prompt {talk.prompt.index}"
            new = messages_of(messages, name)
            ids, length = self._next(talk, action, new, name)
        except BurnishError as error:
            talk.fail(str(error))
            return
        if length > self._config.max_reply_tokens or talk.tokens_left(ids, sampling) < 1:
            talk.end = "length"
            record += map(unseen, new)
            return
        record += [
            {**message, "is_error": True} if note.get("is_error") else message
            for message, note in zip(new, answer.notes, strict=True)
        ]
        talk.go_on(ids)

    def _next(
        self, talk: OpenConversation, action: Action, new: Sequence[Message], name: str
    ) -> tuple[list[int], int]:
        """Return the prompt of the next turn, after an answer, and how many of its tokens are the answer's."""
        if self._config.history == "rendered":
            talk.messages += new
            ids = self._bridge.first(talk.before, name, foreign=talk.messages)
            return ids, self._bridge.length_of(new)
        calls = [(call.name, dict(call.arguments)) for call in action.calls]
        heard = self._bridge.following(
            calls,
            new,
            ended_by=self._bridge.end_of(talk.branch.parts[-1].token_ids),
            earlier=talk.calls - len(calls),
        )
        return talk.branch.ids + heard, len(heard)

    def _end(self, talk: OpenConversation, action: Action, observation: Observation) -> End | None:
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

    def _finished(self, talks: Sequence[OpenConversation]) -> list[Rollout]:
        """Return a group's rollouts, one of each branch. Their prompt is what their ids have in common, if environments began otherwise."""
        prompt = talks[0].prompt
        branches = [
            (talk, number, branch)
            for talk in talks
            for number, branch in enumerate(reversed(talk.branches))
        ]
        openings = [branch.ids[: branch.opening] for *_, branch in branches]
        shared = _common(openings)
        if shared != prompt.token_ids.tolist():
            text = self._bridge.text_of(shared, special=True)
            prompt = replace(prompt, token_ids=np.array(shared, np.int64), text=text)
        own = [opening[len(shared) :] for opening in openings]
        return [
            self._rollout(prompt, *each, opening)
            for each, opening in zip(branches, own, strict=True)
        ]

    def _rollout(
        self,
        prompt: Prompt,
        talk: OpenConversation,
        number: int,
        branch: Branch,
        opening: Sequence[int],
    ) -> Rollout:
        """Return a branch as a rollout. Number 0 has what the whole conversation has."""
        first = branch.parts[0].weights_version if branch.parts else 0
        parts = [*branch.parts]
        if opening or not parts:
            parts.insert(0, of_environment(opening, first))
        completion = joined_completions(parts)
        is_cut = talk.end in ("length", "turns", "calls", "unreadable")
        stop: StopReason = "length" if is_cut else "stop"
        completion = replace(completion, stop_reason=stop)
        text = self._bridge.text_of(completion.token_ids.tolist())
        metrics = talk.numbers()
        if self._config.history == "rendered" or self._config.has_agents:
            metrics["branches"] = float(len(talk.branches) - 1)
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
            turns=() if number else talk.rewarded_turns(),
            reward_error=talk.error,
            conversation=self._record(talk, branch),
            spans=() if number else tuple(talk.spans),
            end=talk.end,
            branch=number,
        )

    def _record(self, talk: OpenConversation, branch: Branch) -> tuple[Mapping[str, Any], ...]:
        """Return what a branch's rollout says for people: that which stands for the conversation has all of it."""
        branches = talk.branches if branch is talk.branch else [branch]
        return tuple(message for each in branches for message in each.record)


def _alike(talks: Sequence[OpenConversation]) -> list[list[OpenConversation]]:
    """Group conversations of one prompt that have said the same so far: a generator reads their beginning once."""
    groups: list[list[OpenConversation]] = []
    for talk in talks:
        last = groups[-1][-1] if groups else None
        follows = last is not None and talk.key == (last.key[0], last.sample + 1)
        if last is not None and follows and _said_so_far(talk) == _said_so_far(last):
            groups[-1].append(talk)
        else:
            groups.append([talk])
    return groups


def _said_so_far(talk: OpenConversation) -> tuple[int, list[int]]:
    return talk.turns, talk.branch.ids


def _common(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the beginning that all lists have."""
    first, *others = lists
    length = min(map(len, lists))
    for other in others:
        length = next((place for place in range(length) if first[place] != other[place]), length)
    return list(first[:length])
