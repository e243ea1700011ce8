"""Settings of conversations: what the model talks with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from burnish.config.section import MayChange, Section
from burnish.extend import ENVIRONMENTS, NEMO_GYM


class EnvironmentConfig(Section):
    """What the model talks with: tools, a game, a simulated user."""

    function: str | None = None
    """A class with the methods of `burnish.Environment`, as file.py:Class or module:Class. One object is one conversation. null: the model gives one answer to each prompt."""
    agent: str | None = None
    """A function that holds a conversation over HTTP, as file.py:function or module:function. It gets a row, a URL and a seed, speaks OpenAI's API at the URL, and returns rewards. Or the URL of NeMo Gym's head server, whose agents hold the conversations."""
    reasoning_gym: str | None = None
    """A data set of the package reasoning-gym, such as chain_sum, in place of `function` and `data.train`. It makes the prompts and scores the answers."""
    trl: str | list[str] | None = None
    """A class for TRL's `environment_factory`, or functions for its `tools`, or a list of both, as file.py:Name or module:Name."""
    mcp: str | list[str] | None = None
    """MCP servers whose tools the model may call, as commands or URLs."""
    textarena: str | None = None
    """A game of the package TextArena, such as Wordle-v0, in place of `function` and `data.train`."""
    skyrl_gym: str | None = None
    """An environment of the package skyrl-gym, such as gsm8k_multi_turn, or file.py:Class of one that is written for it."""
    verl: str | list[str] | None = None
    """Files of tools that are written for verl: its `tool_config_path` (YAML), its `function_tool_path` (Python), or both."""
    cookbook: str | None = None
    """A `MessageEnv` or `EnvGroupBuilder` of tinker-cookbook, or a function that makes one, as file.py:Name or module:Name."""
    openenv: str | None = None
    """The URL of a server of OpenEnv. Its tools, or its actions as a tool, become the model's."""
    verifiers: str | None = None
    """A task set of the package verifiers, in place of `function` and `data.train`. Its training client speaks to the gateway."""
    kwargs: dict[str, Any] = {}
    """Arguments of its constructor, by name. Those of packages' environments are in the guide *Environments and tools*."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of turns that the model takes. `rollout.max_response_length` limits all tokens after the prompt, those of the environment included."""
    max_calls: int = Field(32, ge=0)
    """Maximum number of tool calls in a conversation. Calls above it are not made, and the conversation ends."""
    max_reply_tokens: int = Field(1024, ge=1)
    """Maximum length of the environment's answer, in tokens. A longer one ends the conversation."""
    max_unreadable_turns: int = Field(2, ge=0)
    """How many turns in a row may have a call that cannot be read. The model is told why. One more ends the conversation."""
    history: Literal["exact", "appended", "rendered"] = "exact"
    """How a conversation grows. exact: refuse a chat template that writes earlier turns otherwise than the model said them, such as without thoughts. appended: keep every turn as it was said. rendered: render the conversation anew before each turn, as the template is used elsewhere. A turn whose rendering does not go on from the last one trains as a sequence of its own."""
    pace: Literal["waves", "free"] = "waves"
    """waves: all conversations take a turn, then all environments answer, and a run in fp32 repeats to the bit. free: a conversation goes on while others decode, which is faster where turns differ in length, and repeats up to rounding. Only the built-in generator in the training process."""
    timeout_seconds: MayChange[float] = Field(30.0, gt=0)
    """Deadline of each call of an environment. A conversation whose environment is late is dropped, and its process starts again."""
    workers: MayChange[int] = Field(4, ge=1)
    """Processes that run environments, beside each training process. Each makes one call at a time, or all of a wave if they are coroutines."""

    @property
    def named(self) -> dict[str, Any]:
        """The environment by the setting that names it, `function` or a package; empty without one."""
        values = {name: getattr(self, name) for name in ("function", *ENVIRONMENTS)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def target(self) -> str | None:
        """The class: `function`, or that which adapts a package; None without an environment."""
        if self.has_gym_agents:
            return NEMO_GYM
        return next((ENVIRONMENTS.get(name, value) for name, value in self.named.items()), None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of its constructor. A package's class gets its setting too, by the setting's name."""
        own: dict[str, Any] = {n: v for n, v in self.named.items() if n in ENVIRONMENTS}
        if self.has_agents:
            own["timeout_seconds"] = self.timeout_seconds
        return {**own, **self.kwargs}

    @property
    def has_agents(self) -> bool:
        """Whether conversations are held by agents, which ask for the model's turns over HTTP."""
        return self.agent is not None or self.verifiers is not None

    @property
    def has_gym_agents(self) -> bool:
        """Whether `agent` is the URL of NeMo Gym."""
        return self.agent is not None and "://" in self.agent
