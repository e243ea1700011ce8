"""The runs that `bench.planning` measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from burnish.config.schema import RunConfig
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner
from burnish.plan.shapes import model_shape

MIXED = (0.31, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04)
"""Lengths of a supervised micro-batch's sequences, as fractions of its tokens."""
BASE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
    "qwen2": {"tie_word_embeddings": True},
    "deepseek_v3": {
        "moe_intermediate_size": 192,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "head_dim": 16,
        "num_key_value_heads": 8,
    },
    "glm4_moe": {
        "moe_intermediate_size": 192,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    "qwen3_next": {
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 192,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "minimax_m2": {
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3-30B-A3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
"""Models of full size."""


@dataclass(frozen=True)
class Case:
    """A model and the settings of its run."""

    family: str
    """The model's `model_type`."""
    precision: str
    """`engine.precision`."""
    checkpointing: str
    """`engine.activation_checkpointing`."""
    tokens: int
    """Tokens of a micro-batch on one process."""
    processes: int = 1
    """Number of processes that the model is sharded over."""
    microbatches: int = 1
    """Micro-batches per step."""
    model: dict[str, Any] = field(default_factory=dict)
    """Further fields of the model's config.json."""
    command: Literal["sft", "rl"] = "sft"
    """rl: with a generator, log-probs before the update, and a reference."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings, by their dotted names."""
    size: str = ""
    """A key of `SHAPES`, for a model on a simulated accelerator (`bench.planning_imagined`)."""

    @property
    def name(self) -> str:
        """The whole case in a few words."""
        more = [f"as {self.size} on an accelerator"] if self.size else []
        more += [f"{key}={value}" for key, value in self.model.items()]
        more += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        more += [f"{key}={value}" for key, value in self.more.items()]
        return ", ".join(
            [
                f"{self.command} {self.family} {self.precision}",
                f"checkpointing {self.checkpointing}",
                f"{self.tokens} tokens",
                f"{self.processes} process{'es' if self.processes > 1 else ''}",
                *more,
            ]
        )

    def settings(self) -> dict[str, Any]:
        """The run's configuration."""
        shape = SHAPES[self.size] if self.size else MORE.get(self.family, {})
        fresh = {"model_type": self.family, **BASE, **shape, **self.model}
        engine = {
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "logprob_chunk": 2048 if self.size else 512,
            "max_skipped_steps": 100,
        }
        values: dict[str, Any] = {"model": {"fresh": fresh}, "engine": engine}
        values["batch"] = {"tokens_per_device": self.tokens}
        if self.command == "sft":
            values["data"] = {"max_length": self.together // len(MIXED)}
            values["batch"]["examples"] = len(MIXED) * self.microbatches * self.shares
        else:
            sequence = self.together // 8
            values["data"] = {"max_prompt_length": sequence // 4}
            values["rollout"] = {"n": 4, "max_response_length": sequence - sequence // 4}
            values["batch"] |= {"prompts": 4 * self.shares, "minibatches": 2}
            values["algorithm"] = {"kl": {"coef": 0.001}}
        for name, value in self.more.items():
            section, _, key = name.rpartition(".")
            inner = values
            for each in section.split("."):
                inner = inner.setdefault(each, {})
            inner[key] = value
        return values

    def planned(self, *, shared_cache: bool = True) -> dict[str, float]:
        """Return the planned bytes by phase, without those on the host.

        `shared_cache`: the CPU has no matrix units, so keys and values are in fp32.
        """
        config = RunConfig.model_validate(self.settings())
        fresh = config.model.fresh
        assert isinstance(fresh, dict)
        name = "H100" if self.size else "CPU"
        devices = parse_devices(f"{self.processes}x{name}")
        devices = replace(devices, shared_cache=shared_cache and devices.cpu)
        plan, refused = Planner(
            model_shape(fresh, config.engine.kind), config, METHODS[self.command], devices
        ).as_configured()
        if plan is None:
            raise AssertionError(f"{self} cannot be planned") from refused
        phases = plan.phases.items()
        return {phase: sum(parts.values()) - parts.get("host", 0.0) for phase, parts in phases}

    @property
    def stands_alone(self) -> bool:
        """Whether one process can stand for all of them: they only run collectives whose results do not change memory."""
        exchanging = ("engine.pipeline_parallel", "engine.expert_parallel")  # values decide sizes
        others = self.more.get("optim.kind") == "muon"
        others = others or any(name in self.more for name in exchanging)
        return self.command == "sft" and not others

    @property
    def saves(self) -> bool:
        """Whether a save is measured, because all the state that it copies is on the device."""
        return (
            self.command == "rl"
            and not self.is_megatron
            and "engine.offload_during_rollout" not in self.more
        )

    @property
    def is_megatron(self) -> bool:
        """Whether the engine is Megatron's."""
        return self.more.get("engine.kind") == "megatron"

    @property
    def together(self) -> int:
        """Tokens of a micro-batch on all processes that share it."""
        return self.tokens * int(self.more.get("engine.sequence_parallel", 1))

    @property
    def shares(self) -> int:
        """Number of parts that a step is divided into."""
        kinds = ("sequence", "tensor", "pipeline")
        sharing = [self.more.get(f"engine.{each}_parallel", 1) for each in kinds]
        return self.processes // int(np.prod(sharing))


def _cases() -> Iterator[Case]:
    for family in ("llama", "qwen3", "gemma3_text", "olmo2", "qwen3_moe"):
        yield Case(family, "fp32", "none", 1024)
        yield Case(family, "bf16", "full", 1024)
    for checkpointing in ("none", "selective", "full"):
        yield Case("qwen3", "bf16", checkpointing, 4096)
    yield Case("qwen3", "fp32", "selective", 2048)
    yield Case("qwen2", "bf16", "none", 512, model={"vocab_size": 32768})
    yield Case("llama", "fp32", "full", 1024, model={"vocab_size": 32768})
    smooth = {"method.label_smoothing": 0.1}
    words = {"vocab_size": 32768}
    yield Case("qwen3", "bf16", "full", 512, model=words, more=smooth)
    yield Case("llama", "fp32", "full", 1024, model=words, more=smooth)
    yield Case("qwen3", "bf16", "none", 256, microbatches=3)
    for checkpointing in ("none", "full"):
        yield Case("qwen3", "bf16", checkpointing, 1024, processes=2)
    yield Case("llama", "fp32", "selective", 1024, processes=2)
    yield Case("qwen3_moe", "bf16", "selective", 512, processes=2)
    yield _small("qwen3_moe", "bf16", "none", 2, {"engine.expert_parallel": 2})
    once = {"engine.reduce_each_microbatch": False}
    for more in ({}, once):
        yield Case("qwen3", "fp32", "none", 256, processes=2, microbatches=3, more=more)
    yield Case("qwen3", "bf16", "full", 256, 4, 3, more={"engine.replicas": 2})
    yield Case("qwen3", "fp32", "none", 1024, command="rl")
    yield Case("qwen3", "bf16", "selective", 2048, command="rl")
    yield from _rl_cases()
    yield from _shared_cases()
    yield from _other_cases()
    yield from _cases_with_less()
    yield from _megatron_cases()
    yield from _full_cases()


def _rl_cases() -> Iterator[Case]:
    """Yield reinforcement learning on several processes, and saves in the background."""
    tensor = {"engine.tensor_parallel": 2}
    sequence = {"engine.sequence_parallel": 2}
    background = {"checkpoint.background": True}
    yield _small("qwen3", "bf16", "none", 1, background, "rl")
    wide = {"model.lora.rank": 64}
    for more in (background, tensor, sequence, {"model.lora.rank": 16}, wide, wide | tensor):
        yield _small("qwen3", "bf16", "none", 2, more, "rl")
    yield _small("qwen3", "fp32", "none", 2, {"engine.replicas": 2}, "rl")
    yield _small("qwen3_moe", "bf16", "full", 2, {}, "rl")
    yield _small("qwen3", "fp32", "none", 2, {"algorithm.advantage": "gae"}, "rl")
    words = {"num_hidden_layers": 3, "vocab_size": 16384}  # fewer tokens than gathered parameters
    yield Case("llama", "fp32", "none", 64, 2, model=words, command="rl")
    yield _small("qwen3", "bf16", "none", 4, {}, "rl")
    yield _small("qwen3", "fp32", "selective", 4, sequence | tensor, "rl")


def _full_cases() -> Iterator[Case]:
    """Yield models with layers of full size over many devices, some with the whole vocabulary. Few layers suffice: all are alike."""
    yield _full("8B", "none", 8192, 32, 32768)
    yield _full("30B-A3B", "full", 8192, 64, 32768)
    yield _full("30B-A3B", "none", 2048, 64, 151936)
    yield _full("8B", "selective", 4096, 32, 32768, {"engine.sequence_parallel": 4})
    yield _full("8B", "full", 8192, 4, 32768, {"engine.tensor_parallel": 4})
    yield _full("8B", "selective", 8192, 64, 151936, {"engine.tensor_parallel": 8})
    yield _full("0.6B", "selective", 2048, 1, 151936)
    yield _full("8B", "full", 2048, 64, 151936, {"engine.replicas": 2})
    adapter = {"model.lora.rank": 64}
    yield _full("8B", "none", 4096, 8, 32768, adapter)
    yield _full("8B", "none", 4096, 8, 32768, adapter | {"engine.tensor_parallel": 8})


def _full(
    size: str,
    checkpointing: str,
    tokens: int,
    processes: int,
    words: int,
    more: dict[str, Any] | None = None,
) -> Case:
    family = "qwen3_moe" if size.endswith("A3B") else "qwen3"
    model = {"num_hidden_layers": 3, "vocab_size": words}
    name = f"Qwen3-{size}"
    return Case(
        family, "bf16", checkpointing, tokens, processes, model=model, more=more or {}, size=name
    )


def _shared_cases() -> Iterator[Case]:
    """Yield processes that share micro-batches, and copies of the model."""
    sequence = {"engine.sequence_parallel": 2}
    tensor = {"engine.tensor_parallel": 2}
    for more in (sequence, tensor):
        yield _small("qwen3", "bf16", "none", 2, more)
        yield _small("llama", "fp32", "selective", 2, more)
        yield _small("gemma3_text", "fp32", "none", 2, more)
        yield _small("qwen3_moe", "bf16", "full", 2, more)
        yield _small("qwen3", "bf16", "none", 4, more)
    yield _small("qwen3", "fp32", "full", 4, sequence | tensor)
    for processes in (2, 4):
        yield _small("qwen3", "bf16", "selective", processes, {"engine.replicas": 2})


def _other_cases() -> Iterator[Case]:
    """Yield adapters, a critic, Muon, and weights that stay gathered."""
    adapter = {"model.lora.rank": 16}
    critic = {"algorithm.advantage": "gae"}
    for processes in (1, 2):
        yield _small("qwen3", "bf16", "none", processes, adapter)
        yield _small("gemma3_text", "bf16", "none", processes, adapter)
    yield _small("olmo2", "bf16", "none", 1, adapter)
    wide = {"model.lora.rank": 64}
    tensor = {"engine.tensor_parallel": 2}
    for checkpointing in ("none", "selective"):
        yield _small("qwen3", "bf16", checkpointing, 2, wide | tensor)
    for each in (wide, wide | tensor, wide | {"engine.tensor_parallel": 4}):
        yield _small("llama", "bf16", "none", 4, each)
    experts = {"model.lora.targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    yield _small("qwen3_moe", "bf16", "none", 2, wide | tensor | experts)
    yield _small("llama", "fp32", "selective", 1, adapter)
    for targets in (("q_proj", "o_proj"), ("experts.gate_up_proj", "experts.down_proj")):
        yield _small(
            "qwen3_moe", "bf16", "none", 1, adapter | {"model.lora.targets": list(targets)}
        )
    yield _small("qwen3", "fp32", "full", 1, {"optim.kind": "muon"})
    yield _small("qwen3", "bf16", "none", 2, {"engine.reshard_after_forward": False})
    beside = adapter | {"model.lora.publish": "adapter"}
    for more in (adapter, beside, critic, critic | adapter):
        yield _small("qwen3", "bf16", "none", 1, more, "rl")


def _cases_with_less() -> Iterator[Case]:
    """Yield offloaded state and moments in bf16. Offloaded memory is not from torch's allocator, so figures are those of a device."""
    for checkpointing in ("none", "full"):
        yield Case("qwen3", "bf16", checkpointing, 4096, more={"engine.activation_offload": True})
    offload = {"engine.optimizer_offload": True}
    narrow = {"optim.moments": "bf16"}
    for more in (offload, narrow):
        yield _small("qwen3", "fp32", "full", 1, more)
    yield _small("qwen3", "bf16", "none", 1, {"engine.offload_during_rollout": True}, "rl")


def _megatron_cases() -> Iterator[Case]:
    """Yield the Megatron engine: every kind of layout, recomputation, several micro-batches in flight, mixtures of experts."""
    kind = {"engine.kind": "megatron"}
    tensor = kind | {"engine.tensor_parallel": 2}
    pipeline = kind | {"engine.pipeline_parallel": 2}
    for precision, checkpointing in (("fp32", "none"), ("bf16", "selective"), ("bf16", "full")):
        yield _small("qwen3", precision, checkpointing, 1, kind)
    yield _small("qwen3", "bf16", "none", 2, kind)
    yield _small("qwen3", "bf16", "full", 1, kind | {"optim.moments": "bf16"})
    yield _small("qwen3", "bf16", "none", 2, tensor)
    yield _small("llama", "fp32", "full", 2, tensor | {"engine.megatron_sequence_parallel": False})
    fewer = {"num_hidden_layers": 3, "num_key_value_heads": 2}  # than there are tensor ranks
    more = kind | {"engine.tensor_parallel": 4}
    yield Case("qwen3", "bf16", "none", 1024, 4, model=fewer, more=more)
    yield _small("llama", "bf16", "none", 2, kind | {"engine.sequence_parallel": 2})
    for more in (pipeline, pipeline | {"engine.virtual_stages": 2}):
        yield Case("qwen3", "bf16", "none", 1024, 2, 4, more=more)
    yield _small("qwen2", "fp32", "full", 2, pipeline)
    yield _small("qwen3_moe", "bf16", "none", 1, kind)
    yield _small("qwen3", "bf16", "none", 1, kind, "rl")
    yield _small("qwen3", "bf16", "none", 2, tensor, "rl")
    yield _small("qwen3_moe", "bf16", "none", 2, kind | {"engine.expert_parallel": 2}, "rl")
    yield _small("qwen3_moe", "fp32", "none", 2, kind | {"engine.expert_parallel": 2})
    # Tokens enough that activations are as large as the state.
    for family in ("deepseek_v3", "glm4_moe", "gpt_oss", "gemma2", "qwen3_next"):
        depth = 4 if family == "qwen3_next" else 3
        model = {"num_hidden_layers": depth, "pad_token_id": 0}
        yield Case(family, "bf16", "none", 4096, model=model, more=kind)
    state = {"num_hidden_layers": 4, "pad_token_id": 0}
    yield Case("qwen3_next", "bf16", "selective", 2048, model=state, more=kind)
    adapter = kind | {"model.lora.rank": 16}
    yield _small("qwen3", "bf16", "none", 1, adapter)
    yield _small("qwen3", "bf16", "none", 1, adapter | {"model.lora.targets": ["q_proj"]})
    yield _small("qwen3", "bf16", "none", 2, adapter | {"engine.tensor_parallel": 2})
    experts = {"model.lora.targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
    yield _small("qwen3_moe", "bf16", "none", 1, adapter | experts)


def _small(
    family: str,
    precision: str,
    checkpointing: str,
    processes: int,
    more: dict[str, Any],
    command: Literal["sft", "rl"] = "sft",
) -> Case:
    model = {"num_hidden_layers": 3}
    return Case(
        family,
        precision,
        checkpointing,
        1024,
        processes=processes,
        model=model,
        command=command,
        more=more,
    )


CASES = {case.name: case for case in _cases()}
