"""Talking to a model that calls tools, compared with transformers' rendering of the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.models.tokenizers import CHATML, char_tokenizer
from support.models.tool_templates import calling_tokenizer
from support.ranks.fork_server import TESTS

from burnish.cli.chat_environment import ChatEnvironment
from burnish.cli.chat_model import Reply
from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig
from burnish.data.turn_bridge import TurnBridge
from burnish.errors import UsageError

TALKERS = TESTS / "environments" / "talkers.py"
CALL = '\n<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
WRONG = '\n<tool_call>\n{"name": "explode", "arguments": {"why": "no"}}\n</tool_call>'


class Person:
    """Types texts, and sees what a scripted model and an environment say."""

    def __init__(self, name: str, script: Sequence[str], **settings: int) -> None:
        config = EnvironmentConfig(
            function=name if ":" in name else f"{TALKERS}:{name}", **settings
        )
        self.environment = ChatEnvironment(config)
        tools = self.environment.tools
        self.tokenizer = calling_tokenizer() if tools else char_tokenizer(CHATML)
        stops = [self.tokenizer.eos_token_id]
        bridge = TurnBridge(self.tokenizer, DataConfig(), tools, stops)
        self.environment.add("model", bridge)
        self.script = iter(script)
        self.messages: list[dict[str, object]] = []
        self.notes: list[str] = []

    def draw(self, ids: Sequence[int], turn: int) -> Reply:
        """Say the next line, after the ids of the whole conversation."""
        tools = self.environment.tools or None
        whole = self.tokenizer.apply_chat_template(
            self.messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert list(ids) == whole
        text = next(self.script)
        return Reply(text, self.tokenizer(f"{text}<|im_end|>")["input_ids"], False)

    def says(self, text: str) -> list[str]:
        """Type a text; return what is shown besides the model's words."""
        self.messages.append({"role": "user", "content": text})
        before = len(self.notes)
        self.environment.answer("model", self.messages, (3, 1), self.draw, self.notes.append)
        return self.notes[before:]


@pytest.fixture
def people() -> Iterator[list[Person]]:
    found: list[Person] = []
    yield found
    for each in found:
        each.environment.close()


def test_tools_are_called_until_an_answer_without_a_call(people: list[Person]) -> None:
    person = Person("Quick", [CALL, "It is 12.", WRONG, WRONG, "Sorry."], max_turns=4)
    people.append(person)
    assert person.environment.tool_names == "multiply, explode"
    [shown] = person.says("What is 3 times 4?")
    assert "multiply" in shown
    assert shown.endswith("12")
    said = [(each["role"], each["content"]) for each in person.messages]
    assert said == [
        ("user", "What is 3 times 4?"),
        ("assistant", ""),
        ("tool", "12"),
        ("assistant", "It is 12."),
    ]
    [call] = person.messages[1]["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": {"a": 3, "b": 4}}
    assert person.messages[2]["tool_call_id"] == call["id"]
    assert [note.rpartition("→")[2].strip() for note in person.says("Try the other one.")] == [
        "Error: ValueError: no"
    ] * 2
    assert person.messages[-1]["content"] == "Sorry."
    assert "tools" in person.environment.columns


def test_turns_are_limited(people: list[Person]) -> None:
    people.append(person := Person("Quick", [CALL] * 3, max_turns=3))
    *_, last = person.says("Go on.")
    assert "max_turns" in last
    assert [each["role"] for each in person.messages] == ["user", *["assistant", "tool"] * 3]


def test_columns_that_a_person_does_not_type_are_empty(people: list[Person]) -> None:
    people.append(person := Person("Capitals", ["A", "b", "C", "d", "E", "f"]))
    told, *heard = person.says("Talk.")
    assert heard == ["user: !", "user: !", "user: !"]
    assert not any("reward" in note for note in heard)
    assert "reward" in told
    person.environment.begin_anew()
    person.messages.clear()
    assert person.says("Talk.") == heard


def test_an_environment_that_fails_begins_anew(people: list[Person]) -> None:
    people.append(person := Person("Counting", ["one", "fail", "one", "two", "three"]))
    shown = person.says("Count.")
    assert shown[0] == "user: Count from 0."
    assert "no connection" in shown[-1]
    shown = person.says("Again.")
    assert [note for note in shown if note.startswith("user")] == [
        "user: Count from 0.",
        "user: 1",
        "user: 2",
        "user: 3",
    ]
    assert "(reward 1)" in shown


def test_an_environment_that_cannot_begin_is_refused(people: list[Person], tmp_path: Path) -> None:
    file = tmp_path / "strict.py"
    file.write_text(
        "import burnish\n"
        "class Strict(burnish.Environment):\n"
        '    "Needs a number."\n'
        "    def begin(self, row, seed):\n"
        '        return [{"role": "user", "content": "x" * int(row["level"])}]\n'
    )
    people.append(person := Person(f"{file}:Strict", []))
    with pytest.raises(UsageError, match="begin"):
        person.says("hello")
