"""Each word of a row reaches the model, or its key is named once with the first row; what is to be trained is refused."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models.chat_templates import THINKING, THOUGHTLESS, tokenizer_of
from support.models.tokenizers import CHATML, CHATML_MARKED, char_tokenizer
from support.ranks.processes import run_ranks

from burnish.config.schema import DataConfig
from burnish.data.examples import ExampleDataset
from burnish.data.sources import load_rows
from burnish.data.streaming import Stream, StreamLoader, open_rows
from burnish.data.tasks import PromptDataset
from burnish.distributed.layout import Layout
from burnish.errors import UsageError

WITHOUT_SYSTEM = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
THOUGHT = "<think>\nlet me see\n</think>\n\n"
REASONS = ("reasoning_content", "reasoning", "thinking")


def user(text: Any, **others: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **others}


def bot(text: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def example(rows: Any, template: str = CHATML, **settings: Any) -> tuple[str, str]:
    """The text of the first row, and of it what is trained on."""
    tokenizer = char_tokenizer(template)
    made = ExampleDataset(rows, tokenizer, DataConfig(**settings), strict=True)[0]
    return tokenizer.decode(made.token_ids), tokenizer.decode(made.token_ids[made.loss_mask])


def prompt(rows: Any, template: str = CHATML, **settings: Any) -> str:
    return PromptDataset(rows, char_tokenizer(template), DataConfig(**settings))[0].text


def test_thoughts_to_train_on_that_the_template_drops_are_refused(rows_of) -> None:
    turns = [user("2+2"), bot(THOUGHT + "four")]
    rows = rows_of([{"messages": [user("2+2"), bot("four")]}, {"messages": turns}])
    drops = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    with pytest.raises(UsageError, match="message 1 of row 1"):
        example(rows, drops)
    last = rows_of([{"messages": turns}], "last.jsonl")
    with pytest.raises(UsageError, match="message 1 of row 0"):
        ExampleDataset(last, tokenizer_of(THOUGHTLESS), DataConfig(), strict=True)


@pytest.mark.parametrize("key", REASONS)
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_thoughts_under_a_key_that_the_template_does_not_read_are_refused(
    rows_of, key, template
) -> None:
    """Also where the answer has the same words."""
    for thought in ("let me see", "four"):
        rows = rows_of([{"messages": [user("2+2"), bot("four", **{key: thought})]}])
        with pytest.raises(UsageError, match=rf"{key} of message 1 of row 0"):
            example(rows, template)


def test_thoughts_before_the_last_question_are_named_once(rows_of, caplog) -> None:
    """As thinking models forget them."""
    plain = [user("a"), bot("x"), user("b"), bot("y")]
    past = [user("a"), bot(THOUGHT + "x"), user("b"), bot(THOUGHT + "y")]
    rows = rows_of([{"messages": each} for each in (plain, past, past)])
    data = ExampleDataset(rows, tokenizer_of(THINKING), DataConfig(), strict=True)
    assert len(data) == 3
    assert ["message 1 of row 1 " in each for each in caplog.messages] == [True]


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a"), bot("b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": [user("a")], "completion": [bot("b")]},
        {"instruction": "a", "output": "b"},
    ],
)
def test_a_column_of_the_row_s_system_message_is_read(rows_of, caplog, key, row) -> None:
    rows = rows_of([row | {key: "be brief"}, row | {key: None}])
    text, trained = example(rows, system_prompt="be kind")
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na")
    assert trained == "b<|im_end|>"
    assert prompt(rows, system_prompt="be kind").startswith("<|im_start|>system\nbe brief<")
    assert PromptDataset(rows, char_tokenizer(), DataConfig(system_prompt="be kind"))[1].messages[0]["content"] == "be kind"  # fmt: skip
    assert caplog.messages == []


def test_a_system_column_beside_a_system_message_is_named(rows_of, caplog) -> None:
    own = {"role": "system", "content": "be brief"}
    rows = rows_of([{"messages": [own, user("a"), bot("b")], "system": "be kind"}])
    assert example(rows)[0].count("system") == 1
    assert ["'system'" in each and "row 0" in each for each in caplog.messages] == [True]
    caplog.clear()
    same = rows_of([{"messages": [own, user("a"), bot("b")], "system": "be brief"}], "same.jsonl")
    example(same)
    assert caplog.messages == []


def test_a_system_prompt_without_a_place_is_refused(rows_of, caplog) -> None:
    rows = rows_of([{"messages": [user("a"), bot("b")]}])
    for read in (example, prompt):
        with pytest.raises(UsageError, match=r"data\.system_prompt"):
            read(rows, WITHOUT_SYSTEM, system_prompt="s")
    assert caplog.messages == []


@pytest.mark.parametrize("role", ["system", "developer", "tool", "user"])
@pytest.mark.parametrize("content", ["a long text without a place", "x"])
def test_context_that_the_template_skips_is_named_once(rows_of, caplog, role, content) -> None:
    """Also a short text that stands elsewhere by chance."""
    skipping = CHATML.replace("in messages %}", f"in messages if message.role != '{role}' %}}")
    start = [] if role == "user" else [user("an xylophone")]
    turns = [*start, {"role": role, "content": content}, bot("xyz")]
    if role in ("system", "developer"):
        turns = [turns[1], turns[0], turns[2]]
    rows = rows_of([{"messages": turns}] * 2)
    if role != "user":
        example(rows, skipping)
        assert [role in each and "row 0" in each for each in caplog.messages] == [True]
    caplog.clear()
    prompt(rows, skipping)
    assert [role in each and "row 0" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "Rumpelstiltskin"),
        ("emotion", "cheerful"),
        ("tools", [{"name": "look up"}]),
        ("documents", ["the source"]),
        ("attachments", {"text": "the source"}),
        ("reasoning_content", "let me see"),
    ],
)
def test_words_of_a_message_under_an_unread_key_are_named_once(rows_of, caplog, key, value) -> None:
    turns = [user("a"), bot("b"), user("c", **{key: value}), bot("d")]
    rows = rows_of([{"messages": turns[:2]}, {"messages": turns}, {"messages": turns}])
    for read in (example, prompt):
        caplog.clear()
        read(rows)
        assert [f"'{key}'" in each and "message 2 of row 1" in each for each in caplog.messages] == [True]  # fmt: skip
    caplog.clear()
    example(rows, CHATML.replace("message['content']", f"message['content'] + (message['{key}'] | default('') | string)"))  # fmt: skip
    assert caplog.messages == []


def test_what_a_message_says_about_itself_is_not_named(rows_of, caplog) -> None:
    about = {"id": "a1", "timestamp": "yesterday", "model": "gpt", "tool_call_id": "x", "score": 3}
    example(rows_of([{"messages": [user("a", **about), bot("b", flag=True, name=None, **about)]}]))
    assert caplog.messages == []


CONTEXT = {
    "context": "the passage",
    "developer": "be kind",
    "documents": [{"text": "the source"}],
    "functions": [{"name": "look up"}],
    "images": [{"bytes": None, "path": "a.png"}],
    "input": "the passage",
    "tools": [{"name": "look up"}],
}
TARGETS = {
    "chosen": [bot("the better")],
    "completion": "the other",
    "output": "the other",
    "reasoning": "let me see",
    "rejected": "the worse",
    "response": "the other",
    "text": "the other",
}


@pytest.mark.parametrize("column", [*CONTEXT, *TARGETS])
def test_columns_that_are_usually_for_the_model_are_named_once(rows_of, caplog, column) -> None:
    """What a reward function may compare with is silent in RL."""
    value = (CONTEXT | TARGETS)[column]
    row = {"messages": [user("a"), bot("b")]}
    rows = rows_of([row, row | {column: value}, row | {column: value}])
    example(rows)
    assert [f"'{column}'" in each and "row 1" in each for each in caplog.messages] == [True]
    caplog.clear()
    prompt(rows)
    assert [f"'{column}'" in each for each in caplog.messages] == [True] * (column in CONTEXT)
    caplog.clear()
    PromptDataset(rows, char_tokenizer(), DataConfig(), scored=[column])
    assert caplog.messages == []


def test_columns_that_repeat_the_messages_or_are_about_the_row_are_not_named(
    rows_of, caplog
) -> None:
    row = {"messages": [user("what is it?"), bot("a prime")], "prompt": "what is it?"}
    row |= {"output": "a prime", "text": None, "context": "", "tools": []}
    about = {"id": "x7", "source": "web", "answer": "7", "solution": "so 7", "category": "maths"}
    example(rows_of([row | about]))
    assert caplog.messages == []


def test_string_prompts_and_texts_name_what_they_leave_out(rows_of, caplog) -> None:
    rows = rows_of([{"prompt": "1+1=", "completion": "2", "system": "be brief"}])
    for read in (example, prompt):
        caplog.clear()
        read(rows)
        assert sum("'system'" in each for each in caplog.messages) == 1
    caplog.clear()
    example(rows_of([{"text": "a story", "context": "the passage"}], "text.jsonl"))
    assert ["'context'" in each for each in caplog.messages] == [True]


def test_the_history_of_an_alpaca_row_is_read_and_trained_on(rows_of, caplog) -> None:
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}
    text, trained = example(rows_of([row]))
    assert [each.partition("\n")[2] for each in text.split("<|im_end|>\n")][:4] == ["a", "b", "c", "d"]  # fmt: skip
    assert trained == "b<|im_end|>d<|im_end|>"
    assert caplog.messages == []
    example(rows_of([row | {"history": "before that, a"}], "text.jsonl"))
    assert ["'history'" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_characters_that_the_tokenizer_does_not_know_are_named_once(
    rows_of, caplog, template: str
) -> None:
    known = {"messages": [user("write <unk>"), bot("x")]}
    lost = {"messages": [user("é"), bot("x")]}
    example(rows_of([known], "known.jsonl"), template)
    assert caplog.messages == []
    example(rows_of([known, lost, lost]), template)
    assert ["é" in each for each in caplog.messages] == [True]
    caplog.clear()
    prompt(rows_of([known, lost, lost]), template)
    assert ["é" in each for each in caplog.messages] == [True]


def test_answers_without_words_are_named_once(rows_of, caplog) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    whole = [user("a"), bot("", tool_calls=[call]), user("b"), bot("", weight=0), bot("c")]
    example(rows_of([{"messages": whole}], "whole.jsonl"), WRITES)
    assert caplog.messages == []
    empty = {"messages": [user("a"), bot(" "), user("b"), bot("c")]}
    example(rows_of([{"messages": whole}, empty, empty]), WRITES)
    assert ["row 1" in each for each in caplog.messages] == [True]
    caplog.clear()
    pairs = [{"prompt": "1+1=", "completion": text} for text in ("2", "", "")]
    example(rows_of(pairs, "pairs.jsonl"), None)
    assert ["row 1" in each for each in caplog.messages] == [True]


WRITES = CHATML.replace("message['content']", "message['content'] + (message.tool_calls | default('') | tojson)")  # fmt: skip


@pytest.mark.parametrize("arguments", [{"city": "Bonn"}, {"days": 37}, {"where": {"near": ["a lake"]}}])  # fmt: skip
def test_arguments_that_the_template_does_not_write_are_refused(rows_of, arguments) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    rows = rows_of([{"messages": [user("a"), bot("", tool_calls=[call])]}])
    assert "look" in example(rows, WRITES)[1]
    names = WRITES.replace("| tojson", "| map(attribute='function.name') | join")
    with pytest.raises(UsageError, match="message 1 of row 0"):
        example(rows, names)


def test_words_of_tools_that_the_template_leaves_out_are_named_once(rows_of, caplog) -> None:
    properties = {"city": {"type": "string", "description": "the town"}}
    function = {"name": "look", "description": "looks up", "parameters": {"properties": properties}}
    rows = rows_of([{"messages": [user("a"), bot("b")], "tools": [{"function": function}]}])
    example(rows, "{{ tools | tojson }}" + CHATML)
    assert caplog.messages == []
    example(rows, "{{ tools[0].function.name }}" + CHATML)
    assert ["'tools'" in each and "row 0" in each for each in caplog.messages] == [True]


def test_nulls_of_parquet_are_no_words(tmp_path, caplog) -> None:
    turns = [user("a", name=None, parts=None), bot("b", name="Bo Diddley", parts=[{"x": None}])]
    rows = [{"messages": turns, "system": None, "context": None}, {"messages": turns[:1] * 2, "system": "s", "context": None}]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    example(load_rows([str(tmp_path / "rows.parquet")]))
    assert sorted("'name'" in each for each in caplog.messages if "row 0" in each) == [True]


@pytest.mark.parametrize("kind", [ExampleDataset, PromptDataset])
def test_streamed_rows_are_named_once_too(rows_of, tmp_path, caplog, kind) -> None:
    row = {"messages": [user("a"), bot("b")]}
    rows_of([row, row | {"context": "the passage"}, row | {"context": "another"}])
    rows = open_rows([str(tmp_path / "data.jsonl")], "data.train", 10**6, seed=0, shuffle=False)
    stream = Stream([kind(rows, char_tokenizer(), DataConfig())])
    assert len(StreamLoader(stream, []).take(6)) == 6
    assert ["'context'" in each for each in caplog.messages] == [True]


def test_the_warnings_of_kept_lengths_are_said_again(
    rows_of, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("burnish.data.tasks.WORTH_KEEPING", 1)
    rows = rows_of([{"messages": [user("a"), bot("b")], "context": "the passage", "system": "s"}])
    example(rows)
    first = [*caplog.messages]
    caplog.clear()
    monkeypatch.setattr(ExampleDataset, "_measure", None)  # nothing is tokenized again
    example(rows)
    assert caplog.messages == first
    assert len(first) == 1


def _warned_by_ranks(layout: Layout, path: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("burnish").addHandler(handler)
    ExampleDataset(load_rows([path]), char_tokenizer(), DataConfig(), layout=layout)
    return records


def test_all_ranks_name_the_first_row(rows_of, tmp_path) -> None:
    """Although the first rank finds a later one: ranks take turns with 512 rows."""
    row = {"messages": [user("a"), bot("b")]}
    odd = row | {"context": "the passage"}
    rows_of([odd if number in (600, 700, 1050) else row for number in range(1100)])
    for found in run_ranks(_warned_by_ranks, 2, str(tmp_path / "data.jsonl")):
        assert ["row 600 " in each for each in found] == [True]
