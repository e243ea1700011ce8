"""Built-in parts, and parts of one's own: the only table from names to `module:object`.

A setting names an extension in one of three ways: a built-in name, the name of an entry point in the kind's group
(`burnish.engines`) of an installed distribution, or a class of one's own as `file.py:Class` or `module:Class`.
Nothing is imported before a setting asks for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from burnish.errors import UsageError, few
from burnish.functions import Registry, did_you_mean, fingerprint, load_function

if TYPE_CHECKING:  # a table knows its protocol by name, so that nothing is loaded with it
    from burnish.engines.base import Engine
    from burnish.files.backends import RemoteDestination, RemoteSource
    from burnish.method import Method
    from burnish.rollout.base import Generator
    from burnish.tracking.trackers import Tracker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """The extensions of one kind. `T` is what `load` returns."""

    kind: str
    """What errors call one: `engine`. The group of entry points is its plural, `burnish.engines`."""
    protocol: str
    """`module:Class` of the protocol, which says how one is made and what it does."""
    builtins: Mapping[str, str]
    """`module:Class` by built-in name."""

    def target(self, name: str, setting: str) -> str:
        """Return the `module:Class` or `file.py:Class` that a name stands for. Import nothing of it.

        Entry points are read only for a name that is neither built in nor a class of one's own. Raises `UsageError`
        for an unknown name, and for one that two distributions register.
        """
        if name in self.builtins:
            return self.builtins[name]
        if ":" in name:
            return name
        installed = self._installed()
        targets = installed.get(name, {})
        if len(targets) == 1:
            return next(iter(targets))
        if targets:
            raise UsageError(
                f"{setting}: two distributions register the {self.kind} {name}",
                have=" and ".join(f"{target} of {owner}" for target, owner in targets.items()),
                want="one of them",
                do=f"uninstall the other, or set {setting} to module:Class",
            )
        known = [*self.builtins, *installed]
        raise UsageError(
            f"{setting}: there is no {self.kind} {name}",
            have=repr(name),
            want=f"{', '.join(known)}, file.py:Class or module:Class",
            do=did_you_mean(name, known)
            or f"correct {setting}, or install the package that registers it in the entry points burnish.{self.kind}s",
        )

    def load(self, name: str, setting: str, asked: Collection[str] = ()) -> T:
        """Import the class that `setting` names.

        Raises `UsageError` for one that lacks methods of the protocol, or whose constructor does not take the protocol's
        arguments. Those with a default are needed only if they are in `asked`.
        """
        loaded: Any = load_function(self.target(name, setting), setting)
        if name not in self.builtins:
            protocol: Any = load_function(self.protocol, setting)
            lacking = "; ".join(_lacking(loaded, protocol, asked))
            if lacking:
                raise self._misfit(name, setting, lacking)
        return loaded

    def fingerprint(self, name: str, setting: str) -> str:
        """Return a digest of the file that defines a class of the user's; the name of a built-in one."""
        return name if name in self.builtins else fingerprint(self.target(name, setting), setting)

    def require_complete(self, instance: object, name: str, setting: str) -> None:
        """Raise `UsageError` if an object of the class that `name` names lacks attributes of the protocol."""
        protocol: Any = load_function(self.protocol, setting)
        missing = [a for a in _attributes(protocol) if not _has(instance, a)]
        if missing:
            raise self._misfit(name, setting, f"no attributes {few(missing)}")

    def _misfit(self, name: str, setting: str, lacking: str) -> UsageError:
        home, _, protocol = self.protocol.rpartition(":")
        return UsageError(
            f"{setting}: {name} cannot be used as {self.kind}",
            have=lacking,
            want=f"what {home}.{protocol} describes",
            do=f"add it, or let the class inherit from {protocol} or from a built-in one",
        )

    def _installed(self) -> dict[str, dict[str, str]]:
        """Return the entry points by name: each `module:Class` with its distribution."""
        from importlib.metadata import entry_points

        targets: dict[str, dict[str, str]] = {}
        for entry in entry_points(group=f"burnish.{self.kind}s"):
            owner = entry.dist.name if entry.dist else "an unknown distribution"
            targets.setdefault(entry.name, {})[f"{entry.module}:{entry.attr}"] = owner
        return targets


def _lacking(loaded: Any, protocol: Any, asked: Collection[str]) -> Iterator[str]:
    if not isinstance(loaded, type):
        yield f"a {type(loaded).__name__}, which is no class"
        return
    if not hasattr(loaded, "__getattr__"):  # one that passes calls on is believed
        abstract = getattr(loaded, "__abstractmethods__", ())
        methods = [name for name in _methods(protocol) if not hasattr(loaded, name)]
        methods += [name for name in _methods(protocol) if name in abstract]
        if methods:
            yield f"no methods {few(methods)}"
    parameters = [*inspect.signature(protocol).parameters.values()]
    needed = [p for p in parameters if p.default is p.empty or p.name in asked]
    keywords = {p.name: p for p in needed if p.kind is p.KEYWORD_ONLY}
    positional = [p for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(loaded).bind(*positional, **keywords)
    except (TypeError, ValueError) as error:
        names = ", ".join(p.name for p in needed)
        yield f"a constructor that does not take {names} ({error})"


def _methods(protocol: Any) -> list[str]:
    """Return the public methods of a protocol."""
    return [
        name
        for base in protocol.__mro__
        for name, value in vars(base).items()
        if not name.startswith("_") and isinstance(value, staticmethod | FunctionType)
    ]


def _attributes(protocol: Any) -> list[str]:
    """Return the public attributes that a protocol declares."""
    return [
        name
        for base in protocol.__mro__
        for name in vars(base).get("__annotations__", ())
        if not name.startswith("_")
    ]


def _has(instance: object, name: str) -> bool:
    return hasattr(type(instance), name) or hasattr(instance, name)


METHODS: Table[type[Method]] = Table("method", "burnish.method:Method", {})
"""What `burnish run` takes. `burnish.methods.table` adds the built-in ones, whose names occur only there."""

ENGINES: Table[type[Engine]] = Table(
    "engine",
    "burnish.engines.base:Engine",
    {
        "torch": "burnish.engines.torch.torch_engine:TorchEngine",
        "megatron": "burnish.engines.megatron.megatron_engine:MegatronEngine",
    },
)
"""Values of `engine.kind`."""

GENERATORS: Table[type[Generator]] = Table(
    "generator",
    "burnish.rollout.base:Generator",
    {
        "builtin": "burnish.rollout.builtin.generator:BuiltinGenerator",
        "vllm": "burnish.rollout.vllm.vllm_generator:VllmGenerator",
        "sglang": "burnish.rollout.sglang.sglang_generator:SglangGenerator",
        "openai": "burnish.rollout.openai:EndpointGenerator",
    },
)
"""Values of `rollout.engine`. `openai` is made otherwise: it has no model."""

TRACKERS: Table[type[Tracker]] = Table(
    "tracker",
    "burnish.tracking.trackers:Tracker",
    {
        "tensorboard": "burnish.tracking.tensorboard:TensorBoardTracker",
        "wandb": "burnish.tracking.services:WandbTracker",
        "mlflow": "burnish.tracking.services:MlflowTracker",
        "trackio": "burnish.tracking.services:TrackioTracker",
        "swanlab": "burnish.tracking.services:SwanlabTracker",
    },
)
"""Values of `tracking.trackers`."""

SOURCES: Table[type[RemoteSource]] = Table(
    "source",
    "burnish.files.backends:RemoteSource",
    {
        "hdfs": "burnish.files.backends:HdfsBackend",
        "s3": "burnish.files.backends:S3Backend",
        "gs": "burnish.files.backends:GcsBackend",
        "file": "burnish.files.backends:FileBackend",
        "memory": "burnish.files.backends:MemoryBackend",
    },
)
"""Schemes of the URLs of data and models."""

DESTINATIONS: Table[type[RemoteDestination]] = Table(
    "source", "burnish.files.backends:RemoteDestination", SOURCES.builtins
)
"""Sources that can be written as well, for `checkpoint.mirror` and `output_dir`."""

ADVANTAGES: Registry = {
    name: f"burnish.algorithms.advantages:{name}"
    for name in (
        "grpo", "dr_grpo", "grpo_batch_std", "rloo", "opo", "gpg", "pass_at_k", "gdpo", "remax", "reinforce_plus_plus_baseline",
    )
} | {name: f"burnish.algorithms.turn_advantages:{name}" for name in ("turn_grpo", "gigpo")}  # fmt: skip
"""Functions of `algorithm.advantage`. `burnish.algorithms.critic` has those that differ among the tokens of a completion."""

POLICY_LOSSES: Registry = {
    name: f"burnish.algorithms.policy_loss:{name}"
    for name in ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
}
"""Functions of `algorithm.policy_loss`."""

FINE_TUNING_LOSSES: Registry = {
    "nll": "burnish.algorithms.fine_tuning:token_nll",
    "dft": "burnish.algorithms.fine_tuning:dft",
}
"""Functions of `method.loss` of `burnish sft`."""

PREFERENCE_LOSSES: Registry = {
    name: f"burnish.algorithms.preferences:{name}"
    for name in (
        "sigmoid",
        "ipo",
        "hinge",
        "simpo",
        "orpo",
        "apo_zero",
        "apo_down",
        "robust",
        "nll",
    )
}
"""Functions of `method.loss` of `burnish dpo` that compare two answers."""

ANSWER_LOSSES: Registry = {"kto": "burnish.algorithms.preferences:kto"}
"""Those that judge single answers."""

ENVIRONMENTS: Mapping[str, str] = {
    "agent": "burnish.environments.gateway:Agent",
    "reasoning_gym": "burnish.environments.reasoning_gym:ReasoningGym",
    "mcp": "burnish.environments.mcp:McpTools",
    "textarena": "burnish.environments.textarena:TextArena",
    "skyrl_gym": "burnish.environments.skyrl_gym:SkyRLGym",
    "verl": "burnish.environments.verl:VerlTools",
    "cookbook": "burnish.environments.cookbook:CookbookEnvironment",
    "openenv": "burnish.environments.openenv:OpenEnv",
    "trl": "burnish.environments.trl:TrlEnvironment",
    "verifiers": "burnish.environments.verifiers:Verifiers",
}
"""Classes that adapt agents and packages, by their settings in `rollout.environment`."""
NEMO_GYM = "burnish.environments.nemo_gym:NemoGym"
"""That of `agent`, if it is a URL."""

COMPARISONS: Registry = {
    name: f"burnish.rewards.builtin:{name}"
    for name in ("exact_match", "numeric", "regex", "math_verify")
}
"""Functions of `reward.functions` that compare texts. A ground truth that is a list has several right answers."""

REWARDS: Registry = {
    **COMPARISONS,
    "input_output": "burnish.sandbox.graders:input_output",
    "unit_tests": "burnish.sandbox.graders:unit_tests",
}
"""Functions of `reward.functions`."""
