"""The demo's world, made from nothing: a tokenizer of characters, sums to learn, and the sums held out."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+="
HELD_OUT = 128
RARELY = 30
"""Training examples of each answer at least; 0+0+0 alone makes 0, and what nobody ever answers cannot be reinforced."""


def write_tokenizer(directory: Path) -> None:
    """One token per character, and a pad, an end and an unknown token."""
    names = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def write_data(directory: Path, seed: int = 0) -> None:
    """Every sum of three digits, shuffled: the last `HELD_OUT` are never trained on, and the others of rare answers several times."""
    sums = list(itertools.product(range(10), repeat=3))
    random.Random(seed).shuffle(sums)
    rows = []
    for a, b, c in sums:
        answer = str(a + b + c)
        rows.append({"prompt": f"{a}+{b}+{c}=", "completion": answer, "answer": answer})
    train, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    for answer in sorted({row["answer"] for row in train}, key=int):
        same = [row for row in train if row["answer"] == answer]
        train += (same * RARELY)[: max(0, RARELY - len(same))]
    for name, part in (("train", train), ("validation", held_out)):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (directory / f"{name}.jsonl").write_text(lines)
