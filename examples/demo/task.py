"""Make the demo's tokenizer of characters, and its data: four different digits to sort, with some choices held out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789="
DIGITS = 4
HELD_OUT = 30
"""Number of the 210 choices of digits that are never trained on, in any of their 24 orders."""


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per character, and a pad, an end and an unknown token."""
    names = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def write_data(directory: Path, seed: int = 0) -> None:
    """Write every order of each choice of digits, shuffled: `HELD_OUT` choices to validation, the others to train."""
    rng = random.Random(seed)
    choices = ["".join(choice) for choice in itertools.combinations(CHARACTERS[:10], DIGITS)]
    held_out = set(rng.sample(choices, HELD_OUT))
    orders = ["".join(order) for order in itertools.permutations(CHARACTERS[:10], DIGITS)]
    rng.shuffle(orders)
    train = [digits for digits in orders if "".join(sorted(digits)) not in held_out]
    others = [digits for digits in orders if "".join(sorted(digits)) in held_out]
    _write(directory / "train.jsonl", train)
    _write(directory / "validation.jsonl", others)


def _write(path: Path, orders: Sequence[str]) -> None:
    answers = {digits: "".join(sorted(digits)) for digits in orders}
    rows = (
        {"prompt": f"{digits}=", "completion": answer, "answer": answer}
        for digits, answer in answers.items()
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
