"""The benchmarks' data and models: a language of numbered words, prompts in it, a reward, model sizes. Both sides import it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
EOS = 1
SIZES: dict[str, dict[str, int]] = {
    "5m": {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4},
    "30m": {"hidden_size": 640, "intermediate_size": 1664, "num_attention_heads": 10},
    "88m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
    },
    "109m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "vocab_size": 43520,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
}
"""Shapes. Defaults: 6 layers, heads of width 64, two heads per key head, 4096 words. Embeddings are always tied."""


def model_config(size: str) -> dict[str, Any]:
    """Return the content of a Qwen3 config.json of about `size` parameters."""
    shape = SIZES[size]
    return {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 6,
        "num_key_value_heads": shape["num_attention_heads"] // 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        **shape,
    }


def write_tokenizer(directory: Path, vocabulary: int = VOCABULARY) -> None:
    """Write a tokenizer with one token per word: <pad>, <eos>, w2 and so on."""
    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, vocabulary))]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)


def sentence(rng: random.Random, words: int) -> str:
    """Return random words."""
    return " ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(words))


def write_prompts(path: Path, count: int, words: int) -> None:
    """Write JSON Lines of prompts of `words` words each, without answers."""
    rng = random.Random(0)
    rows = (json.dumps({"prompt": sentence(rng, words), "answer": ""}) for _ in range(count))
    path.write_text("".join(row + "\n" for row in rows))


def even_share(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Return the share of even words in each completion: a reward that costs little and varies."""
    shares = []
    for completion in completions:
        words = completion.split()
        even = sum(int(word[1:]) % 2 == 0 for word in words)
        shares.append(even / max(1, len(words)))
    return shares
