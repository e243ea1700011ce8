"""What a row of preferences becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models.tokenizers import char_tokenizer
from support.runs.training_files import write_rows

from burnish.config.preferences import PairSettings, PreferenceSettings
from burnish.config.schema import DataConfig
from burnish.data.preferences import PreferenceDataset
from burnish.data.ranked_rows import RankedRows
from burnish.data.sources import load_rows
from burnish.data.streaming import open_rows
from burnish.errors import MissingError, UsageError

TOKENIZER = char_tokenizer()
END = "<|im_end|>"
KTO = PreferenceSettings(loss={"kto": 1.0})


def read(
    folder: Path, rows: list[dict[str, Any]], settings: PairSettings, most: int = 24
) -> PreferenceDataset:
    write_rows(folder / "rows.jsonl", rows)
    table = load_rows([str(folder / "rows.jsonl")], "data.train")
    return PreferenceDataset(table, TOKENIZER, DataConfig(), settings, most)


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


@pytest.mark.parametrize("column", ["completion", "chosen"])
def test_the_items_of_a_step_are_joined_as_those_in_memory(tmp_path: Path, column: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, column: "1" * number, "rejected": "x" * number, "label": number % 2}
        for number, prompt in enumerate(["a:", "b:", "b:", "b:", "c" * 20], start=1)
    ]
    for row in rows if column == "completion" else ():
        del row["rejected"]
    dataset = read(tmp_path, rows, KTO)
    items = dataset.items(range(len(dataset)))
    again = dataset.joined_within([item[::2] for item in items])
    assert len(items[0]) == (2 if column == "completion" else 4)
    for wanted, found in zip(items, again, strict=True):
        for one, other in zip(wanted, found, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
            assert one.labels.tolist() == other.labels.tolist()


def test_another_prompt_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Compared with a walk backward, also where the rows of a prompt are many, or lie around the end."""
    prompts = "a" * 3 + "b" * 200 + "c" + "a" * 70
    rows = [
        {"prompt": f"{prompt}:", "completion": f"{number}", "label": True}
        for number, prompt in enumerate(prompts)
    ]
    for number, item in enumerate(told(read(tmp_path, rows, KTO))):
        before = (number - back for back in range(len(rows)))
        other = next(place for place in before if prompts[place] != prompts[number])
        assert item[1] == (
            f"{prompts[number]}:{other % len(rows)}.",
            f"{other % len(rows)}.",
            0.0,
        )


def test_rows_of_one_prompt_have_no_reference_point(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a:", "completion": f"{n}", "label": n % 2} for n in range(4)]
    for some in (rows, rows[:1]):
        with pytest.raises(UsageError):
            read(tmp_path, some, KTO)
    write_rows(tmp_path / "rows.jsonl", rows)
    streamed = open_rows(
        [str(tmp_path / "rows.jsonl")], "data.train", 1 << 20, seed=0, shuffle=False
    )
    dataset = PreferenceDataset(streamed, TOKENIZER, DataConfig(streaming=1), KTO, 24)
    caplog.clear()
    for _ in range(2):
        dataset.joined_within(dataset.make(range(4)))
    assert len(caplog.records) == 1


def labels_of(dataset: PreferenceDataset) -> list[float]:
    return [item[0][2] for item in told(dataset)]


def test_margins_are_of_their_column_or_of_scores(tmp_path: Path) -> None:
    pair = {"prompt": "a:", "chosen": "1", "rejected": "2"}
    scored = [{**pair, "score_chosen": 4, "score_rejected": "2.5"}]
    assert labels_of(read(tmp_path, [pair], PairSettings())) == [0.0]
    assert labels_of(read(tmp_path, scored, PairSettings())) == [0.0]
    assert labels_of(read(tmp_path, scored, PairSettings(margin_per_score=2.0))) == [3.0]
    given = [{**pair, "margin": 0.5}, {**pair, "margin": None}]
    dataset = read(tmp_path, given, PairSettings())
    assert labels_of(dataset) == [0.5, 0.0]
    other = read(tmp_path, [{**given[0], "margin": 0.75}, given[1]], PairSettings())
    assert dataset.digest != other.digest
    for margin in ("much", float("inf")):
        with pytest.raises(UsageError):
            read(tmp_path, [{**pair, "margin": margin}], PairSettings())
    with pytest.raises(MissingError):
        read(tmp_path, given, PairSettings(margin_per_score=1.0))


CHOSEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
REJECTED = [CHOSEN[0], {"role": "assistant", "content": "no"}]


def test_both_answers_of_a_pair_have_one_form(tmp_path: Path) -> None:
    """A text beside messages becomes a message, as elsewhere."""
    user, said = CHOSEN
    pair = {"prompt": [user], "chosen": [said], "rejected": [{**said, "content": "no"}]}
    wanted = told(read(tmp_path, [pair], PairSettings(), 99))
    for row in ({**pair, "rejected": "no"}, {**pair, "prompt": "hi", "rejected": "no"}):
        assert told(read(tmp_path, [row], PairSettings(), 99)) == wanted


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": CHOSEN, "rejected": REJECTED[1:]},
        {"prompt": "hi", "chosen": CHOSEN, "rejected": "no"},
        {"chosen": CHOSEN, "rejected": CHOSEN[:1]},
        {"chosen": CHOSEN[:1], "rejected": CHOSEN[:1]},
    ],
)
def test_pairs_of_unequal_parts_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read(tmp_path, [row], PairSettings(), 99)


@pytest.mark.parametrize(
    ("prompt", "is_named"),
    [("hi", False), (CHOSEN[:1], False), ("be kind", True), ([{"content": "be kind"}], True)],
)
def test_words_of_a_prompt_that_whole_conversations_lack_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: Any, is_named: bool
) -> None:
    row = {"prompt": prompt, "chosen": CHOSEN, "rejected": REJECTED}
    read(tmp_path, [row], PairSettings(), 64)
    assert ("'prompt' is not read" in caplog.text) == is_named


def test_no_text_of_answers_alone_is_called_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError):
        read(tmp_path, [{"chosen": "a: b", "rejected": "a: c"}], PairSettings())
    assert not caplog.records


def test_a_ranked_list_is_all_its_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    by_score = {"prompt": "a:", "completions": ["x", "y", "z"], "scores": [1, 3, 1]}
    tied = {"prompt": "b:", "completions": ["v", "w"], "scores": [2, 2]}
    write_rows(tmp_path / "lists.jsonl", [by_score, tied])
    lists = load_rows([str(tmp_path / "lists.jsonl")], "data.train")
    settings = PairSettings(margin_per_score=0.5)
    rows = RankedRows.of(lists, settings)
    assert len(rows) == 2
    assert "dropped 1 rows" in caplog.text
    assert rows.where(1).startswith("row 0 ")
    dataset = PreferenceDataset(rows, TOKENIZER, DataConfig(), settings, 24)
    assert told(dataset) == [
        [("a:y.", "y.", 1.0), ("a:x.", "x.", 1.0)],
        [("a:y.", "y.", 1.0), ("a:z.", "z.", 1.0)],
    ]
    by_rank = {"prompt": "a:", "completions": ["x", "y"], "ranks": [2, 1]}
    write_rows(tmp_path / "ranks.jsonl", [by_rank])
    ranked = RankedRows.of(load_rows([str(tmp_path / "ranks.jsonl")], "data.train"), settings)
    assert [row["chosen"] for row in ranked.span(0, 9)] == ["y"]


@pytest.mark.parametrize(
    "row",
    [
        {"completions": ["x", "y"], "scores": [1]},
        {"completions": "xy", "scores": [1, 2]},
        {"completions": ["x", "y"], "scores": [1, None]},
        {"completions": ["x", "y"], "scores": [1, 1]},
    ],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    write_rows(tmp_path / "lists.jsonl", [{"prompt": "a:", **row}])
    with pytest.raises(UsageError):
        RankedRows.of(load_rows([str(tmp_path / "lists.jsonl")], "data.train"), PairSettings())
