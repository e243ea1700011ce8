"""What the generators of vLLM and SGLang have in common."""

from __future__ import annotations

import copy
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from burnish.boxes.shards import Shard, TensorSpec
from burnish.errors import IncompatibleError, MissingError, UsageError, few, install
from burnish.models.meta_init import kept_in_fp32, longest_sequence
from burnish.models.names import tensor_specs
from burnish.records import Completion, Floats, Request
from burnish.rollout.base import Sampling, Underway, Watch, require_valid
from burnish.rollout.builtin.decoding import Running, started
from burnish.rollout.builtin.sampling import Drawn, draw, uniforms
from burnish.rollout.builtin.stopping import Decode, StopRule

_WAVE_BYTES = 64 << 20
# Of weights that are handed to an engine at a time.
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""What engines join even where a model's `packed_modules_mapping` does not say so."""


class DrawSettings(NamedTuple):
    """Sampling parameters of a draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: Sampling) -> DrawSettings:
        """Return those of a sampling."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def draw_groups(
    logits: Tensor,
    groups: Iterable[tuple[DrawSettings, Tensor]],
    keys: Tensor,
    counts: Tensor,
    leave: Callable[[Tensor, Drawn], None],
) -> None:
    """Draw rows of `logits` [n, V] fp32; have `leave` overwrite them in place.

    `groups` are settings and their rows. `keys` and `counts` [n] are as for `uniforms`.
    """
    numbers = uniforms(keys, counts)
    for settings, rows in groups:
        if len(rows) == len(logits):
            leave(logits, draw(logits, Sampling(1, *settings), numbers))
        else:
            part = logits[rows]
            own = numbers[rows.to(numbers.device)]
            leave(part, draw(part, Sampling(1, *settings), own))
            logits[rows] = part


@dataclass(slots=True, eq=False, kw_only=True)
class EngineRequest(Running):
    """A completion that an engine makes."""

    number: str
    """Its name there; of equal length for all, as SGLang ends all requests whose names begin so."""
    prompt: list[int]
    reported: Sequence[Any] = ()
    """The engine's own list of log-probs, which grows."""


class EngineGenerator(ABC):
    """Keeps the requests and completions of an engine."""

    central = False

    def __init__(
        self,
        hf_config: PretrainedConfig,
        device: torch.device,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        max_length: int | None,
        experts: bool = False,
    ) -> None:
        self._records_experts = experts
        self._eos_token_ids, self._decode = tuple(eos_token_ids), decode
        limits = (max_length, longest_sequence(hf_config))
        self._max_positions = min(filter(None, limits), default=None)
        self._sleeps, self._asleep = device.type != "cpu", False
        self._version: int | None = None
        self._numbers = count()
        self._underway: Callable[[], list[Underway]] = list

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`. Raises `UsageError` as the built-in generator does."""
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        require_valid(requests, sampling, self._max_positions)
        if sampling.experts and not self._records_experts:
            raise UsageError(
                "algorithm.router_replay: the generator does not record experts",
                have="algorithm.router_replay=rollout",
                do="set algorithm.router_replay=recompute or none, or rollout with another generator",
            )
        rule = StopRule(sampling, self._eos_token_ids, self._decode)
        asked = time.time()
        groups = [
            started(request, sampling, partial(self._request, request.token_ids.tolist()))
            for request in requests
        ]

        def so_far() -> list[Underway]:
            found = [
                [each.completion(*self._logprobs(each), asked) for each in group]
                for group in groups
            ]
            return [Underway(sampling, *each) for each in zip(requests, found, strict=True)]

        self._underway = so_far
        try:
            self._complete(
                {each.number: each for group in groups for each in group}, sampling, rule, watch
            )
        finally:
            self._underway = list
        return [each.completions for each in so_far()]

    def _request(self, prompt: list[int], **given: Any) -> EngineRequest:
        return EngineRequest(number=f"{next(self._numbers):016}", prompt=prompt, **given)

    def so_far(self) -> list[Underway]:
        """See `Continuable.so_far`."""
        return self._underway()

    def release(self) -> None:
        """See `Generator.release`. A CPU's memory stays. Not run on accelerators."""
        if self._sleeps and not self._asleep:
            self._version, self._asleep = None, True
            self._sleep()

    @abstractmethod
    def _sleep(self) -> None: ...

    @abstractmethod
    def _complete(
        self,
        running: dict[str, EngineRequest],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None: ...

    @abstractmethod
    def _logprobs(self, each: EngineRequest) -> tuple[Floats, Floats]:
        """Return sampled and raw log-probs of own tokens."""


def import_engine(title: str, oldest: tuple[int, ...]) -> Any:
    """Import vLLM or SGLang. Raises `MissingError` without it, `IncompatibleError` for an old one."""
    name, wanted = title.lower(), f"{title} {'.'.join(map(str, oldest))} or newer"
    try:
        engine = import_module(name)
    except ModuleNotFoundError as error:
        raise MissingError(
            f"rollouts with {title} need a package that is not installed",
            have=f"no package {error.name}",
            want=wanted,
            do=f"{install(name)}, or rollout with the built-in generator",
        ) from error
    found = tuple(map(int, re.findall(r"\d+", engine.__version__)[: len(oldest)]))
    if found and found < oldest:
        raise IncompatibleError(
            f"this {title} is too old", have=engine.__version__, want=wanted, do=install(name)
        )
    return engine


def held_specs(
    model: PreTrainedModel, hf_config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return a model's tensors by name, with the engine's dtypes."""
    specs = tensor_specs(model)
    fp32 = kept_in_fp32(hf_config, (spec.name for spec in specs))
    return {
        spec.name: spec._replace(dtype=torch.float32 if spec.name in fp32 else dtype)
        for spec in specs
    }


def with_architectures(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy that names the model's class for engines."""
    config = copy.deepcopy(hf_config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    config.architectures = [kind.__name__] if kind else list(config.architectures or ())
    return config


def whole_tensors(
    shards: Iterable[Shard], wanted: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each wanted tensor, in new memory and its dtype, once all its pieces have come.

    Raises `IncompatibleError` for one that is unknown, has another shape, comes twice or never.
    """
    left = dict(wanted)
    begun: dict[str, tuple[Tensor, int]] = {}
    for shard in shards:
        name, shape = shard.spec.name, shard.spec.shape
        if name not in left or left[name].shape != shape:
            raise IncompatibleError(
                f"the weights do not fit the generator's model: {name}",
                have=f"shape {shape}" + (", after all of it" if name in wanted else ""),
                want=f"shape {left[name].shape}" if name in left else "each tensor of the model",
            )
        if name not in begun:
            begun[name] = torch.empty(shape, dtype=left[name].dtype), math.prod(shape)
        tensor, missing = begun.pop(name)
        tensor[shard.box.slices].copy_(shard.tensor)
        missing -= shard.box.elements
        if missing > 0:
            begun[name] = tensor, missing
        else:
            del left[name]
            yield name, tensor
    if left:
        raise IncompatibleError(
            f"the weights for the generator lack {next(iter(left))}",
            have=f"{len(wanted) - len(left)} of {len(wanted)} tensors",
            want=few(list(left)),
        )


def waves(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors into lists of about `_WAVE_BYTES`."""
    wave: list[tuple[str, Tensor]] = []
    for each in tensors:
        wave.append(each)
        if sum(tensor.nbytes for _, tensor in wave) >= _WAVE_BYTES:
            yield wave
            wave = []
    if wave:
        yield wave
