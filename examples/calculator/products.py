"""Write products of two numbers: dialogs to imitate, questions to learn from, held-out ones, and a tokenizer for a new model.

Every second dialog has a call of the calculator. The others give the product at once, which a small model cannot compute.

python examples/calculator/products.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calculator import multiply
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

DIALOGS = 4000
HELD_OUT = 32
PIECES = r"\d|[^\d\n]+\n?|\n"
"""A digit, or all up to the next digit or the end of the line, is one token."""
MARKS = ["<unk>", "<|im_start|>", "<|im_end|>"]


def write(directory: Path, count: int = DIALOGS, seed: int = 0) -> None:
    """Write `dialogs.jsonl`, `train.jsonl`, `validation.jsonl` and `tokenizer/`, with `count` dialogs. No product is in two of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out, dialogs, train = (
        pairs[:HELD_OUT],
        pairs[HELD_OUT : HELD_OUT + count],
        pairs[HELD_OUT + count :],
    )
    tools = [get_json_schema(multiply)]
    said = [dialog(a, b, calls=number % 2 == 0) for number, (a, b) in enumerate(dialogs)]
    _write(directory / "dialogs.jsonl", ({"messages": each, "tools": tools} for each in said))
    _write(directory / "validation.jsonl", (question(a, b) for a, b in held_out))
    _write(directory / "train.jsonl", (question(a, b) for a, b in train))
    write_tokenizer(directory / "tokenizer", said, tools)


def question(a: int, b: int) -> dict[str, Any]:
    """Return a row for reinforcement learning."""
    asked = {"role": "user", "content": f"What is {a} times {b}?"}
    return {"prompt": [asked], "answer": str(a * b)}


def dialog(a: int, b: int, *, calls: bool) -> list[dict[str, Any]]:
    """Return a question with its answer, with or without a call."""
    row = question(a, b)
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    called = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "multiply", "content": row["answer"]},
    ]
    said = {"role": "assistant", "content": f"It is {row['answer']}."}
    return [*row["prompt"], *(called if calls else []), said]


def write_tokenizer(
    directory: Path, dialogs: Iterable[Any], tools: Iterable[Mapping[str, Any]]
) -> None:
    """Write a tokenizer with one token for each piece of these dialogs."""
    template = Path(__file__).with_name("tools.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    )
    texts = (
        tokenizer.apply_chat_template(each, tools=[*tools], chat_template=template, tokenize=False)
        for each in dialogs
    )
    parts = {
        part for text in texts for part in re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    }
    pieces = {piece for part in parts - {*MARKS} for piece in re.findall(PIECES, part)}
    vocabulary = {piece: number for number, piece in enumerate([*MARKS, *sorted(pieces)])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(PIECES), behavior="isolated")
    backend.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<unk>",
        additional_special_tokens=MARKS,
        chat_template=template,
    ).save_pretrained(directory)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator"))
