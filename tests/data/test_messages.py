"""The forms in which rows are published become one form, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.data.messages import messages_of, tools_of
from burnish.errors import UsageError

CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Bonn"}}}
ASKED = {"role": "user", "content": "weather?"}


def read(*messages: Any) -> list[dict[str, Any]]:
    return messages_of([ASKED, *messages], "row 7")[1:]


@pytest.mark.parametrize(
    ("content", "want"),
    [
        ([{"type": "text", "text": "a"}], ["a"]),
        (["a", {"type": "text", "text": "b"}], ["a", "b"]),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], ["a", "b"]),
        ([{"type": "text", "text": "a", "image_url": None}], ["a"]),
        ([{"type": "refusal", "refusal": "no"}], ["no"]),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_text_have_one_form(role: str, content: Any, want: list[str]) -> None:
    (message,) = read({"role": role, "content": content})
    assert [part["text"] for part in message["content"]] == want
    assert {part["type"] for part in message["content"]} == {"text"}


@pytest.mark.parametrize(
    "content",
    [
        None,
        5,
        True,
        {"text": "a"},
        [],
        [{"text": "no type"}],
        [{"type": "image"}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "input_audio", "input_audio": {"data": "x"}}],
        [{"type": "video", "video": "x.mp4"}],
        [{"type": "tool_use", "name": "f", "input": {}}],
        [{"type": "text", "text": None}],
        [{"type": ["text"], "text": "a"}],
        [["a"]],
    ],
)
def test_content_without_text_is_refused_by_name(content: Any) -> None:
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"role": "user", "content": content})


@pytest.mark.parametrize("key", ["images", "audio", "video"])
def test_media_beside_the_text_are_refused_by_name(key: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)message 1 of row 7.*{key}"):
        read({"role": "user", "content": "what is this?", key: ["x.png"]})
    assert read({"role": "user", "content": "a", key: []}) == [
        {"role": "user", "content": "a", key: []}
    ]


def test_an_assistant_without_content_says_something_else() -> None:
    assert read({"role": "assistant", "content": None, "tool_calls": [CALL]})[0]["content"] == ""
    assert read({"role": "assistant", "reasoning": "hm"})[0]["content"] == ""
    assert read({"role": "assistant", "content": None, "refusal": "no"}) == [
        {"role": "assistant", "content": "no"}
    ]
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"role": "assistant", "content": None, "text": "a"})


def test_parts_that_are_thoughts_become_the_message_s_thoughts() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "four"}]
    (message,) = read({"role": "assistant", "content": parts})
    assert (message["reasoning_content"], message["content"][0]["text"]) == ("hm", "four")
    nested = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]
    (message,) = read({"role": "assistant", "content": nested})
    assert (message["reasoning_content"], message["content"]) == ("hm", "")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "function_call": CALL["function"], "content": None},
        {"role": "assistant", "tool_calls": [CALL["function"]], "content": ""},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"city": "Bonn"}}'},
        {"role": "tool_call", "content": '[{"name": "look", "arguments": {"city": "Bonn"}}]'},
    ],
)
def test_calls_have_the_form_of_openai(message: dict[str, Any]) -> None:
    (found,) = read(message)
    assert (found["role"], found["tool_calls"], found["content"]) == ("assistant", [CALL], "")


@pytest.mark.parametrize("text", ["look(city)", '"look"', "[1]", '{"arguments": {}}'])
def test_calls_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"from": "function_call", "value": text})


@pytest.mark.parametrize("role", ["function", "tool_response", "tool"])
@pytest.mark.parametrize(
    ("content", "want"),
    [("sun", "sun"), ({"sky": "blü"}, '{"sky": "blü"}'), ([{"sky": 1}], '[{"sky": 1}]')],
)
def test_results_of_tools_are_text(role: str, content: Any, want: str) -> None:
    assert read({"role": role, "name": "look", "content": content}) == [
        {"role": "tool", "name": "look", "content": want}
    ]


@pytest.mark.parametrize("key", ["weight", "loss", "train", "training", "trainable", "loss_mask"])
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_marks_of_turns_that_are_not_trained_on_mean_the_same(key: str, value: Any) -> None:
    unmarked = {"role": "assistant", "content": "a"}
    assert read(unmarked | {key: value}) == [unmarked | {"weight": 0}]
    assert read(unmarked | {key: 1 - value}) == [unmarked]
    assert read(unmarked | {key: None}) == [unmarked]
    assert read(unmarked | {"masked": True}) == [unmarked | {"weight": 0}]


@pytest.mark.parametrize(
    "marks",
    [
        {"weight": -0.5},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": "2"},
        {"loss": "false"},
        {"loss": 0.5},
        {"train": [0, 1]},
        {"weight": 2, "train": False},
        {"mask": True},
        {"loss_scale": 0.3},
        {"train_detail": [{"begin_offset": 0}]},
        {"loss": True, "train": False},
        {"loss": True, "masked": True},
    ],
)
def test_marks_that_cannot_be_honoured_are_refused(marks: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"role": "assistant", "content": "a"} | marks)


def test_only_the_assistant_can_be_marked_as_trained_on() -> None:
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"role": "user", "content": "a", "train": True})
    with pytest.raises(UsageError, match="message 1 of row 7"):
        read({"role": "user", "content": "a", "weight": 0.5})
    assert read({"role": "user", "content": "a", "weight": 1}) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("weight", [0.5, 2, 2.5])
def test_a_turn_keeps_its_weight(weight: float) -> None:
    turn = {"role": "assistant", "content": "a", "weight": weight}
    assert read(turn | {"train": True}) == [turn]


def test_functions_are_tools() -> None:
    function = {"name": "look", "parameters": {}}
    tool = {"type": "function", "function": function}
    assert tools_of({"functions": [function]}, "row 7") == [tool]
    assert tools_of({"functions": [function], "tools": [CALL]}, "row 7") == [CALL]
    assert tools_of({"functions": "", "tools": None}, "row 7") is None


@pytest.mark.parametrize("role", ["usr", "asistant", "assisstant", "users", "sytem", "tools"])
def test_a_mistyped_role_is_refused(role):
    with pytest.raises(UsageError):
        messages_of([{"role": role, "content": "hello"}], "row 0")


@pytest.mark.parametrize("role", ["developer", "ipython", "observation", "critic", "expert"])
def test_roles_of_templates_stay(role):
    assert messages_of([{"role": role, "content": "hello"}], "row 0")[0]["role"] == role
