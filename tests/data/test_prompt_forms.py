"""Prompts that are no messages."""

from __future__ import annotations

import json

import pytest
from support.models.tool_templates import calling_tokenizer

from burnish.config.schema import DataConfig
from burnish.data.messages import REQUEST_COLUMN, messages_of, tools_of
from burnish.data.prompt_forms import chat_of_request
from burnish.data.sources import load_rows
from burnish.data.tasks import PromptDataset
from burnish.errors import UsageError


def test_a_request_becomes_a_chat():
    request = {
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "3 times 4?"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "multiply",
                "arguments": '{"a": 3, "b": 4}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "12"},
            {"type": "message", "role": "assistant", "content": "12"},
            {"type": "message", "role": "user", "content": "Sure?"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "multiply",
                "parameters": {"type": "object"},
                "strict": True,
                "description": "Multiply.",
            }
        ],
    }
    row = chat_of_request({REQUEST_COLUMN: request})
    messages = messages_of(row[REQUEST_COLUMN], "a row")
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    assert messages[2]["reasoning_content"] == "hm"
    (call,) = messages[2]["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": '{"a": 3, "b": 4}'}
    assert call["id"] == messages[3]["tool_call_id"] == "c1"
    assert messages[3]["content"] == "12"
    (tool,) = tools_of(row, "a row")
    assert [*tool] == ["function", "type"]  # templates write keys in their order
    assert [*tool["function"]] == ["name", "description", "parameters"]


def test_a_string_is_what_a_user_asks():
    row = chat_of_request({REQUEST_COLUMN: {"input": "Hello"}})
    assert row[REQUEST_COLUMN] == [{"role": "user", "content": "Hello"}]
    assert tools_of(row, "a row") is None


@pytest.mark.parametrize(
    "given",
    [
        *(None, [], {}, {"input": None}, {"input": [3]}, {"input": {}}),
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": 7},
        {"input": ["hi", {"role": "assistant", "content": "x"}]},
        *(
            {"input": [{"type": "reasoning", "summary": summary}]}
            for summary in ("a", ["a"], [{"text": 7}])
        ),
    ],
)
def test_what_is_no_conversation_is_refused(given):
    with pytest.raises(UsageError):
        messages_of(chat_of_request({REQUEST_COLUMN: given})[REQUEST_COLUMN], "a row")


@pytest.mark.parametrize("tools", [["search"], "search", 7, {"name": "search"}])
def test_tools_that_are_none_are_refused(tools):
    with pytest.raises(UsageError):
        tools_of(chat_of_request({REQUEST_COLUMN: {"input": "x", "tools": tools}}), "a row")


def test_a_request_has_all_that_the_model_reads(tmp_path):
    """Gym's verifiers read the other columns."""
    request = {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    row = {
        REQUEST_COLUMN: request,
        "prompt": "p",
        "question": "q",
        "system": "s",
        "tools": [],
        "images": ["i"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = load_rows([str(tmp_path / "rows.jsonl")])
    (prompt,) = PromptDataset(rows, calling_tokenizer(), DataConfig())
    assert prompt.messages == [{"role": "user", "content": "x"}]
    assert prompt.text.startswith("<|im_start|>system\nTools:\n")
    assert prompt.columns == row
    with pytest.raises(UsageError):
        PromptDataset(rows, calling_tokenizer(), DataConfig(system_prompt="Be brief."))
