"""For tests of LoRA: adapters whose every number matters, for the engine and for PEFT on plain transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from burnish.boxes.shards import Publication, Shard
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.models.lora.adapter import Adapter
from burnish.models.names import model_shards
from burnish.records.seeds import derive_seed

LORA = LoraConfig(rank=4, alpha=6.0)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
"""What of a mixture's experts can be adapted."""


def adapter_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random values, B not zero, so that A has a gradient."""
    generator = torch.Generator().manual_seed(derive_seed(0, "adapter", name))
    return torch.randn(shape, generator=generator) * 0.1


class RandomAdapter:
    """A `ShardSource` of `adapter_tensor`."""

    def fill(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            drawn = adapter_tensor(shard.spec.name, shard.spec.shape)
            shard.tensor.copy_(drawn[shard.box.slices])


def published_beside(
    model: PreTrainedModel, lora: LoraConfig, factor: float = 1.0, *, merged: bool = False
) -> Publication:
    """A model's weights, and beside them, or `merged`, a random adapter times `factor`; the model gets it."""
    adapter = Adapter(model, lora)
    base, weights = (list(model_shards(model, parts=p)) for p in (adapter.base, adapter.weights))
    RandomAdapter().fill(weights)
    for shard in weights:
        shard.tensor.mul_(factor)
    return Publication(adapter.merged(Layout())) if merged else Publication(weights, base)


def plain_adapted(path: Path, lora: LoraConfig = LORA, plain: Sequence[str] = ()) -> Any:
    """PEFT's own model on plain transformers, in fp32, with the same values.

    With a base in 4 bits, transformers has quantized all linear layers but `plain` ones.
    """
    options: dict[str, Any] = {}
    if lora.quantize_base == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=[*plain],
        )
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    if options:  # some processors would multiply weights in 4 bits in bf16
        base = base.dequantize()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale_alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        lora_dropout=lora.dropout,
        target_modules=[t for t in lora.targets if t not in EXPERTS]
        if lora.targets
        else "all-linear",
        target_parameters=[f"mlp.{t}" for t in lora.targets if t in EXPERTS] or None,
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=bool(lora.modules_to_save) and base.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        # Of tied tables the second name's values stay, as in the engine.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                parameter.copy_(adapter_tensor(saved_name(name), tuple(parameter.shape)))
    return model


def saved_name(name: str) -> str:
    """How PEFT's files call a parameter of its model."""
    saved = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return saved.removesuffix(".weight") if ".lora_magnitude_vector." in saved else saved
