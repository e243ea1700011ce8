"""The built-in methods, and how to find one by its name or its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from burnish import extend
from burnish.config.schema import RunConfig
from burnish.errors import UsageError, refusing
from burnish.method import Method

_NAMES = ("sft", "dpo", "rm", "rl", "online-dpo", "rejection-sampling", "eval")


@cache
def _builtin(name: str) -> Method:
    match name:
        case "sft":
            from burnish.methods.sft import SFT

            return SFT()
        case "dpo":
            from burnish.methods.dpo import DPO

            return DPO()
        case "rm":
            from burnish.methods.reward_modeling import RewardModeling

            return RewardModeling()
        case "rl":
            from burnish.methods.rl import RL

            return RL()
        case "online-dpo":
            from burnish.methods.online_dpo import OnlineDPO

            return OnlineDPO()
        case "rejection-sampling":
            from burnish.methods.rejection_sampling import RejectionSampling

            return RejectionSampling()
        case "eval":
            from burnish.methods.evaluation import Evaluation

            return Evaluation()
    raise KeyError(name)


class _BuiltinMethods(Mapping[str, Method]):
    """The methods by name. Each is imported when it is asked for."""

    def __getitem__(self, name: str) -> Method:
        return _builtin(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


METHODS: Mapping[str, Method] = _BuiltinMethods()
"""The built-in methods by name, in the order of the documents."""


def load_method(name: str) -> Method:
    """Return the method that `name` names: a built-in one, an entry point's, or `file.py:Class`. Raises `UsageError`."""
    if name in METHODS:
        return METHODS[name]
    homes = {each: f"{type(m).__module__}:{type(m).__name__}" for each, m in METHODS.items()}
    method_class = replace(extend.METHODS, builtins=homes).load(name, "METHOD")
    if not (isinstance(method_class, type) and issubclass(method_class, Method)):
        raise UsageError(
            f"{name} is not a method",
            have=f"{method_class.__name__}, which is no subclass of burnish.Method",
            want="a class of your own that derives from burnish.Method",
            do="name the class, as in burnish run my.py:MyMethod config.yaml",
        )
    with refusing(
        f"{name} cannot be used as a method",
        want="a class with the attributes name and title, and all methods of burnish.Method",
        do="complete the class",
    ):
        method = method_class()
        if not (method.name and method.title):
            raise ValueError("its name or title is empty")
    if method.name in METHODS:
        raise UsageError(
            f"{name} has the name of a built-in method",
            have=f"name = {method.name!r}",
            want="a name of its own, which runs record",
            do="change the attribute name",
        )
    method.source = name
    return method


def method_meant_by(config: RunConfig) -> Method:
    """Return the training method that a configuration is written for.

    It generates if there is a reward. Of several, it is the first with the settings of the section `method`.
    """
    methods = [
        method for method in METHODS.values() if method.trains and method.generates == config.scores
    ]
    return next((method for method in methods if _takes(method, config)), methods[0])


def _takes(method: Method, config: RunConfig) -> bool:
    try:
        method.settings(config)
    except UsageError:
        return False
    return True
