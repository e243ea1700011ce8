"""Write a step's prompts, completions and rewards, compressed, and remove the oldest files above a size.

`step-N.jsonl.gz` has the best, the worst and some random rollouts of a step, `step-N.rest.jsonl.gz` all others, which are removed
first. The same rollouts give the same bytes, in any order and on any rank.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from burnish.errors import CorruptError
from burnish.files.storage import open_regular
from burnish.tracking.rundir import write_atomically
from burnish.tracking.trackers import json_line, json_number, json_numbers

if TYPE_CHECKING:  # the record's module loads torch, which readers of rollouts do not need
    from burnish.records.rollout_table import RolloutTable
    from burnish.records.samples import Floats, Mask, Prompt, Rollout

Kind = Literal["step", "validation"]
Row = dict[str, Any]

MARGIN = "margin"
"""Among the parts of a reward: by how much a pair's chosen answer has the higher one, or how far a single one is on its label's side."""
LABEL = "label"
"""Among the parts of a reward: 1 for a desirable single answer, -1 for another one."""
_BLOCK_BYTES = 1 << 18
"""About the size of a block, which is compressed as a whole. A reader of one row reads one block."""
EXTREMES = 4
RANDOMS = 8
"""How many rollouts of a step are kept longest: of the best, of the worst, and random ones."""
_REQUIRED = {"step", "prompt_index", "prompt", "completion", "reward"}  # of all rows
_NAME = re.compile(r"(step|validation)-(\d+)(\.rest)?\.jsonl\.gz")
_BYTES_OF_A_CHARACTER = 4
_SPARE = 20  # removal frees a 20th of the limit more, so that few steps have to list all files
_REMEDY = "move the file away; the run and other steps do without it"
_COLUMN_CHARACTERS = 2000  # most of a column's value
_JSON = json.JSONEncoder(skipkeys=True, ensure_ascii=False, default=lambda x: type(x).__name__)
_LEVEL = 4  # of compression; 6 takes twice the time for files that are 4 % smaller


def rollouts_path(directory: Path, step: int, kind: Kind = "step", *, rest: bool = False) -> Path:
    """Return the path of a step's chosen rollouts or, with `rest`, of its others."""
    return directory / f"{kind}-{step:08d}{'.rest' if rest else ''}.jsonl.gz"


def write_rollouts(
    directory: Path,
    step: int,
    table: RolloutTable,
    advantages: Sequence[float] | None,
    token_texts: Callable[[list[int]], list[str]] | None = None,
    by_token: Mapping[str, Mapping[int, Floats]] | None = None,
    arriving: Iterable[tuple[int, Rollout]] | None = None,
) -> dict[int, Row]:
    """Write a step's rollouts, one JSON object a line, and return the chosen rows by their rollouts' indices.

    `advantages` has each rollout's mean over tokens; None for a validation. Chosen rows have the other columns of their prompt's row
    and, with `token_texts`, the texts of their tokens and the numbers of `by_token`. `arriving` yields whole rollouts by index, in the table's `order`, if `table` lacks them.
    """
    kind: Kind = "validation" if advantages is None else "step"
    known = [None] * len(table.owners) if advantages is None else advantages
    means = [advantage for _, advantage in zip(table.owners, known, strict=True)]
    order = table.order
    longest = chosen(step, table)
    chosen_rows = dict[int, Row]()

    def others() -> Iterator[bytes]:
        for i, rollout in arriving or ((i, table.rollout(i)) for i in order):
            row = _row(step, rollout, means[i])
            if i in longest:
                if columns := _other_columns(rollout.prompt):
                    row["columns"] = columns
                if token_texts is not None:
                    completion = rollout.completion
                    numbers = by_token or {}  # lacks untrained completions
                    mask = completion.response_mask
                    values = {
                        name: _on_all_tokens(column[i], mask)
                        for name, column in numbers.items()
                        if i in column
                    }
                    texts = token_texts(completion.token_ids.tolist())
                    row["tokens"] = {"texts": texts, "logprobs": _rounded(completion.logprobs)}
                    row["tokens"] |= {name: _rounded(value) for name, value in values.items()}
                    if mask is not None:
                        row["tokens"]["by_model"] = mask.tolist()
                chosen_rows[i] = row
            else:
                yield _encoded(row)

    rest = b"".join(compressed(others()))
    lines = [_encoded(row) for row in chosen_rows.values()]
    write_atomically(rollouts_path(directory, step, kind), b"".join(compressed(lines)))
    path = rollouts_path(directory, step, kind, rest=True)
    if rest:
        write_atomically(path, rest)
    else:
        path.unlink(missing_ok=True)
    return dict(sorted(chosen_rows.items()))


def _on_all_tokens(values: Floats, mask: Mask | None) -> Floats:
    """Return numbers of the tokens that the model drew, with 0 for those that an environment wrote."""
    if mask is None:
        return values
    import numpy as np  # readers of rollouts do not need it

    spread = np.zeros(len(mask), np.float32)
    spread[mask] = values
    return spread


def _rounded(values: Floats) -> list[float | str]:
    return [json_number(round(value, 4)) for value in values.tolist()]


def _encoded(row: Row) -> bytes:
    return json_line(row).encode("utf-8", "backslashreplace")


def chosen(step: int, table: RolloutTable) -> set[int]:
    """Return the indices of the rollouts that are kept longest, with all branches of their conversations. NaN is the least reward."""
    firsts = table.firsts
    order = [number for number in table.order if firsts[number] == number]
    ordered = table.rewards[order]
    ordered[ordered != ordered] = -math.inf
    ranked = ordered.argsort(kind="stable")
    others = range(EXTREMES, len(order) - EXTREMES)
    drawn = random.Random(step).sample(others, min(RANDOMS, len(others)))
    return {
        branch
        for places in (slice(EXTREMES), slice(-EXTREMES, None), drawn)
        for place in ranked[places].tolist()
        for branch in table.branches(order[place])
    }


def rank(row: Row) -> float:
    """Return a reward that can be compared: NaN is the least."""
    reward = float(row["reward"])
    return -math.inf if math.isnan(reward) else reward


def _row(step: int, rollout: Rollout, advantage: float | None) -> Row:
    return {
        "step": step,
        "prompt_index": rollout.prompt.index,
        "sample": rollout.sample,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "answer": None if rollout.prompt.answer is None else str(rollout.prompt.answer),
        "reward": json_number(float(rollout.reward)),
        "reward_parts": json_numbers(rollout.reward_parts),
        "reward_error": rollout.reward_error,
        "advantage": None if advantage is None else json_number(float(advantage)),
        "stop_reason": rollout.completion.stop_reason,
        "length": rollout.completion.count_drawn,
        "weights_version": rollout.completion.weights_version,
        "source": rollout.prompt.source,
        **(_of_conversation(rollout) if rollout.end else {}),
        **({"branch": rollout.branch} if rollout.branch else {}),
        **({"later_versions": later} if (later := rollout.completion.later_versions) else {}),
    }


def _of_conversation(rollout: Rollout) -> Row:
    numbers = json_numbers(rollout.metrics)
    return {"end": rollout.end, "metrics": numbers, "conversation": rollout.conversation}


def _other_columns(prompt: Prompt) -> dict[str, str]:
    """Return what the prompt's row has besides prompt, answer and source: texts, or JSON, of which much is cut."""
    contents = [str(message.get("content")) for message in prompt.messages or ()]
    shown = {prompt.text, prompt.source, str(prompt.answer), *contents}
    columns = {}
    for name, value in prompt.columns.items():
        parts = value if isinstance(value, list) else [value]
        texts = [part.get("content") if isinstance(part, dict) else part for part in parts]
        if not all(isinstance(text, str) and text in shown for text in texts):
            text = value if isinstance(value, str) else _JSON.encode(value)
            cut = len(text) - _COLUMN_CHARACTERS
            more = f" … {cut:,} more characters" if cut > 0 else ""
            columns[name] = text[:_COLUMN_CHARACTERS] + more
    return columns


def texts_of_tokens(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return each token's text. If several tokens make a character, the first has it."""
    texts: list[str] = []
    part: list[int] = []
    for i, token in enumerate(token_ids, start=1):
        part.append(token)
        text = decode(part)
        if not text.endswith("\ufffd") or len(part) == _BYTES_OF_A_CHARACTER or i == len(token_ids):
            texts += [text] + [""] * (len(part) - 1)
            part = []
    return texts


def compressed(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Compress lines in blocks."""
    block = bytearray()
    for line in lines:
        block += line
        if len(block) >= _BLOCK_BYTES:
            yield gzip.compress(block, _LEVEL, mtime=0)
            block.clear()
    if block:
        yield gzip.compress(block, _LEVEL, mtime=0)


def named_rollouts(directory: Path) -> Iterator[tuple[Kind, int, bool, Path]]:
    """Yield each file's kind, step, whether it has the rest, and path."""
    for path in directory.glob("*.jsonl.gz"):
        if match := _NAME.fullmatch(path.name):
            kind: Kind = "step" if match[1] == "step" else "validation"
            yield kind, int(match[2]), bool(match[3]), path


def rollout_files(directory: Path, kind: Kind = "step") -> list[tuple[int, Path]]:
    """Return steps and paths of this kind's files, ascending; empty without the directory."""
    return sorted((step, path) for of, step, _, path in named_rollouts(directory) if of == kind)


def discard_rollouts_after(directory: Path, step: int) -> None:
    """Remove later steps' files: a run that resumes from `step` makes them again."""
    for _, later, _, path in named_rollouts(directory):
        if later > step:
            path.unlink()


class Thinning:
    """Keep a directory of rollout files below a size, without listing it after each step."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._left = 0

    def wrote(self, step: int, kind: Kind) -> None:
        """Count a step's files; above the limit, remove the oldest and a bit more than needed."""
        paths = [rollouts_path(self._directory, step, kind, rest=rest) for rest in (False, True)]
        self._left -= sum(path.stat().st_size for path in paths if path.exists())
        if self._left < 0:
            self._left = self._keep - thin_rollouts(self._directory, self._keep)


def thin_rollouts(directory: Path, keep: int) -> int:
    """Remove the oldest files, first those with the rest, if all take more than `keep` bytes. Return the bytes that stay."""
    named = named_rollouts(directory)
    files = sorted((not rest, step, path, path.stat().st_size) for _, step, rest, path in named)
    steps = [step for _, step, *_ in files]
    total = sum(size for *_, size in files)
    first = min(steps, default=0)
    newest = max(steps, default=0)
    # Frees a share more than needed, but keeps the newest files and the first step's chosen rollouts.
    most = keep if total <= keep else keep - keep // _SPARE
    for is_chosen, step, path, size in files:
        if total <= most:
            break
        if step != newest and not (is_chosen and step == first):
            path.unlink()
            total -= size
    return total


def blocks(path: Path, start: int = 0) -> Generator[tuple[int, bytes]]:
    """Yield the offset and the text of each compressed block from `start` on. Raises `CorruptError`."""
    with open_regular(path) as file:
        file.seek(start)
        data = file.read(_BLOCK_BYTES)
        while data:
            decoder = zlib.decompressobj(wbits=31)
            parts = []
            read = 0
            while not decoder.eof:
                try:
                    parts.append(decoder.decompress(data))
                except zlib.error as error:
                    problem = f"{path} is damaged at byte {start}"
                    raise CorruptError(problem, have=error, do=_REMEDY) from error
                read += len(data)
                data = decoder.unused_data or file.read(_BLOCK_BYTES)
                if not data and not decoder.eof:
                    problem = f"{path} ends within a block"
                    have = f"{start + read} bytes"
                    raise CorruptError(problem, have=have, do=_REMEDY)
            yield start, b"".join(parts)
            start += read - len(decoder.unused_data)


def read_rollouts(path: Path) -> Iterator[Row]:
    """Yield a file's rows. Raises `CorruptError` for a line that is not a rollout."""
    for start, text in blocks(path):
        for line in text.splitlines(keepends=True):
            yield parse_rollout(line, f"{path}, in the block at byte {start},")


def parse_rollout(line: bytes, place: str) -> Row:
    """Return a line's row. Raises `CorruptError`, which names `place`, unless it is a rollout."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = f"{place} has a line that is not JSON"
        raise CorruptError(problem, have=error, do=_REMEDY) from error
    if not isinstance(row, dict) or not row.keys() >= _REQUIRED:
        raise CorruptError(
            f"{place} has a line that is not a rollout",
            have=line[:80].decode("utf-8", "replace"),
            want=f"an object with {', '.join(sorted(_REQUIRED))}",
            do=_REMEDY,
        )
    return row


def sample_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of samples with equal columns, for trackers that show tables. A conversation is written as text."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("reward_parts", ())))
    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics", ())))
    columns = ("step", "prompt", "completion", "answer", "reward", "advantage", "stop_reason")
    table = [
        {name: row.get(name) for name in columns}
        | {"reward": None if row["reward"] == "NaN" else row["reward"]}  # a column has one type
        | {f"reward/{name}": row.get("reward_parts", {}).get(name) for name in names}
        | {f"environment/{name}": row.get("metrics", {}).get(name) for name in metrics}
        for row in rows
    ]
    if any(row.get("end") for row in rows):
        from burnish.tracking.conversation_text import conversation_text

        for shown, row in zip(table, rows, strict=True):
            shown["end"] = row.get("end")
            if shown["end"]:
                shown["completion"] = conversation_text(row)
    return table
