"""Tiny models that also read images, and images for them as tensors, because torchvision is not needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from support.models.tokenizers import char_tokenizer, save_char_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": len(char_tokenizer()) + 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": char_tokenizer().eos_token_id,
    "pad_token_id": char_tokenizer().pad_token_id,
}
IMAGE = TEXT["vocab_size"] - 1
"""The placeholder of an image's features."""

_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
_TOWER = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@dataclass(frozen=True)
class TinyComposite:
    """A kind of model that also reads images."""

    text: dict[str, Any]
    """Values of its language model's configuration that differ from `TEXT`."""
    vision: dict[str, Any]
    prefix: str
    """What precedes the names of its language model's layers in its files."""
    features: int
    """Placeholders of an image."""
    pixels: dict[str, Any]
    """Sizes of an image's tensors, and their other inputs."""
    more: dict[str, Any]
    """Further values of its configuration."""

    def config(self, kind: str, **changes: Any) -> Any:
        text = {**TEXT, **self.text}
        more = {"image_token_id": IMAGE, **self.more, **changes}
        return AutoConfig.for_model(kind, text_config=text, vision_config=self.vision, **more)


def _tiny(model_type: str, prefix: str, features: int, vision: Any, **more: Any) -> TinyComposite:
    text = {"model_type": model_type, **more.pop("text", {})}
    return TinyComposite(text, vision, prefix, features, more.pop("pixels"), more)


KINDS = {
    "qwen3_5": _tiny(
        "qwen3_5_text",
        "model.language_model.",
        4,
        _QWEN_TOWER,
        text={**_LINEAR, "tie_word_embeddings": False},
        pixels={"pixel_values": (16, 96), "image_grid_thw": [[1, 4, 4]]},
        tie_word_embeddings=False,
        vision_start_token_id=IMAGE - 1,
        vision_end_token_id=IMAGE - 2,
        video_token_id=IMAGE - 3,
    ),
    "gemma4": _tiny(
        "gemma4_text",
        "model.language_model.",
        4,
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 4,
        },
        text={
            **_SLIDING,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "num_kv_shared_layers": 0,
        },
        pixels={
            "pixel_values": (1, 16, 48),
            "image_position_ids": [[[x, y] for y in range(4) for x in range(4)]],
        },
        audio_config=None,
        tie_word_embeddings=True,
    ),
    "mistral3": _tiny(
        "mistral",
        "language_model.model.",
        4,
        {"model_type": "pixtral", **_TOWER, "head_dim": 16},
        pixels={"pixel_values": (1, 3, 16, 16), "image_sizes": [[16, 16]]},
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    ),
    "gemma3": _tiny(
        "gemma3_text",
        "language_model.model.",
        4,
        {"model_type": "siglip_vision_model", **_TOWER},
        text=_SLIDING,
        pixels={"pixel_values": (1, 3, 16, 16)},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    ),
    "llava": _tiny(
        "llama",
        "language_model.model.",
        16,
        {"model_type": "clip_vision_model", **_TOWER},
        pixels={"pixel_values": (1, 3, 16, 16)},
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    ),
}


def save_composite(
    directory: Path, kind: str, shard: str = "5GB", **changes: Any
) -> PreTrainedModel:
    """Save a tiny model with a tokenizer and a processor's files; return it."""
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(KINDS[kind].config(kind, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(directory, max_shard_size=shard)
    save_char_tokenizer(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16}}))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    return model


def image_inputs(kind: str) -> dict[str, Tensor]:
    """Return the inputs of a text with an image."""
    tiny, generator = KINDS[kind], torch.Generator().manual_seed(3)
    found = {
        name: torch.randn(value, generator=generator)
        if isinstance(value, tuple)
        else torch.tensor(value)
        for name, value in tiny.pixels.items()
    }
    ids = [5, 6, *([IMAGE - 1] if kind == "qwen3_5" else []), *[IMAGE] * tiny.features, 7, 8]
    found["input_ids"] = torch.tensor([ids])
    if kind in ("gemma3", "gemma4", "qwen3_5"):
        name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
        found[name] = (found["input_ids"] == IMAGE).long()
    return found


@torch.no_grad()
def answers(directory: Path, kind: str) -> tuple[Tensor, Tensor]:
    """Return transformers' logits for a text with an image, and for a text alone."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    seen = model(**image_inputs(kind)).logits
    return seen, model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits
