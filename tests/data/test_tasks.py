import json
import logging
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models.chat_templates import GLM, GLM_MARKED, HYBRID, tokenizer_of
from support.models.tokenizers import CHATML, CHATML_MARKED, char_tokenizer
from support.ranks.processes import RankFailed, run_ranks
from transformers import PretrainedConfig

from burnish.config.preferences import PairSettings
from burnish.config.schema import DataConfig, RunConfig
from burnish.data import tasks
from burnish.data.examples import ExampleDataset
from burnish.data.held_out import split_off
from burnish.data.preferences import PreferenceDataset
from burnish.data.ranked_rows import RankedRows
from burnish.data.sources import load_rows
from burnish.data.tasks import PromptDataset
from burnish.distributed.layout import Layout
from burnish.errors import MissingError, UsageError
from burnish.runs.setup import example_dataset

TOKENIZER = char_tokenizer()
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def prompts(rows, **settings):
    return PromptDataset(rows, TOKENIZER, DataConfig(**settings))


def examples(rows, max_length=None, **settings):
    return ExampleDataset(rows, TOKENIZER, DataConfig(**settings), max_length)


def ranked(rows):
    settings = PairSettings()
    rows = RankedRows.of(rows, settings)
    return PreferenceDataset(rows, TOKENIZER, DataConfig(), settings, 64)


def trained(example):
    return TOKENIZER.decode(example.token_ids[example.loss_mask])


def test_verl_parquet_is_read_as_it_is(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [user("1+1?")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "answer": "1+1=2 #### 2"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    prompt = prompts(load_rows([str(tmp_path / "train.parquet")]))[0]
    assert prompt.index == 0
    assert prompt.text == ASK.format("1+1?")
    assert prompt.token_ids.tolist() == TOKENIZER(prompt.text)["input_ids"]
    assert prompt.token_ids.dtype == np.int64
    assert prompt.messages == [user("1+1?")]
    assert (prompt.answer, prompt.source) == ("2", "openai/gsm8k")
    assert prompt.columns == row


@pytest.mark.parametrize(
    ("row", "text", "answer"),
    [
        ({"prompt": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"prompt": [user("1+1?")], "solution": "2"}, ASK.format("1+1?"), "2"),
        ({"question": "1+1?", "answer": "so #### 2"}, "1+1?", "so #### 2"),
        ({"problem": "1+1?", "solution": "2", "answer": "two"}, "1+1?", "two"),
        ({"messages": [user("1+1?"), bot("2")], "ground_truth": 2}, ASK.format("1+1?"), 2),
        ({"messages": [user("1+1?")], "prompt": "1+1="}, "1+1=", None),
    ],
)
def test_usual_columns_are_found(rows_of, row, text, answer):
    prompt = prompts(rows_of([row]))[0]
    assert (prompt.text, prompt.answer, prompt.source) == (text, answer, "")
    assert (prompt.messages is None) == (text != ASK.format("1+1?"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_answers_are_read_from_a_column_that_has_some(tmp_path, suffix, caplog):
    """Far down too; rows with another usual column instead are told."""

    def made(answers, solutions, **settings):
        path = tmp_path / f"rows.{suffix}"
        rows = {"answer": answers, "solution": solutions, "prompt": ["1+1="] * len(answers)}
        if suffix == "parquet":
            pq.write_table(pa.table(rows), path)
        else:
            each = (
                json.dumps(dict(zip(rows, row, strict=True)))
                for row in zip(*rows.values(), strict=True)
            )
            path.write_text("\n".join(each))
        caplog.clear()
        data = prompts(load_rows([str(path)]), string_prompts="user", **settings)
        told = [each for each in caplog.messages if "data.answer_column" in each]
        return [prompt.answer for prompt in data], told

    many = [None] * 200
    assert made([None] * 2, ["1", "2"]) == (["1", "2"], [])
    assert made(["1", None], [None] * 2) == (["1", None], [])
    assert made([*many, "1"], [*many, None]) == ([*many, "1"], [])
    answers, told = made(["1", None, None], [None, "2", "3"])
    assert (answers, len(told)) == (["1", None, None], 1)
    assert "row 1 " in told[0]
    assert made(["1", None], [None, "2"], answer_column="solution") == ([None, "2"], [])


def test_chosen_columns_are_used(rows_of):
    rows = rows_of([{"prompt": "no", "ask": "yes", "answer": "no", "meta": {"gold": "7"}}])
    prompt = prompts(rows, prompt_column="ask", answer_column="meta.gold")[0]
    assert (prompt.text, prompt.answer) == ("yes", "7")
    chats = rows_of([{"prompt": "no", "in": {"chat": [user("a"), bot("b")]}}], "chats.jsonl")
    assert prompts(chats, messages_column="in.chat")[0].messages == [user("a")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prompt_column": "promt"},
            r"(?s)'promt'.*data\.prompt_column=prompt",
        ),
        (
            {"answer_column": "answr"},
            r"(?s)'answr'.*'answer'",
        ),
    ],
)
def test_a_chosen_column_that_is_missing_is_named(rows_of, settings, message):
    with pytest.raises(MissingError, match=message):
        prompts(rows_of([{"prompt": "a", "answer": "b"}]), **settings)


def test_rows_without_a_prompt_column_are_refused(rows_of):
    with pytest.raises(MissingError, match=r"data\.prompt_column"):
        prompts(rows_of([{"ask": "a"}]))


def test_string_prompts_are_used_as_they_stand_with_a_warning(rows_of, caplog):
    rows = rows_of([{"prompt": "ab", "completion": "c"}])
    for make in (prompts, examples):
        caplog.clear()
        make(rows)
        assert "data.string_prompts=user" in caplog.text
        assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    PromptDataset(rows, char_tokenizer(None), DataConfig())
    prompts(rows, string_prompts="user")
    examples(rows, string_prompts="user")
    assert caplog.text == ""


SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("kind", ["prompts", "examples", "ranked"])
def test_a_share_of_the_rows_is_warned_of_once(rows_of, caplog, kind):
    answers = {"completions": ["a", "b"], "scores": [1.0, 2.0]} if kind == "ranked" else {}
    rows = rows_of([{"prompt": str(n), "completion": "c", **answers} for n in range(8)])
    make = {"prompts": prompts, "examples": examples, "ranked": ranked}[kind]
    for part in split_off(rows, "25%"):
        make(part)
    assert caplog.text.count("data.string_prompts=user") == 1
    caplog.clear()
    make(split_off(rows, "25%")[1])  # as burnish eval does
    assert caplog.text.count("data.string_prompts=user") == 1


def test_string_prompts_can_be_what_a_user_asks(rows_of):
    rows = rows_of([{"question": "1+1?", "answer": "so #### 2"}])
    prompt = prompts(rows, string_prompts="user")[0]
    assert prompt.messages == [user("1+1?")]
    assert prompt.text == TOKENIZER.apply_chat_template(
        [user("1+1?")], tokenize=False, add_generation_prompt=True
    )
    assert prompt.token_ids.tolist() == TOKENIZER(prompt.text)["input_ids"]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "a"}, [SYSTEM, user("a")]),
        ({"prompt": [user("a")]}, [SYSTEM, user("a")]),
        ({"messages": [user("a"), bot("b")]}, [SYSTEM, user("a")]),
        ({"prompt": [{**SYSTEM, "content": "own"}, user("a")]}, None),
        ({"prompt": [{"role": "developer", "content": "own"}, user("a")]}, None),
    ],
)
def test_a_system_prompt_stands_before_conversations_without_one(rows_of, row, asked):
    prompt = prompts(rows_of([row]), system_prompt="be brief", string_prompts="user")[0]
    assert prompt.messages == (asked or row["prompt"])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a"), bot("x")]},
        {"prompt": [user("a")], "completion": "x"},
        {"prompt": "a", "completion": "x"},
    ],
)
def test_examples_are_written_with_the_same_settings(rows_of, row):
    """A thinking model that is not to think: its prompt is that of training, and is not trained on."""
    tokenizer = tokenizer_of(HYBRID)
    how = {"chat_template_kwargs": {"enable_thinking": False}, "string_prompts": "user"}
    data = DataConfig(system_prompt="be brief", **how)
    example = ExampleDataset(rows_of([row]), tokenizer, data)[0]
    asked = PromptDataset(rows_of([{"prompt": "a"}], "b.jsonl"), tokenizer, data)[0]
    learned = example.token_ids[example.loss_mask]
    assert asked.text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert asked.text.startswith("<|im_start|>system\nbe brief")
    assert example.token_ids[: len(asked.token_ids)].tolist() == asked.token_ids.tolist()
    assert tokenizer.decode(learned) == "x<|im_end|>"
    assert int(example.loss_mask.argmax()) == len(asked.token_ids)


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (prompts, {"prompt": "a"}),
        (examples, {"prompt": "a", "completion": "b"}),
        (examples, {"text": "a"}),
    ],
)
def test_settings_of_conversations_are_not_passed_over_for_plain_text(rows_of, make, row):
    with pytest.raises(UsageError, match=r"(?s)row 0.*data\.system_prompt.*data\.string_prompts"):
        make(rows_of([row]), system_prompt="be brief")


def test_a_variable_that_the_template_does_not_read_is_refused_and_a_switch_is_noted(
    rows_of, caplog
):
    rows = rows_of([{"prompt": [user("a")]}])
    with pytest.raises(UsageError, match="efort"):
        prompts(rows, chat_template_kwargs={"efort": "low"})
    assert len(prompts(rows, chat_template_kwargs={"enable_thinking": False})) == 1
    assert "enable_thinking" in caplog.text


CALL = {"function": {"name": "look", "arguments": {"up": "2"}}}
WRITES_CALLS = CHATML_MARKED.replace("{{ message['content']", "{{ (message.tool_calls | default('') | string) + message['content']")  # fmt: skip


def test_tool_calls_that_the_template_does_not_write_are_refused(rows_of):
    rows = rows_of([{"messages": [user("a"), {**bot(""), "tool_calls": [CALL]}, user("b")]}])
    for dataset in (PromptDataset, ExampleDataset):
        with pytest.raises(UsageError, match=r"message 1 of row 0"):
            dataset(rows, TOKENIZER, DataConfig())
        written = dataset(rows, char_tokenizer(WRITES_CALLS), DataConfig())[0]
        assert "look" in TOKENIZER.decode(written.token_ids)


def test_words_to_train_on_that_the_template_leaves_out_are_refused_and_others_are_noted(
    rows_of, caplog
):
    turns = [user("a"), bot("hidden"), user("b"), bot("c")]
    rows = rows_of([{"messages": [user("a"), bot("b")]}, {"messages": turns}])
    leaves_out = CHATML_MARKED.replace("message['content'] +", "message['content'] | replace('hidden', 'x') +")  # fmt: skip
    with pytest.raises(UsageError, match="message 1 of row 1"):
        ExampleDataset(rows, char_tokenizer(leaves_out), DataConfig(), strict=True)
    turns[1] |= {"weight": 0}
    rows = rows_of([{"messages": [user("a"), bot("b")]}, {"messages": turns}], "context.jsonl")
    ExampleDataset(rows, char_tokenizer(leaves_out), DataConfig(), strict=True)
    (record,) = caplog.records
    assert "message 1 of row 1" in record.getMessage()
    caplog.clear()
    silent = CHATML.replace("message['content']", "''")
    asked = rows_of([{"prompt": [user(text)]} for text in "xyz"], "asked.jsonl")
    PromptDataset(asked, char_tokenizer(silent), DataConfig())
    assert ["message 0 of row 0" in each for each in caplog.messages] == [True]


def test_a_template_that_fails_or_does_not_end_is_named(rows_of, monkeypatch):
    monkeypatch.setattr("burnish.data.tokenizer._RENDER_SECONDS", 0.1)
    rows = rows_of([{"messages": [user("a"), bot("b")]}])
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    for template in ("{{ 1 // 0 }}", "{{ 10**400 * 1.0 }}", recursive, endless):
        for dataset in (PromptDataset, ExampleDataset):
            with pytest.raises(UsageError):
                dataset(rows, char_tokenizer(template), DataConfig())
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


@pytest.mark.parametrize("tools", [[{"name": "look"}], '[{"name": "look"}]'])
def test_tools_of_a_row_reach_a_template_that_reads_them(rows_of, caplog, tools):
    rows = rows_of([{"messages": [user("a"), bot("b")], "tools": tools}])
    reading = char_tokenizer("{{ tools | tojson if tools else '' }}" + CHATML_MARKED)
    for dataset in (PromptDataset, ExampleDataset):
        text = reading.decode(dataset(rows, reading, DataConfig())[0].token_ids)
        assert text.startswith('[{"name": "look"}]' + ASK.format("a"))
    assert caplog.text == ""
    for make in (prompts, examples):
        caplog.clear()
        assert TOKENIZER.decode(make(rows)[0].token_ids).startswith(ASK.format("a"))
        assert "'tools'" in caplog.text


@pytest.mark.parametrize("tools", ["look", "3", ["look"], {"name": "look"}])
def test_what_does_not_describe_tools_is_named(rows_of, tools):
    reading = char_tokenizer("{{ tools }}" + CHATML_MARKED)
    rows = rows_of([{"messages": [user("a"), bot("b")], "tools": tools}])
    with pytest.raises(UsageError, match=r"(?s)'tools'.*row 0"):
        ExampleDataset(rows, reading, DataConfig())


def test_nulls_of_json_are_data_in_calls_and_tools_and_those_of_arrow_are_not(rows_of, tmp_path):
    """A template gets what `transformers` would get of the line."""
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = char_tokenizer(template)
    calls = [{"function": {"name": "f", "arguments": each}} for each in ({"a": None}, {"b": 1})]
    tools = [{"function": {"name": "f", "default": None}}]
    messages = [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    row = {"messages": messages, "tools": tools}
    asked = [messages[0], messages[1] | {"content": ""}]
    want = tokenizer.apply_chat_template(asked, tools, tokenize=False)
    found = ExampleDataset(rows_of([row]), tokenizer, DataConfig())[0]
    assert tokenizer.decode(found.token_ids) == want
    assert '"a": null' in want
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    arrow = ExampleDataset(load_rows([str(tmp_path / "rows.parquet")]), tokenizer, DataConfig())[0]
    assert "null" not in tokenizer.decode(arrow.token_ids)


def test_long_prompts_are_dropped_and_counted(rows_of, caplog):
    rows = rows_of([{"prompt": "a" * n} for n in (3, 9, 5, 6)])
    data = prompts(rows, max_prompt_length=5)
    assert (len(data), data.dropped_overlong, data.dropped_untrained) == (2, 2, 0)
    assert [prompt.index for prompt in data] == [0, 2]
    assert data.lengths.tolist() == [3, 5]
    assert "dropped 2 of 4 rows: longer than data.max_prompt_length=5" in caplog.text


def test_a_long_prompt_is_an_error_on_request(rows_of):
    rows = rows_of([{"prompt": "a" * n} for n in (3, 9, 5, 6)])
    with pytest.raises(UsageError, match=r"(?s)row 1.*9.*2.*4") as caught:
        prompts(rows, max_prompt_length=5, overlong="error")
    assert "data.jsonl" in str(caught.value)
    assert len(prompts(rows, max_prompt_length=9, overlong="error")) == 4


@pytest.mark.parametrize(("own", "want"), [(None, 5), (9, 5), (4, 4)])
def test_the_least_of_several_limits_counts(rows_of, caplog, own, want):
    rows = rows_of([{"prompt": "a" * n} for n in (3, 9, 5, 6)])
    limits = {"the budget": 6, "the positions": 5}
    data = PromptDataset(rows, TOKENIZER, DataConfig(max_prompt_length=own), limits=limits)
    assert max(data.lengths) <= want
    named = "data.max_prompt_length" if want == own else "the positions"
    assert f"longer than {named}={want}" in caplog.text


def test_dropping_everything_is_an_error(rows_of):
    with pytest.raises(UsageError, match=r"data\.max_prompt_length=1"):
        prompts(rows_of([{"prompt": "abc"}, {"prompt": "abcd"}]), max_prompt_length=1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": ""}], "row 1 "),
        ([{"prompt": "a"}, {"prompt": None}], "row 1 "),
        ([{"messages": [user("a")]}, {"messages": [bot("b")]}], "row 1 "),
    ],
)
def test_a_bad_prompt_is_found_before_the_run(rows_of, rows, message):
    with pytest.raises(UsageError, match=message):
        prompts(rows_of(rows))


def test_a_curriculum_of_texts_that_are_numbers_has_an_order(write):
    rows = load_rows([write("a.csv", "prompt,k\n1=,10\n2=,9.5\n")])
    assert PromptDataset(rows, TOKENIZER, DataConfig(curriculum="k")).difficulty().tolist() == [
        10,
        9.5,
    ]


@pytest.mark.parametrize("value", [None, "hard", [1, 2], {"a": 1}])
def test_a_curriculum_of_what_is_no_number_is_refused(rows_of, value):
    rows = rows_of([{"prompt": "1=", "k": value}, {"prompt": "2=", "k": value}])
    with pytest.raises(UsageError):
        PromptDataset(rows, TOKENIZER, DataConfig(curriculum="k")).difficulty()


def test_items_and_slices(rows_of):
    rows = rows_of([{"prompt": "a" * (1 + n % 7)} for n in range(1100)])
    data = PromptDataset(rows, TOKENIZER, DataConfig())
    assert len(data) == 1100
    assert [prompt.index for prompt in data[3:6]] == [3, 4, 5]
    assert data[-1].index == 1099
    assert [len(data[i].token_ids) for i in range(9)] == data.lengths[:9].tolist()
    with pytest.raises(IndexError):
        data[1100]


@pytest.mark.parametrize("template", [None, CHATML_MARKED])
def test_chats_become_examples(rows_of, template):
    tokenizer = char_tokenizer(template) if template else TOKENIZER
    rows = rows_of([{"messages": [user("a"), bot("x"), user("b"), bot("y")], "id": 5}])
    example = ExampleDataset(rows, tokenizer, DataConfig())[0]
    assert trained(example) == "x<|im_end|>y<|im_end|>"
    assert example.advantages is None


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1+1=2<|im_end|>", "2<|im_end|>"),
        (
            {"prompt": [user("a")], "completion": [bot("x")]},
            ASK.format("a") + "x<|im_end|>\n",
            "x<|im_end|>",
        ),
        (
            {"prompt": [user("a")], "completion": "x"},
            ASK.format("a") + "x<|im_end|>\n",
            "x<|im_end|>",
        ),
        (
            {"prompt": "a", "completion": [bot("x")]},
            ASK.format("a") + "x<|im_end|>\n",
            "x<|im_end|>",
        ),
        (
            {"prompt": [user("a"), bot("b"), user("c")], "completion": "x"},
            ASK.format("a") + "b<|im_end|>\n" + ASK.format("c") + "x<|im_end|>\n",
            "x<|im_end|>",
        ),
        ({"text": "abc"}, "abc<|im_end|>", "bc<|im_end|>"),
    ],
)
def test_prompts_with_completions_and_texts_become_examples(rows_of, row, whole, learned):
    example = examples(rows_of([row]))[0]
    assert TOKENIZER.decode(example.token_ids) == whole
    assert trained(example) == learned


def test_columns_of_other_names_become_examples(rows_of):
    rows = rows_of([{"question": "q", "answer": "a", "messages": [user("m"), bot("n")]}])
    settings = {"prompt_column": "question", "completion_column": "answer"}
    assert TOKENIZER.decode(examples(rows, **settings)[0].token_ids) == "qa<|im_end|>"
    assert trained(examples(rows)[0]) == "n<|im_end|>"
    assert trained(examples(rows, messages_column="x", text_column="question")[0]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("settings", "learned"),
    [
        ({}, "m<|im_end|>"),
        ({"messages_column": "in.chat"}, "n<|im_end|>"),
        ({"text_column": "in.body"}, "ody<|im_end|>"),
        ({"prompt_column": "in.body"}, "c<|im_end|>"),
        ({"completion_column": "in.body"}, "body<|im_end|>"),
        ({"messages_column": "gone", "text_column": "in.body"}, "ody<|im_end|>"),
    ],
)
def test_a_column_that_is_named_comes_before_the_usual_ones(rows_of, settings, learned):
    inner = {"chat": [user("a"), bot("n")], "body": "body"}
    row = {"messages": [user("a"), bot("m")], "text": "t", "prompt": "p", "completion": "c"}
    assert trained(examples(rows_of([row | {"in": inner}]), **settings)[0]) == learned


@pytest.mark.parametrize("setting", ["messages", "prompt", "completion", "text"])
def test_a_column_that_is_named_and_missing_is_not_passed_over_for_another(rows_of, setting):
    row = {"messages": [user("a"), bot("m")], "text": "t", "prompt": "p", "completion": "c"}
    rows, named = rows_of([row]), {f"{setting}_column": "meta.gone"}
    with pytest.raises(MissingError, match=rf"(?s)'meta\.gone'.*data\.{setting}_column"):
        examples(rows, **named)
    if setting in ("messages", "prompt"):
        with pytest.raises(MissingError, match=rf"(?s)'meta\.gone'.*data\.{setting}_column"):
            prompts(rows, **named)


SAYS = {"instruction": "Add.", "input": "1+1", "output": "2"}
TURNS = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "1+1"},
    {"from": "gpt", "value": "2"},
]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"conversations": TURNS}, [SYSTEM, user("1+1")]),
        (SAYS, [user("Add.\n\n1+1")]),
        (SAYS | {"input": ""}, [user("Add.")]),
    ],
)
def test_sharegpt_and_alpaca_are_chats(rows_of, row, asked):
    rows = rows_of([row])
    prompt, example = prompts(rows)[0], examples(rows)[0]
    assert prompt.messages == asked
    assert prompt.answer == row.get("output")
    assert TOKENIZER.decode(example.token_ids) == prompt.text + "2<|im_end|>\n"
    assert trained(example) == "2<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"text": "{}"},
        {"prompt": "a", "completion": "{}"},
        {"prompt": "{}", "completion": "b"},
        {"messages": [user("a"), bot("{}")]},
        {"messages": [user("{}"), bot("b")]},
    ],
)
def test_of_an_enormous_row_only_the_beginning_is_tokenized(rows_of, row):
    """It is dropped as before; a row within the limit is whole however many characters it has."""
    huge = json.loads(json.dumps(row).replace("{}", "x" * 1_000_000))
    for tokenizer in (TOKENIZER, char_tokenizer(CHATML_MARKED)):
        longest = Longest(tokenizer)
        dataset = ExampleDataset(rows_of([row, huge]), longest, DataConfig(), 64)
        assert dataset.lengths.tolist() == [len(examples(rows_of([row]))[0].token_ids)]
        assert dataset.dropped_overlong == 1
        assert longest.most < 10_000
        with pytest.raises(UsageError, match="row 1"):
            ExampleDataset(rows_of([row, huge]), tokenizer, DataConfig(overlong="error"), 64)


def test_many_characters_in_few_tokens_are_not_too_long(rows_of):
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["x" * 1000])
    example = ExampleDataset(rows_of([{"text": "x" * 60_000}]), tokenizer, DataConfig(), 64)[0]
    assert len(example.token_ids) == 61  # and an end


class Longest:
    """A tokenizer that notes the longest text that it is given."""

    def __init__(self, tokenizer):
        self.most = 0
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **options):
        self.most = max(self.most, *map(len, [text] if isinstance(text, str) else text))
        return self._tokenizer(text, **options)


def kept_lengths(tmp_path):
    return sorted((tmp_path / "kept" / "lengths").glob("*"))


def shared(layout, path, keeping):
    """Lengths, digest and the rows that this rank tokenized."""
    os.environ["BURNISH_CACHE"] = f"{path}.kept"
    tasks._SPAN, tasks.WORTH_KEEPING = 2, keeping
    measured = []

    class Examples(ExampleDataset):
        def _measure(self, indices, rows):
            measured.extend(indices)
            return super()._measure(indices, rows)

    data = Examples(load_rows([path]), TOKENIZER, DataConfig(), 80, layout=layout)
    return data.lengths.tolist(), data.digest, measured


def test_ranks_divide_the_rows(write, monkeypatch):
    texts = ["a" * (1 + number % 7) for number in range(13)]
    path = write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(tasks, "_SPAN", 2)
    one = ExampleDataset(load_rows([path]), TOKENIZER, DataConfig(), 80)
    for keeping in (1 << 20, 1):
        found = run_ranks(shared, 3, path, keeping)
        assert {(tuple(lengths), digest) for lengths, digest, _ in found} == {
            (tuple(one.lengths.tolist()), one.digest)
        }
        rows = [row for *_, measured in found for row in measured]
        assert sorted(rows) == list(range(13))
    assert [measured for *_, measured in run_ranks(shared, 3, path, 1)] == [[], [], []]


def test_a_bad_row_of_one_rank_is_every_ranks(write):
    path = write("a.jsonl", '{"text": "a"}\n' * 5 + '{"text": null}\n')
    with pytest.raises(RankFailed) as failed:
        run_ranks(shared, 3, path, 1)
    assert str(failed.value).count("UsageError") >= 3


def test_rows_are_tokenized_once_for_all_starts(rows_of, tmp_path, monkeypatch, caplog):
    """Whatever lengths follow from makes them anew; so does a damaged file."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("burnish.data.tasks.WORTH_KEEPING", 1)
    content = [{"messages": [user("a"), bot("b" * length)]} for length in (1, 2, 60)]

    def made(rows=content, tokenizer=TOKENIZER, limit=80, **settings):
        """The data set, and whether it was tokenized."""
        before = [file.read_bytes() for file in kept_lengths(tmp_path)]
        data = ExampleDataset(rows_of(rows), tokenizer, DataConfig(**settings), limit)
        return data, [file.read_bytes() for file in kept_lengths(tmp_path)] != before

    first, was_made = made()
    assert was_made
    again, was_made = made()
    assert not was_made
    assert (again.digest, again.lengths.tolist()) == (first.digest, first.lengths.tolist())
    assert again[1].token_ids.tolist() == first[1].token_ids.tolist()
    assert again.dropped_overlong == 1
    hidden = CHATML_MARKED.replace("message['content'] +", "'' +")
    others = [
        {"rows": [*content[:2], {"messages": [user("a"), bot("c" * 60)]}]},
        {"rows": content[:2]},
        {"limit": 81},
        {"system_prompt": "be brief"},
        {"tokenizer": char_tokenizer(CHATML_MARKED)},
        {"tokenizer": char_tokenizer(hidden)},
        {"tokenizer": char_tokenizer(eos_token="<eos>")},
    ]
    for change in others:
        assert made(**change)[1], change
        caplog.clear()
        assert not made(**change)[1], change
    for file in kept_lengths(tmp_path):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert made()[1]
    assert made()[0].lengths.tolist() == first.lengths.tolist()
    monkeypatch.setattr("burnish.data.length_cache.MOST_BYTES", 1)
    assert made(limit=82)[1]
    assert kept_lengths(tmp_path) == []


def test_what_a_template_leaves_out_is_said_at_every_start(rows_of, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("burnish.data.tasks.WORTH_KEEPING", 1)
    hides = char_tokenizer(CHATML_MARKED.replace("message['content'] +", "'' +"))
    for _ in range(2):
        caplog.clear()
        ExampleDataset(rows_of([{"messages": [user("a"), bot("b")]}]), hides, DataConfig())
        assert "message 1 of row 0" in caplog.text
    assert len(kept_lengths(tmp_path)) == 1


def test_lengths_that_cannot_be_kept_are_counted_every_time(rows_of, tmp_path, monkeypatch, caplog):
    (tmp_path / "kept").write_text("no directory")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("burnish.data.tasks.WORTH_KEEPING", 1)
    assert len(examples(rows_of([{"text": "a"}]))) == 1
    assert caplog.records[-1].levelno == logging.WARNING


def test_supervised_runs_know_what_ends_the_model_s_completions(rows_of, monkeypatch):
    """GLM's next role's token is added after a last turn, and counts."""
    tokenizer = tokenizer_of(GLM)
    [end] = tokenizer.convert_tokens_to_ids(["<|user|>"])
    rows = rows_of([{"messages": [user("a"), bot("b")]}])
    monkeypatch.setattr("burnish.runs.setup.run_rows", lambda *_: rows)
    lengths = []
    for eos in ((), (end,)):
        foundation = SimpleNamespace(
            config=RunConfig(),
            tokenizer=tokenizer,
            layout=Layout(),
            eos_token_ids=eos,
            hf_config=PretrainedConfig(),
        )
        data = example_dataset(foundation, [], "data.train")
        lengths += data.lengths.tolist()
        assert (data[0].token_ids[-1] == end) == bool(eos)
    assert lengths[1] == lengths[0] + 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_template_that_ends_no_turn_of_the_assistant_is_noted_once(rows_of, caplog, streamed):
    """Unless a token of the next role ends completions."""
    rows = rows_of([{"messages": [user("a"), bot(text)]} for text in "xyz"])
    rows = replace(rows, is_streamed=streamed)
    between = GLM.replace("{{ '<|' +", "{{ ('</s>' if m['role'] == 'user' and not loop.first else '') + '<|' +")  # fmt: skip
    spelled = [each.replace("<|im_end|>", "###") for each in (CHATML, CHATML_MARKED)]
    for template in (GLM, GLM_MARKED, between, *spelled, CHATML, CHATML_MARKED):
        tokenizer = tokenizer_of(GLM)
        tokenizer.chat_template = template
        [user_id] = tokenizer.convert_tokens_to_ids(["<|user|>"])
        for eos in ((), (user_id,)):
            caplog.clear()
            data = ExampleDataset(rows, tokenizer, DataConfig(), eos_token_ids=eos)
            for index in range(3) if streamed else ():
                data.make([index])
            ends = template in (CHATML, CHATML_MARKED) or (eos and template in (GLM, GLM_MARKED))
            assert len(caplog.records) == (not ends), (template, eos)
            assert all(
                "row 0" in each and "model.chat_template" in each for each in caplog.messages
            )


def test_long_examples_are_dropped_and_counted(rows_of, caplog):
    rows = rows_of([{"prompt": "a" * n, "completion": "b"} for n in (2, 9, 3)])
    data = examples(rows, max_length=5)
    assert (len(data), data.dropped_overlong, data.dropped_untrained) == (2, 1, 0)
    assert data.lengths.tolist() == [4, 5]
    assert "longer than data.max_length=5" in caplog.text
    with pytest.raises(UsageError, match=r"(?s)row 1.*11.*data\.max_length"):
        examples(rows, max_length=5, overlong="error")


def test_examples_with_nothing_to_train_on_are_dropped_and_counted(rows_of, caplog):
    rows = rows_of([{"messages": [user("a")]}, {"messages": [user("a"), bot("x")]}])
    data = examples(rows)
    assert (len(data), data.dropped_overlong, data.dropped_untrained) == (1, 0, 1)
    assert trained(data[0]) == "x<|im_end|>"
    assert "dropped 1 of 2 rows: nothing to train on" in caplog.text
    with pytest.raises(UsageError):
        examples(rows_of([{"messages": [user("a")]}] * 2, "none.jsonl"))


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"prompt": "a", "complete": "b"},
            {},
            r"(?s)'completion'.*'complete'",
        ),
        ({"body": "a"}, {}, r"data\.text_column"),
        ({"question": "a", "answer": "b"}, {}, r"data\.completion_column=answer"),
        (
            {"instruction": "a", "response": "b"},
            {},
            r"data\.completion_column=response",
        ),
        (
            {"messages": [], "completion": "x"},
            {"prompt_column": "mesages"},
            "'messages'",
        ),
    ],
)
def test_missing_columns_are_named(rows_of, row, settings, message):
    with pytest.raises(MissingError, match=message):
        examples(rows_of([row]), **settings)


def test_answers_that_nobody_wants_are_trained_on_only_by_name(rows_of):
    answers = [{"prompt": "a", "completion": each, "label": each == "b"} for each in "bc"]
    with pytest.raises(UsageError, match="kto"):
        examples(rows_of(answers))
    assert len(examples(rows_of(answers), completion_column="completion")) == 2
    assert len(examples(rows_of([each | {"label": int(each["label"])} for each in answers]))) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"text": None}], "row 1 "),
        ([{"messages": [user("a")]}, {"messages": None}], "row 1 "),
        ([{"prompt": "a", "completion": None}], "row 0 "),
    ],
)
def test_a_bad_example_is_found_before_the_run(rows_of, rows, message):
    with pytest.raises(UsageError, match=message):
        examples(rows_of(rows))


def test_items_made_together_are_those_made_alone(rows_of):
    rows = [{"prompt": "ab"[: k % 3] or "c", "completion": str(k)} for k in range(9)]
    sets = [
        ExampleDataset(rows_of(part, f"{len(part)}.jsonl"), TOKENIZER, DataConfig())
        for part in (rows[:4], rows[4:])
    ]
    mixture = tasks.Mixture(sets)
    order = [8, 0, 3, 4, 0, 7]
    for dataset, indices in ((sets[1], [4, 0, 2]), (mixture, order), (mixture, [])):
        made = dataset.items(indices)
        for found, want in zip(made, [dataset[index] for index in indices], strict=True):
            np.testing.assert_array_equal(found.token_ids, want.token_ids)
            np.testing.assert_array_equal(found.loss_mask, want.loss_mask)
    assert len(list(mixture)) == 9  # an index over the last one is an IndexError
