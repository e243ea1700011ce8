"""Let agents hold conversations: answer the requests that they send over HTTP, and keep the tokens.

A request whose prompt goes on from what an agent has asked and heard before goes on in the same token ids. Any other begins a branch: a
sequence of its own. The requests of all agents are drawn together, then all agents go on. So a conversation with one request at a time
takes its turns in waves, as with an environment.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from burnish.config.environment import EnvironmentConfig
from burnish.data.bridge_proof import prove_bridge, proven_bridge
from burnish.data.messages import THOUGHTS, Message, called, messages_of
from burnish.data.tool_forms import Called
from burnish.data.turn_bridge import TurnBridge
from burnish.environments.base import Observation
from burnish.environments.calls import AgentReply, Answered, Ask, Asking, Key
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError
from burnish.methods.parts.conversations import Conversations, Generate, Measure
from burnish.methods.parts.open_conversation import Branch, OpenConversation
from burnish.records import Completion, Request, Rollout
from burnish.records.samples import End, digest_of
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Sampling
from burnish.runs.setup import TextFoundation

_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "ignore_eos": False,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
"""Values of parameters that change nothing."""

_FULL = "the conversation has reached its context length"
"""What agents look for in an error, to end a conversation well."""
log = logging.getLogger("burnish")


@dataclass(slots=True, eq=False)
class _AskedBranch(Branch):
    """A branch as an agent knows it."""

    root: int = 0
    """What its draws derive from, beside prompt and sample: 0 if it begins as the row's prompt."""
    tools: str = ""
    """Its tools as JSON text."""
    known: list[Message] = field(default_factory=list)
    """Its messages, as the agent sent and got them; empty if it sent token ids."""
    last_calls: list[Called] = field(default_factory=list)
    """Those of the last turn."""
    is_asked: bool = False
    """Whether a request waits for its next turn."""


@dataclass(slots=True, eq=False)
class _Session:
    """The requests of one conversation."""

    asks: Sequence[Ask] = ()
    """Those that wait."""
    branches: list[_AskedBranch] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    """How many branches began with the same ids."""
    turns: int = 0
    limit: End | None = None
    """The limit that it reached."""
    refusal: str = ""
    """Why a request got no answer."""


def make_conversations(
    foundation: TextFoundation,
    pool: EnvironmentPool,
    eos_token_ids: Sequence[int],
    spans: Measure,
) -> Conversations:
    """Return what plays the conversations of a run, and measures it with `spans`. Raises `UsageError` if the chat template cannot continue them."""
    data = foundation.config.data
    rollout = foundation.config.rollout
    tokenizer = foundation.tokenizer
    bridge = proven_bridge(tokenizer, data, rollout, eos_token_ids, pool)
    if not rollout.environment.has_agents:
        return Conversations(rollout.environment, pool, bridge, spans)
    stops = (*eos_token_ids, *rollout.stop_token_ids)
    bridge_of = partial(TurnBridge, tokenizer, data, stop_token_ids=stops)
    return Sessions(
        rollout.environment,
        pool,
        bridge,
        spans,
        bridge_of=bridge_of,
        stop_token_ids=stops,
        vocabulary=len(tokenizer),
    )


class Sessions(Conversations):
    """Answers the agents of `rollout.environment`."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        bridge: TurnBridge,
        spans: Measure = nullcontext,
        *,
        bridge_of: Callable[..., TurnBridge],
        stop_token_ids: Sequence[int],
        vocabulary: int,
    ) -> None:
        """`bridge` has no tools; `bridge_of(tools=...)` makes one that has. Ids of requests are below `vocabulary`."""
        super().__init__(config, pool, bridge, spans)
        self._bridge_of = bridge_of
        self._bridges = {"[]": self._bridge}
        self._stop_token_ids = stop_token_ids
        self._vocabulary = vocabulary
        self._proofs = set[tuple[str, str]]()
        """Tools and roles that answer, for which the bridge is proven."""
        self._told = set[str]()
        """Parameters of requests that the log has named."""
        self._sessions = dict[Key, _Session]()

    def apart(self) -> Sessions:
        """See `Conversations.apart`."""
        others = copy(self)
        others._spans = nullcontext
        others._sessions = {}
        return others

    def _open(self, talk: OpenConversation, observation: Observation, sampling: Sampling) -> None:
        self._sessions[talk.key] = _Session()
        self._go_on(talk, observation)

    def _say(
        self,
        talks: Sequence[OpenConversation],
        sampling: Sampling,
        generate: Generate,
    ) -> None:
        """Answer the requests that wait."""
        self._replies = dict[Key, list[AgentReply]]()
        drawn = []
        for talk in talks:
            if talk.end is not None:
                continue
            session = self._sessions[talk.key]
            replies = self._replies[talk.key] = []
            for ask in session.asks:
                placed = self._placed(talk, session, ask, sampling)
                if isinstance(placed, str):
                    session.refusal = placed
                    replies.append(AgentReply(placed))
                else:
                    replies.append(AgentReply())
                    drawn.append((talk, session, placed, ask, replies, len(replies) - 1))
        wanted = [_request(talk, branch, ask, sampling) for talk, _, branch, ask, *_ in drawn]
        began = time.time()
        completions = (
            [each for group in generate(_merged(wanted)) for each in group] if wanted else []
        )
        for (talk, session, branch, ask, replies, place), request, said in zip(
            drawn, wanted, completions, strict=True
        ):
            replies[place] = self._reply(branch, ask, request, said)
            room = talk.tokens_left(branch.ids, sampling)
            if said.stop_reason == "length" and request.max_tokens == room:
                session.limit = "length"
            self._said(talk, branch, said, began)
            branch.is_asked = False

    def _action(self, talk: OpenConversation) -> Any:
        return tuple(self._replies[talk.key])

    def _take_in(
        self, talk: OpenConversation, action: Any, answer: Answered, sampling: Sampling
    ) -> None:
        assert answer.observation is not None
        self._go_on(talk, answer.observation)

    def _answered(
        self,
        talk: OpenConversation,
        action: Any,
        answer: Answered,
        asked: float,
        sampling: Sampling,
    ) -> None:
        """Say which request was refused, if an agent fails: its client tells the status alone."""
        refusal = self._sessions[talk.key].refusal
        if answer.observation is None and refusal:
            answer = answer._replace(error=f"{answer.error}; a request got status 400: {refusal}")
        super()._answered(talk, action, answer, asked, sampling)

    def _go_on(self, talk: OpenConversation, observation: Observation) -> None:
        """Take in an agent's next requests, or its end."""
        session = self._sessions[talk.key]
        if isinstance(observation, Asking):
            session.asks = observation.asks
            return
        self._order(talk)
        talk.earn(observation)
        talk.end = session.limit or "done"
        if not session.branches:
            talk.fail(f"the model said nothing: {session.refusal or 'the agent asked nothing'}")

    def _finished(self, talks: Sequence[OpenConversation]) -> list[Rollout]:
        for talk in talks:
            self._order(talk)
            self._sessions.pop(talk.key, None)
        return super()._finished(talks)

    def _order(self, talk: OpenConversation) -> None:
        """Let the branch come last in which the model said most; with histories that are rendered, the longest."""
        session = self._sessions.get(talk.key, _Session())
        is_rendered = self._config.history == "rendered"

        def size(branch: _AskedBranch) -> tuple[int, int]:
            said = sum(part.count_drawn for part in branch.parts)
            # Which branch began first may depend on time.
            return len(branch.ids) if is_rendered else said, -branch.root

        if session.branches:
            ordered = sorted(session.branches, key=size)
            talk.branches = ordered

    def _record(self, talk: OpenConversation, branch: Branch) -> tuple[Mapping[str, Any], ...]:
        return tuple(branch.record)

    # Requests.

    def _placed(
        self, talk: OpenConversation, session: _Session, ask: Ask, sampling: Sampling
    ) -> _AskedBranch | str:
        """Return the branch in which a request goes on, with its prompt; or why there is no answer."""
        refusal = self._refusal(ask, sampling)
        if refusal is not None:
            return refusal
        if session.turns >= self._config.max_turns:
            session.limit = "turns"
            return f"{_FULL}: rollout.environment.max_turns is {self._config.max_turns}"
        tools = _text(ask.tools)
        if tools not in self._bridges:
            self._bridges[tools] = self._bridge_of(tools=[dict(tool) for tool in ask.tools])
        try:
            branch, ids = self._continued(session, ask, tools)
        except UsageError as error:
            return str(error)
        room = sampling.max_tokens - (len(ids) - len(talk.prompt.token_ids))
        if room < 1:
            session.limit = "length"
            return f"{_FULL}: the prompt has {len(ids)} tokens, and at most {len(talk.prompt.token_ids) + sampling.max_tokens - 1} leave room for an answer (rollout.max_response_length)"
        if (ask.max_tokens or 0) > room:
            self._tell(
                "max_tokens",
                f"an agent asks for up to {ask.max_tokens} tokens and gets {room}: rollout.max_response_length limits its whole conversation",
            )
        if branch is None:
            branch = self._begun_branch(talk, session, ask, ids)
        else:
            branch.hear(ids)
            branch.record += self._record_of(ask, len(branch.known), branch.heard)
        branch.known = [*map(dict, ask.messages)]
        branch.is_asked = True
        session.turns += 1
        return branch

    def _continued(
        self, session: _Session, ask: Ask, tools: str
    ) -> tuple[_AskedBranch | None, list[int]]:
        """Return the longest branch that a request continues, and the ids of its prompt.

        Raises `UsageError` for messages that the chat template refuses.
        """
        free = [branch for branch in session.branches if not branch.is_asked]
        bridge = self._bridges[tools]
        if ask.token_ids is None and self._config.history != "rendered":
            going_on = [
                branch
                for branch in free
                if branch.tools == tools and self._goes_on(branch, ask.messages)
            ]
            if going_on:
                branch = _longest(going_on)
                new = messages_of(list(ask.messages[len(branch.known) :]), "the request")
                ended_by = bridge.end_of(branch.ids)
                heard = bridge.following(branch.last_calls, new, ended_by=ended_by)
                return branch, branch.ids + heard
            free = []
        ids = self._ids(ask, bridge)
        going_on = [branch for branch in free if branch.continues_in(ids)]
        return (_longest(going_on) if going_on else None), ids

    def _ids(self, ask: Ask, bridge: TurnBridge) -> list[int]:
        """Return the ids of a request's whole prompt."""
        if ask.token_ids is None:
            messages = messages_of(list(ask.messages), "the request")
            return bridge.first((), "the request", foreign=messages)
        strange = [token for token in ask.token_ids if not 0 <= token < self._vocabulary]
        if strange:
            raise UsageError(
                f"token_ids: the model has no token {strange[0]}",
                want=f"ids from 0 to {self._vocabulary - 1}",
                do="use the tokenizer of the model that is trained",
            )
        return list(ask.token_ids)

    def _goes_on(self, branch: _AskedBranch, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether messages repeat a branch's own, and then only say what tools and users answer."""
        own = len(branch.known)
        roles = {str(message.get("role")) for message in messages[own:]}
        if (
            not own
            or not roles
            or not roles <= {"user"} | ({"tool"} if branch.tools != "[]" else set())
        ):
            return False
        is_exact = self._config.history == "exact"
        for mine, theirs in zip(branch.known, messages, strict=False):
            if _compared(mine, is_exact) != _compared(theirs, is_exact):
                return False
        for role in sorted(roles) if is_exact else ():
            if (branch.tools, role) not in self._proofs:
                prove_bridge(self._bridges[branch.tools], role)
                self._proofs.add((branch.tools, role))
        return True

    def _begun_branch(
        self, talk: OpenConversation, session: _Session, ask: Ask, ids: list[int]
    ) -> _AskedBranch:
        digest = digest_of(np.array(ids, np.int64)).hex()
        nth = session.begun[digest]
        session.begun[digest] += 1
        is_rows = ids == talk.prompt.token_ids.tolist()
        # Draws derive from what a branch begins with. So they do not depend on which of an agent's parts asks first.
        root = 0 if is_rows and nth == 0 else derive_seed(nth, "branch", digest)
        if session.branches:
            self._tell(
                "branch",
                "an agent's request does not go on from an earlier one, so it begins a branch, which is a sequence of its own; environment/branches counts them",
            )
        record = self._record_of(ask, len(ask.messages) if is_rows else 0, () if is_rows else ids)
        branch = _AskedBranch(ids, len(ids), record=record, root=root, tools=_text(ask.tools))
        session.branches.append(branch)
        talk.branches = session.branches
        return branch

    def _reply(
        self, branch: _AskedBranch, ask: Ask, request: Request, said: Completion
    ) -> AgentReply:
        ids = said.token_ids.tolist()
        # Calls are numbered in their branch, so that ids do not depend on which of an agent's parts asks first.
        turn, text, calls = self._read(branch, self._bridges[branch.tools], ids, branch.calls)
        branch.last_calls = turn.calls
        reply = AgentReply(
            prompt_token_ids=tuple(request.token_ids.tolist()),
            token_ids=tuple(ids),
            logprobs=tuple(said.logprobs.tolist()),
            content=turn.content if turn.calls or turn.thoughts else text,
            thoughts=turn.thoughts,
            calls=tuple((call.id, call.name, _text(call.arguments)) for call in calls),
            stop_reason=said.stop_reason,
        )
        if ask.token_ids is None:
            branch.known.append(_message_of(reply))
        return reply

    def _record_of(self, ask: Ask, known: int, ids: Sequence[int]) -> list[Mapping[str, Any]]:
        """Return what a request says that is new: its messages from number `known` on, or the ids."""
        if ask.token_ids is None:
            new = ask.messages[known:]
            return [{"role": message.get("role"), "content": _content(message)} for message in new]
        return [{"role": "user", "content": self._bridge.text_of(ids)}] if len(ids) else []

    def _refusal(self, ask: Ask, sampling: Sampling) -> str | None:
        """Return why a request cannot be answered as it asks. Name parameters once that the run decides itself."""
        stop = ask.sampling.get("stop", [])
        strings = [stop] if isinstance(stop, str) else stop
        if not set(strings) <= {*sampling.stop_strings}:
            return f"stop: {strings} is not among the run's (rollout.stop)"
        ours = {
            **_NEUTRAL,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        for name, value in ask.sampling.items():
            if name == "stop":
                continue
            if name == "stop_token_ids":
                is_same = {*value} <= {*self._stop_token_ids}
            else:
                is_same = value == ours.get(name) or (
                    name == "top_k" and value < 1 > sampling.top_k
                )
            if not is_same:
                self._tell(
                    name,
                    f"agents ask for {name}={value}; the run decides it and draws with its own",
                )
        return None

    def _tell(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", sentence)


def _request(talk: OpenConversation, branch: _AskedBranch, ask: Ask, sampling: Sampling) -> Request:
    room = talk.tokens_left(branch.ids, sampling)
    return Request(
        talk.key[0],
        np.array(branch.ids, np.int64),
        first_sample=talk.sample,
        turn=branch.root + len(branch.parts),
        max_tokens=min(room, ask.max_tokens or room),
        prompt=talk.prompt,
    )


def _merged(requests: Sequence[Request]) -> list[Request]:
    """Join requests of a prompt's samples that ask the same: a generator reads their beginning once."""
    merged: list[Request] = []
    for request in requests:
        last = merged[-1] if merged else None
        if (
            last is not None
            and _alike(last) == _alike(request)
            and (request.first_sample == last.first_sample + last.samples)
        ):
            merged[-1] = replace(last, samples=last.samples + 1)
        else:
            merged.append(request)
    return merged


def _alike(request: Request) -> tuple[Any, ...]:
    return request.prompt_key, request.turn, request.max_tokens, request.token_ids.tolist()


def _longest(branches: Sequence[_AskedBranch]) -> _AskedBranch:
    return max(branches, key=lambda branch: len(branch.ids))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message_of(reply: AgentReply) -> Message:
    """Return an answer as the message that the agent gets."""
    calls = [{"function": {"name": name, "arguments": text}} for _, name, text in reply.calls]
    return {
        "role": "assistant",
        "content": reply.content,
        "tool_calls": calls,
        "reasoning_content": reply.thoughts,
    }


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _compared(message: Mapping[str, Any], with_thoughts: bool) -> tuple[Any, ...]:
    """Return what two messages have in common if they say the same."""
    thoughts = next((message[key] for key in THOUGHTS if message.get(key)), "")
    calls = []
    for call in message.get("tool_calls") or ():
        function = called(call)
        arguments = function.get("arguments")
        calls.append(
            (function.get("name"), arguments if isinstance(arguments, str) else _text(arguments))
        )
    return (
        message.get("role"),
        _content(message),
        calls,
        message.get("tool_call_id"),
        thoughts if with_thoughts else "",
    )
