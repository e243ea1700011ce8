"""The kinds of file that data come in, and the usual names of their columns. Light, so that a configuration can be checked without `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

READERS: Mapping[str, str] = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The reader of `datasets` for every suffix; in a directory, files with other suffixes are passed over."""

PROMPT_COLUMNS = ("prompt", "question", "problem")
"""Where the prompt is looked for (verl and TRL; GSM8K; MATH)."""
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "solution")
"""Where the ground truth is looked for; a dot goes into a nested column."""
TOOLS_COLUMN = "tools"
"""What the assistant of a row's conversation may call (TRL)."""


def is_data(name: str) -> bool:
    """Whether a file of this name is one of data."""
    return PurePosixPath(name).suffix in READERS
