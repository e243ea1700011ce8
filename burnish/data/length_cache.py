"""Keep the lengths of tokenized rows, so that the next start does not tokenize again.

A file's name is a digest of everything that determines the lengths: rows, tokenizer, settings and code. It appears by one rename
and holds its own digest, so processes and runs may share it.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase

from burnish.files.cache import cache_root
from burnish.files.durable import write_durably
from burnish.files.storage import LOCAL

Lengths = tuple[npt.NDArray[np.int64], str, list[str]]
"""Number of tokens of each row (0: nothing to train on); a digest of the rows that are kept; warnings."""

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Most bytes of all files together."""
_FOLDER = "lengths"
_HEAD = 32
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
    file = cache_root() / _FOLDER / key
    try:
        content = file.read_bytes()
        os.utime(file)
    except OSError:
        return None
    body = content[_HEAD:]
    if xxhash.xxh3_128_hexdigest(body).encode() != content[:_HEAD]:
        return None
    line, _, tokens = body.partition(b"\n")
    digest, warnings = json.loads(line)
    return np.frombuffer(tokens, np.int64), digest, warnings


def write_lengths(key: str, lengths: Lengths) -> None:
    """Write lengths. If that fails, only warn."""
    tokens, *others = lengths
    body = json.dumps(others).encode() + b"\n" + tokens.tobytes()
    directory = cache_root() / _FOLDER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        content = xxhash.xxh3_128_hexdigest(body).encode() + body
        write_durably(LOCAL, directory / key, content)
        _remove_old(directory)
    except OSError as error:
        logger.warning("the lengths of rows are not kept for the next start: %s", error)


def _remove_old(directory: Path) -> None:
    """Remove the least recently used files over `MOST_BYTES`. Other processes may do so at the same time."""
    files = []
    for file in directory.iterdir():
        with suppress(FileNotFoundError):
            files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
