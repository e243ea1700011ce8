"""Count what training and drawing ask of a device: calls of torch, copies, and reads by the host.

A narrow model with all layers of the whole one makes as many calls, in seconds. `burnish doctor --count` prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from burnish.check.comparison import Material, RandomWeights, weighted_output
from burnish.check.generation import made_generator
from burnish.check.small_model import shrink_model
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.engines.base import Part, compute_dtype
from burnish.engines.factory import make_engine
from burnish.models.meta_init import count_flops
from burnish.records import Example, Request
from burnish.rollout.base import Sampling

SEQUENCES = 8
"""Sequences of a counted micro-batch, and completions that are drawn."""
TOKENS = 16
"""Tokens of each sequence. The first half is a prompt. Layers with a state make calls for each on the CPU, so there are few."""
_VOCABULARY = 64
_DRAWN = 16
_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "prim::")


@dataclass
class CallCounts:
    """What was counted, or the difference of two counts."""

    forward: Counter[str] = field(default_factory=Counter)
    """Calls by operator. A call launches one kernel, or a few if torch composes it."""
    backward: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    """Copies from the host's memory."""
    reads: int = 0
    """Times that the host reads a number of the device, for which it waits."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Calls by operator."""
    exchanged: Counter[str] = field(default_factory=Counter)
    """Bytes of the whole tensors in collectives, by operator."""
    before: list[int] = field(default_factory=list)
    """Bytes of each collective before the first matrix product."""
    after: list[int] = field(default_factory=list)
    """Bytes of each collective after the last."""

    def __sub__(self, other: CallCounts) -> CallCounts:
        return CallCounts(
            self.forward - other.forward,
            self.backward - other.backward,
            self.copies - other.copies,
            self.reads - other.reads,
            self.collectives - other.collectives,
            self.exchanged - other.exchanged,
            self.before,
            self.after,
        )


class CallCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count in `counts` what happens in its block on devices of one type.

    Views and memory that nobody has written cost nothing, and do not count. Kernels that code launches past torch, such as Triton's, are not seen.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = CallCounts()
        self._device_type = device_type
        self._multiplies = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = self.counts
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        takes = any(map(self._is_there, inputs))
        gives = any(map(self._is_there, outputs))
        if func is torch.ops.aten._local_scalar_dense.default or "nonzero" in func.name():
            counts.reads += takes
        elif inputs and not takes and gives:
            counts.copies += 1
        elif takes and not all(map(self._is_there, outputs)):
            counts.reads += 1
        elif func.namespace == "c10d":
            if not any(map(_is_of_one_rank, args)):
                self._exchange(func.name(), max(x.nbytes for x in inputs))
        elif (takes or gives) and not _is_free(func):
            if func.name().startswith("aten::mm"):
                self._multiplies = True
                counts.after.clear()
            in_backward = torch._C._current_graph_task_id() >= 0
            (counts.backward if in_backward else counts.forward)[func.name()] += 1
        return result

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _exchange(self, name: str, size: int) -> None:
        self.counts.collectives[name] += 1
        self.counts.exchanged[name] += size
        (self.counts.after if self._multiplies else self.counts.before).append(size)


def _is_of_one_rank(argument: Any) -> bool:
    """Return whether a collective's argument is a group of one rank, which exchanges nothing."""
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        return ProcessGroup.unbox(argument).size() == 1
    except RuntimeError:
        return False  # a kind of reduction


def _is_free(func: Any) -> bool:
    """Return whether a call launches no kernel: it makes a view, or memory that nobody has written."""
    is_view = any(
        value.alias_info and not value.alias_info.is_write for value in func._schema.returns
    )
    return is_view or func.name().startswith(_FREE)


def narrow_model(hf_config: PretrainedConfig, engine: EngineConfig) -> PretrainedConfig:
    """Return a narrow copy with all layers. Raises `UsageError` if the family allows none."""
    text = hf_config.get_text_config()
    return shrink_model(hf_config, engine, _VOCABULARY, text.num_hidden_layers)


def count_microbatch(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    *,
    lora: LoraConfig | None,
    layout: Layout,
    device: torch.device,
    is_group: bool = False,
) -> CallCounts:
    """Count a micro-batch's calls on this rank. Collective.

    Two steps, of one and of two micro-batches, are compared, so what happens once a step does not count. With `is_group` the sequences have
    one prompt. The loss has a few calls less than a method's own.
    """
    engine = make_engine(hf_config, config, OptimConfig(), layout=layout, device=device, lora=lora)
    weights = RandomWeights()
    engine.load(weights, Part.FROZEN)
    engine.load(weights, Part.WEIGHTS)
    layout = engine.layout
    flops = count_flops(hf_config)
    steps = []
    for microbatches in (1, 1, 2):  # the first one compiles
        examples = _examples(microbatches * layout.data_size, is_group)
        batch = make_batch(examples, layout, SEQUENCES * TOKENS, flops)
        with CallCounter(device.type) as counter:
            engine.forward_backward(batch, weighted_output)
        engine.optim_step(0.0)
        steps.append(counter.counts)
    engine.close()
    return steps[2] - steps[1]


def _examples(microbatches: int, is_group: bool) -> list[Example]:
    rng = np.random.default_rng(0)
    examples = []
    mask = np.arange(TOKENS) >= TOKENS // 2
    for _ in range(microbatches):
        token_ids = rng.integers(0, _VOCABULARY, (SEQUENCES, TOKENS))
        if is_group:
            token_ids[:, : TOKENS // 2] = token_ids[0, : TOKENS // 2]
        examples += [Example(ids, mask) for ids in token_ids]
    return examples


class TokenCounts(NamedTuple):
    """What drawing a token of each completion costs."""

    calls: float
    reads: float


def count_token(
    hf_config: PretrainedConfig, config: EngineConfig, device: torch.device
) -> TokenCounts:
    """Count the calls of the built-in generator, and its reads by the host, for a token of each completion."""
    material = Material(hf_config, (), config, None)
    generator, _ = made_generator(material, device, compute_dtype(config), SEQUENCES)
    prompt = np.arange(TOKENS // 2)
    counts = []
    for drawn in (_DRAWN, _DRAWN, 2 * _DRAWN):  # the first one compiles
        with CallCounter(device.type) as counter:
            generator.generate([Request(0, prompt, SEQUENCES)], Sampling(drawn))
        counts.append(counter.counts)
    generator.close()
    more = counts[2] - counts[1]
    return TokenCounts(more.forward.total() / _DRAWN, more.reads / _DRAWN)
