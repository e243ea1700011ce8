"""The reference of preferences: its log-probs are computed once, before training, and kept by content.

So no second model lies in memory while training, and the next run of the same model and rows computes none. Weights, rows with their
tokens, and the precision determine a file. The layout does not, so its rounding is that of the run that came first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from burnish.config.frozen_models import FrozenModel
from burnish.config.schema import ModelConfig
from burnish.data.batching import make_batch
from burnish.data.tasks import ItemSequence
from burnish.distributed.collectives import agree, any_rank, from_main, total
from burnish.engines.base import Engine
from burnish.engines.factory import settings_beside
from burnish.files.cache import read_kept
from burnish.files.kept import write_kept
from burnish.files.safetensors import weight_files
from burnish.models.meta_init import count_flops
from burnish.records import Example
from burnish.runs.frozen_engines import read_frozen
from burnish.runs.session import Session
from burnish.runs.setup import Foundation, load_frozen, prove_start

ROWS_OF_A_FILE = 1024
"""Rows whose log-probs are computed and kept together. An interrupted run has those that are done."""
MOST_BYTES = 16 << 30
"""Most bytes of all files together."""
_FOLDER = "references"
_PIECE = 16 << 20
_log = logging.getLogger(__name__)

Item = tuple[Example, ...]


class ReferencedItems(ItemSequence[Item]):
    """Items of another data set, with `ref_logprobs` in their examples."""

    def __init__(
        self,
        items: ItemSequence[Item],
        places: dict[int, int] | None,
        parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]],
    ) -> None:
        """`parts` have the trained tokens of each item and, end to end, their log-probs. `places` are those of items in them: None for all, in order."""
        self._items = items
        self._places = places
        self._parts = parts
        self._ends = [np.concatenate([[0], np.cumsum(counts)]) for counts, _ in parts]
        self.digest = items.digest

    def __len__(self) -> int:
        return len(self._items)

    def items(self, indices: Sequence[int]) -> list[Item]:
        """See `ItemSequence.items`."""
        read = self._items.items(indices)
        return [
            self._referenced(index if self._places is None else self._places[index], item)
            for index, item in zip(indices, read, strict=True)
        ]

    def _referenced(self, place: int, item: Item) -> Item:
        number, row = divmod(place, ROWS_OF_A_FILE)
        start, end = self._ends[number][row : row + 2]
        rest = self._parts[number][1][start:end]
        examples = []
        for example in item:
            logprobs = np.zeros(len(example.token_ids), np.float32)
            count = int(example.loss_mask.sum())
            logprobs[example.loss_mask] = rest[:count]
            rest = rest[count:]
            examples.append(replace(example, ref_logprobs=logprobs))
        return tuple(examples)


def referenced(
    items: ItemSequence[Item],
    rows: Sequence[int] | None,
    foundation: Foundation,
    session: Session,
    reference: FrozenModel | None,
    kind: str,
) -> ReferencedItems:
    """Return items with the log-probs of `reference`, or of the model that training starts from. Collective.

    `rows` are the items that will be read; None: all. `kind` tells items of the same rows apart.
    """
    layout = foundation.layout
    if rows is not None and [*rows] == [*range(len(items))]:
        rows = None
    given = foundation if reference is None else _foundation_of(reference, foundation)
    session.intact.require(*foundation.places(fresh=reference is None))
    with agree(layout):
        key = _key(given, f"{items.digest} {kind}") if layout.is_main else ""
    key = from_main(key, layout)
    chosen = range(len(items)) if rows is None else rows
    if rows is not None:
        key += xxhash.xxh3_128_hexdigest(np.array(rows, np.int64).tobytes())
    starts = range(0, len(chosen), ROWS_OF_A_FILE)
    keys = [xxhash.xxh3_128_hexdigest(f"{key} {start}".encode()) for start in starts]
    parts = [_read(each) for each in keys]
    missing = [number for number, part in enumerate(parts) if any_rank(part is None, layout)]
    if missing:
        engine = load_frozen(given)
        if reference is not None:
            prove_start(engine, given)
        with session.progress.phase("reference", len(missing)) as bar:
            for number in missing:
                session.stopper.check_all()
                here = chosen[starts[number] : starts[number] + ROWS_OF_A_FILE]
                part = reference_logprobs(engine, items.items(here), given)
                if layout.local_rank == 0:
                    body = len(here).to_bytes(8, "little") + b"".join(
                        each.tobytes() for each in part
                    )
                    write_kept(_FOLDER, keys[number], body, MOST_BYTES, "the reference's log-probs")
                parts[number] = part
                bar.advance()
        engine.close()
    if layout.is_main:
        _log.info(
            "the reference's log-probs of %d rows: %d of %d files were there from earlier starts",
            len(chosen),
            len(starts) - len(missing),
            len(starts),
        )
    places = None if rows is None else {row: place for place, row in enumerate(rows)}
    return ReferencedItems(items, places, [part for part in parts if part is not None])


def reference_logprobs(
    engine: Engine, items: Sequence[Item], foundation: Foundation
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the trained tokens of each item, and their log-probs. Collective."""
    examples = [*chain.from_iterable(items)]
    budget = foundation.config.microbatch_tokens
    batch = make_batch(examples, engine.layout, budget, foundation.costs)
    adapter = foundation.config.model.adapter
    is_fresh = adapter is not None and adapter.path is None  # and changes nothing yet
    outputs = engine.forward(batch, adapter=not is_fresh)
    own = batch.by_trained_tokens([output.logprobs.cpu().numpy() for output in outputs])
    lengths = [int(example.loss_mask.sum()) for example in examples]
    ends = np.cumsum([0, *lengths])
    values = np.full(ends[-1], np.inf, np.float32)
    for number, logprobs in own.items():
        values[ends[number] : ends[number + 1]] = logprobs
    for start in range(0, len(values), _PIECE):
        total(torch.from_numpy(values[start : start + _PIECE]), engine.layout, dist.ReduceOp.MIN)
    counts = [sum(int(example.loss_mask.sum()) for example in item) for item in items]
    return np.array(counts, np.int64), values


def _read(key: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
    body = read_kept(_FOLDER, key)
    if body is None:
        return None
    count = int.from_bytes(body[:8], "little")
    counts = np.frombuffer(body[8 : 8 + 8 * count], np.int64)
    return counts, np.frombuffer(body[8 + 8 * count :], np.float32)


def _key(foundation: Foundation, data: str) -> str:
    """Return a digest of all that the log-probs depend on."""
    model = foundation.config.model
    places = [place for place in (model.path, model.lora.path) if place is not None]
    weights = [_content(Path(place).expanduser()) for place in places]
    fresh = (
        "" if model.path else f"{foundation.config.seed} {foundation.hf_config.to_json_string()}"
    )
    engine = foundation.config.engine
    how = (
        *(engine.kind, engine.precision, engine.compile),
        *(model.lora.quantize_base, torch.__version__),
    )
    return xxhash.xxh3_128_hexdigest(repr((weights, fresh, how, data)).encode())


def _content(directory: Path) -> str:
    """Return a digest of a model's or an adapter's files."""
    digest = xxhash.xxh3_128()
    for path in [*sorted(directory.glob("*config.json")), *weight_files(directory)]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _foundation_of(reference: FrozenModel, foundation: Foundation) -> Foundation:
    """Return the foundation of a reference of its own. Collective."""
    hf_config, _, source = read_frozen(reference, foundation)
    model = ModelConfig(path=reference.path)
    config = foundation.config
    engine = settings_beside(hf_config, config.engine)
    return replace(
        foundation,
        config=config.model_copy(update={"model": model, "engine": engine}),
        hf_config=hf_config,
        source=source,
        base=source,
        adapter=None,
        composite=None,
        flops=count_flops(hf_config),
    )
