"""Keep the lengths of tokenized rows, so that the next start does not tokenize again.

Rows, tokenizer, settings and code determine them.
"""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase

from burnish.files.cache import read_kept

Lengths = tuple[npt.NDArray[np.int64], str, list[str]]
"""Number of tokens of each row (0: nothing to train on); a digest of the rows that are kept; warnings."""

MOST_BYTES = 1 << 30
"""Most bytes of all files together."""
_FOLDER = "lengths"
_PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


def key_of(tokenizer: PreTrainedTokenizerBase, others: object) -> str | None:
    """Return the file name for a tokenizer and `others`, whose repr counts.

    None for a tokenizer in Python, whose rules cannot be read.
    """
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return None
    template = str(tokenizer.chat_template)
    # A template that writes the date may have other lengths tomorrow.
    today = date.today() if "strftime_now" in template else None
    rules = [tokenizer.backend_tokenizer.to_str(), template, type(tokenizer).__name__]
    settings = [tokenizer.special_tokens_map, sorted(tokenizer.init_kwargs.items(), key=str)]
    determinants = (rules, settings, _code(), today, others)
    return xxhash.xxh3_128_hexdigest(repr(determinants).encode())


@cache
def _code() -> list[bytes | str]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.read_bytes() for file in files] + [version(name) for name in _PACKAGES]


def read_lengths(key: str) -> Lengths | None:
    """Return the lengths in a file, or None if it is missing or damaged."""
    body = read_kept(_FOLDER, key)
    if body is None:
        return None
    line, _, tokens = bytes(body).partition(b"\n")
    digest, warnings = json.loads(line)
    return np.frombuffer(tokens, np.int64), digest, warnings


def write_lengths(key: str, lengths: Lengths) -> None:
    """Write lengths. If that fails, only warn."""
    from burnish.files.kept import write_kept

    tokens, *others = lengths
    body = json.dumps(others).encode() + b"\n" + tokens.tobytes()
    write_kept(_FOLDER, key, body, MOST_BYTES, "the lengths of rows")
