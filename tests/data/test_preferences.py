"""What a row of preferences becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.tokenizers import char_tokenizer
from support.runs.training_files import write_rows

from burnish.config.preferences import PairSettings, PreferenceSettings
from burnish.config.schema import DataConfig
from burnish.data.preferences import PreferenceDataset
from burnish.data.sources import load_rows

TOKENIZER = char_tokenizer()
END = "<|im_end|>"
KTO = PreferenceSettings(loss={"kto": 1.0})


def read(folder: Path, rows: list[dict[str, Any]], settings: PairSettings) -> PreferenceDataset:
    write_rows(folder / "rows.jsonl", rows)
    table = load_rows([str(folder / "rows.jsonl")], "data.train")
    return PreferenceDataset(table, TOKENIZER, DataConfig(), settings, 24)


def told(dataset: PreferenceDataset) -> list[list[tuple[str, str, float]]]:
    """Of each item's examples, the text, the trained part and the label."""
    return [
        [
            (
                TOKENIZER.decode(each.token_ids).replace(END, "."),
                TOKENIZER.decode(each.token_ids[each.loss_mask]).replace(END, "."),
                float(each.labels[-1]),
            )
            for each in item
        ]
        for item in dataset.items(range(len(dataset)))
    ]


def test_mismatched_answers_are_of_the_nearest_row_with_another_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a:", "completion": "1", "label": True},
        {"prompt": "b:", "completion": "22", "label": 0},
        {"prompt": "b:", "completion": "333", "label": "True"},
        {"prompt": "c:", "completion": "4", "label": "0"},
    ]
    assert told(read(tmp_path, rows, KTO)) == [
        [("a:1.", "1.", 1.0), ("a:4.", "4.", 0.0)],
        [("b:22.", "22.", -1.0), ("b:1.", "1.", 0.0)],
        [("b:333.", "333.", 1.0), ("b:1.", "1.", 0.0)],
        [("c:4.", "4.", -1.0), ("c:333.", "333.", 0.0)],
    ]


def test_a_pair_is_two_answers_and_mismatched_ones_end_at_the_limit(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p" * 22, "chosen": "1", "rejected": "2"},
        {"prompt": "q:", "chosen": "x" * 9, "rejected": "z"},
    ]
    first, second = told(read(tmp_path, rows, KTO))
    long = "p" * 22
    assert first == [
        (f"{long}1.", "1.", 1.0),
        (f"{long}xx", "xx", 0.0),
        (f"{long}2.", "2.", -1.0),
        (f"{long}z.", "z.", 0.0),
    ]
    assert second == [
        ("q:" + "x" * 9 + ".", "x" * 9 + ".", 1.0),
        ("q:1.", "1.", 0.0),
        ("q:z.", "z.", -1.0),
        ("q:2.", "2.", 0.0),
    ]
