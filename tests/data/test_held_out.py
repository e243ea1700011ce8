from __future__ import annotations

import json
import math
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.data.held_out import split_off
from burnish.data.sources import Rows, load_rows
from burnish.errors import UsageError

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=4), min_size=2, max_size=40)
SHARES = st.sampled_from(["0.1%", "1%", "5%", "12.5%", "50%", "90%"])


def read(texts: list[str], path: Path) -> Rows:
    """Write texts as a column of a file, and read it."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"text": texts}), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return load_rows([str(path)])


def texts_of(rows: Rows) -> list[str]:
    return [row["text"] for row in rows.span(0, len(rows))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@draws(20)
@given(texts=TEXTS, share=SHARES, order=st.randoms())
def test_a_row_is_on_one_side_wherever_it_stands(folder, kind, texts, share, order) -> None:
    path = folder / f"rows.{kind}"
    rows = read(texts, path)
    distinct = len(set(texts))
    count = math.ceil(float(share[:-1]) / 100 * len(texts))
    try:
        trained, held_out = split_off(rows, share)
    except UsageError:
        assert count > len(texts) - max(map(texts.count, texts))
        return
    for part in (trained, held_out):
        assert texts_of(part) == [texts[part.number(index)] for index in range(len(part))]
        assert str(part.number(len(part) - 1)) in part.where(len(part) - 1)
        assert part.end == part.number(len(part) - 1) + 1
    numbers = [part.number(index) for part in (trained, held_out) for index in range(len(part))]
    assert sorted(numbers) == list(range(len(texts)))
    assert not set(texts_of(trained)) & set(texts_of(held_out))
    assert len(held_out) == count or (len(held_out) > count and distinct < len(texts))
    shuffled = order.sample(texts, len(texts))
    again, held_again = split_off(read(shuffled, path), share)
    assert sorted(texts_of(held_again)) == sorted(texts_of(held_out))
    assert sorted(texts_of(again)) == sorted(texts_of(trained))


def test_most_held_out_rows_stay_when_rows_are_added(folder) -> None:
    texts = [f"row {number}" for number in range(1000)]
    _, before = split_off(read(texts, folder / "grown.jsonl"), "10%")
    _, after = split_off(read([*texts, "one more"], folder / "grown.jsonl"), "10%")
    assert len(before) == 100
    assert len(after) == 101
    assert len(set(texts_of(before)) & set(texts_of(after))) >= 100


def test_it_is_about_as_even_as_draws_are(folder) -> None:
    """Each half of the rows has about half of those that are held out."""
    _, held_out = split_off(read([str(n) for n in range(2000)], folder / "even.jsonl"), "10%")
    early = sum(held_out.number(index) < 1000 for index in range(200))
    assert len(held_out) == 200
    assert 70 < early < 130


def test_rows_in_memory_of_datasets(tmp_path: Path) -> None:
    texts = [str(number) for number in range(20)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    trained, held_out = split_off(load_rows([str(tmp_path / "saved")]), "10%")
    assert sorted([*texts_of(trained), *texts_of(held_out)]) == sorted(texts)
    assert len(held_out) == 2
