"""The common part of the generators of vLLM and SGLang."""

from __future__ import annotations

import copy
import logging
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.distributed.device import free_memory, total_memory
from burnish.errors import IncompatibleError, MissingError, few, install, refusing
from burnish.models.meta_init import build_on_meta, kept_in_fp32, longest_sequence
from burnish.models.names import tensor_specs
from burnish.records import Request
from burnish.rollout.base import Decode, Sampling
from burnish.rollout.builtin.sampling import Drawn, draw, uniforms
from burnish.rollout.running import LocalGenerator, Running

log = logging.getLogger("burnish")

# Bytes of weights that an engine gets at a time.
_WAVE_BYTES = 64 << 20
# Engines join these layers even if a model's `packed_modules_mapping` does not say so.
_JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def draw_settings(sampling: Sampling) -> list[float]:
    """Return a draw's settings; `Sampling(1, *settings)` restores the sampling."""
    return [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]


def draw_groups(
    logits: Tensor,
    groups: Iterable[tuple[Sampling, Tensor]],
    keys: Tensor,
    counts: Tensor,
    leave: Callable[[Tensor, Drawn], None],
) -> None:
    """Draw a token per row of `logits` [n, V] fp32; `leave` overwrites the rows in place.

    `groups` are samplings and their rows, perhaps on the CPU. `keys` and `counts` [n] are as for `uniforms`.
    """
    numbers = uniforms(keys, counts)
    for sampling, rows in groups:
        if len(rows) == len(logits):
            leave(logits, draw(logits, sampling, numbers))
        else:
            rows = rows.to(logits.device)
            part = logits[rows]
            leave(part, draw(part, sampling, numbers[rows.to(numbers.device)]))
            logits[rows] = part


@dataclass(slots=True, eq=False, kw_only=True)
class EngineRequest(Running):
    """A completion that an engine makes."""

    number: str
    """The request's name in the engine. All names are equally long: SGLang aborts every request whose name begins with the given one."""
    prompt: list[int]
    reported: Sequence[Any] = ()
    """The engine's own list of log-probs, which grows."""


class EngineGenerator(LocalGenerator[EngineRequest]):
    """Names an engine's requests, and puts it to sleep."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        max_length: int | None,
        experts: bool = False,
    ) -> None:
        limits = (max_length, longest_sequence(hf_config))
        positions = min(filter(None, limits), default=None)
        super().__init__(eos_token_ids, decode, positions, experts=experts)
        self._sleeps = device.type != "cpu"
        self._asleep = False
        self._numbers = count()
        self._meta_model = build_on_meta(hf_config)
        specs = tensor_specs(self._meta_model)
        fp32 = kept_in_fp32(hf_config, (spec.name for spec in specs))
        self._specs = {
            spec.name: spec._replace(dtype=torch.float32 if spec.name in fp32 else dtype)
            for spec in specs
        }
        """The model's tensors, with the engine's dtypes."""

    def _maker(self, request: Request) -> Callable[..., EngineRequest]:
        prompt = request.token_ids.tolist()
        return lambda **fields: EngineRequest(
            number=f"{next(self._numbers):016}", prompt=prompt, **fields
        )

    def release(self) -> None:
        """See `Generator.release`. Does nothing on a CPU."""
        if self._sleeps and not self._asleep:
            self._version = None
            self._asleep = True
            self._sleep()

    def _checksum(self, name: str, tensor: Tensor) -> tuple[TensorSpec, str]:
        spec = self._specs[name]
        return spec, Shard(spec, whole(spec.shape), tensor.to(spec.dtype)).checksum()

    @abstractmethod
    def _sleep(self) -> None: ...


def import_engine(
    title: str, oldest: tuple[int, ...], beyond: tuple[int, ...] | None = None
) -> Any:
    """Import vLLM or SGLang. Raises `MissingError` without it, `IncompatibleError` for an old one. Warns of one that is not older than `beyond`."""
    name = title.lower()
    wanted = f"{title} {'.'.join(map(str, oldest))} or newer"
    do = f"{install(name)}, or set rollout.engine=builtin"
    problem = f"{title} cannot be imported"
    with refusing(problem, MissingError, want=wanted, do=do):
        engine = import_module(name)
    version = tuple(map(int, re.findall(r"\d+", engine.__version__)[: len(oldest)]))
    if version and version < oldest:
        raise IncompatibleError(
            f"this {title} is too old", have=engine.__version__, want=wanted, do=install(name)
        )
    if version and beyond is not None and version >= beyond:
        range_text = f"older than {'.'.join(map(str, beyond))}"
        log.warning(
            "%s %s is not known to work; those %s are", title, engine.__version__, range_text
        )
    return engine


def share_beside_trainer(device: torch.device) -> float:
    """Return the share of an accelerator's free memory that an engine may take."""
    # A trainer's first step allocates Adam's two moments, each as large as all that it holds now.
    return max(0.5, 3 - 2 * total_memory(device) / free_memory(device))


@contextmanager
def starting(engine: str, config: PretrainedConfig) -> Iterator[str]:
    """Yield a directory with the configuration. Raises `IncompatibleError` for any failure in the block."""
    with (
        TemporaryDirectory(prefix="burnish-engine-") as directory,
        refusing(
            f"{engine} does not start with this model",
            IncompatibleError,
            do="lower rollout.slots or rollout.max_response_length, or set rollout.engine=builtin",
        ),
    ):
        config.save_pretrained(directory)
        yield directory


def with_architectures(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy that names the model's class for engines."""
    config = copy.deepcopy(hf_config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    config.architectures = [kind.__name__] if kind else list(config.architectures or ())
    return config


def joined_layer(model: Any, modules: Container[str], layer: str) -> tuple[str, list[str]]:
    """Return the engine's layer that holds a checkpoint's layer, and the layers joined in it, if any."""
    parent, _, last = layer.rpartition(".")
    for joined, parts in {**_JOINED, **getattr(model, "packed_modules_mapping", {})}.items():
        if layer not in modules and last in parts and f"{parent}.{joined}" in modules:
            return f"{parent}.{joined}", [f"{parent}.{part}" for part in parts]
    return layer, []


def whole_tensors(
    shards: Iterable[Shard], wanted: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each wanted tensor, in new memory and its dtype, once all its pieces have arrived.

    Raises `IncompatibleError` for a tensor that is unknown, has another shape, comes twice or never.
    """
    pending = dict(wanted)
    begun: dict[str, tuple[Tensor, int]] = {}
    for shard in shards:
        name = shard.spec.name
        shape = shard.spec.shape
        if name not in pending or pending[name].shape != shape:
            raise IncompatibleError(
                f"the weights do not fit the generator's model: {name}",
                have=f"shape {shape}" + (", after the whole tensor" if name in wanted else ""),
                want=f"shape {pending[name].shape}"
                if name in pending
                else "a tensor of the model, once",
                do="set rollout.engine=builtin",
            )
        if name not in begun:
            room = torch.empty(shape, dtype=pending[name].dtype, device=shard.tensor.device)
            begun[name] = room, math.prod(shape)
        tensor, missing = begun.pop(name)
        tensor[shard.box.slices].copy_(shard.part(shard.box))
        missing -= shard.box.elements
        if missing > 0:
            begun[name] = tensor, missing
        else:
            del pending[name]
            yield name, tensor
    if pending:
        raise IncompatibleError(
            f"the weights for the generator lack {next(iter(pending))}",
            have=f"{len(wanted) - len(pending)} of {len(wanted)} tensors",
            want=few(list(pending)),
            do="set rollout.engine=builtin",
        )


def waves(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors into lists of about `_WAVE_BYTES`."""
    wave: list[tuple[str, Tensor]] = []
    for named_tensor in tensors:
        wave.append(named_tensor)
        if sum(tensor.nbytes for _, tensor in wave) >= _WAVE_BYTES:
            yield wave
            wave = []
    if wave:
        yield wave
