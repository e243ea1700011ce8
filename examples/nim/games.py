"""Write games of Nim: those of beginners to learn the rules from, first positions to train on, held-out ones, and a tokenizer of words.

python examples/nim/games.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nim import asked, legal_moves
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

GAMES = 4000
LEAST, MOST = 5, 12
HELD_OUT = (7, 10)
"""Numbers of sticks that no game begins with in training."""
MARKS = ["<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = ["user", "assistant", "sticks", " ", "\n", *map(str, range(MOST + 1))]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(directory: Path, count: int = GAMES, seed: int = 0) -> None:
    """Write `games.jsonl`, `train.jsonl`, `validation.jsonl` and `tokenizer/`, with `count` games."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    starts = [sticks for sticks in range(LEAST, MOST + 1) if sticks not in HELD_OUT]
    games = ({"messages": game(rng.choice(starts), rng)} for _ in range(count))
    _write(directory / "games.jsonl", games)
    _write(directory / "train.jsonl", (position(sticks, "itself") for sticks in starts))
    _write(directory / "validation.jsonl", (position(sticks, "random") for sticks in HELD_OUT))
    write_tokenizer(directory / "tokenizer")


def position(sticks: int, opponent: str) -> dict[str, Any]:
    """Return a row for reinforcement learning. The model plays with `opponent`: itself or random."""
    asking = {"role": "user", "content": asked(sticks)}
    return {"prompt": [asking], "sticks": sticks, "opponent": opponent}


def game(sticks: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a game of two beginners, who see the best move in every third turn; all moves are the model's."""
    messages = []
    while sticks:
        best = str(sticks % 4)
        move = best if best != "0" and rng.random() < 1 / 3 else rng.choice(legal_moves(sticks))
        messages.append({"role": "user", "content": asked(sticks)})
        messages.append({"role": "assistant", "content": move})
        sticks -= int(move)
    return messages


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token for each word and each number."""
    vocabulary = {word: number for number, word in enumerate([*MARKS, *WORDS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[a-z]+|\d+|[ \n]"), behavior="isolated")
    backend.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<unk>",
        additional_special_tokens=MARKS,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/nim"))
