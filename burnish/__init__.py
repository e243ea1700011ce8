"""Burnish post-trains language models: supervised fine-tuning, preferences and reinforcement learning.

    import burnish

    result = burnish.sft(model="Qwen/Qwen3-0.6B", data="chats.jsonl", epochs=3)
    result = burnish.rl(model="Qwen/Qwen3-0.6B", data=rows, reward=correct, steps=100)
    result = burnish.dpo(model="Qwen/Qwen3-0.6B", data=pairs)    # and burnish.rm, a reward model
    result.model                                  # a directory that transformers loads
    burnish.evaluate(result.directory, data={"validation": held_out})    # the numbers by name
    burnish.run("my.py:DPO", "dpo.yaml")          # a method of your own: a subclass of burnish.Method

Settings are keywords, those of the configuration's file: `burnish config explain KEY` describes each. Each name, and torch with it, is
imported on first use.
"""

from burnish.version import __version__

_OF_API = ("Result", "dpo", "evaluate", "load_config", "rl", "rm", "run", "sft")
_OF_ENVIRONMENTS = (
    "Action",
    "EndedConversation",
    "Environment",
    "EnvironmentFailure",
    "Observation",
    "ToolCall",
)

__all__ = [
    *_OF_API,
    *_OF_ENVIRONMENTS,
    "BurnishError",
    "Engine",
    "Generator",
    "Method",
    "OfflineMethod",
    "RL",
    "Section",
    "Tracker",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _OF_API:
        from burnish import api

        return getattr(api, name)
    if name in _OF_ENVIRONMENTS:
        from burnish.environments import base

        return getattr(base, name)
    if name == "BurnishError":
        from burnish.errors import BurnishError

        return BurnishError
    if name == "Engine":
        from burnish.engines.base import Engine

        return Engine
    if name == "Generator":
        from burnish.rollout.base import Generator

        return Generator
    if name == "Method":
        from burnish.method import Method

        return Method
    if name == "RL":
        from burnish.methods.rl import RL

        return RL
    if name == "OfflineMethod":
        from burnish.methods.offline import OfflineMethod

        return OfflineMethod
    if name == "Section":
        from burnish.config.section import Section

        return Section
    if name == "Tracker":
        from burnish.tracking.trackers import Tracker

        return Tracker
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
