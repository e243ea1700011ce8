"""Random rows and templates with extra or contradicting parts: each word reaches the text with the right mask, or is named.

Every place of a row has a word of its own, so the words are the oracle.
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.models.tokenizers import char_tokenizer
from support.nightly import draws

from burnish.config.schema import DataConfig
from burnish.data.examples import ExampleDataset
from burnish.data.sources import load_rows
from burnish.data.tasks import PromptDataset
from burnish.errors import UsageError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
COLUMNS = ("context", "system", "completion", "response", "chosen", "rejected", "developer")
ABOUT = ("id", "source", "answer", "category")
MARKS = ("weight", "loss", "train")


@dataclass
class Words:
    """A row, and the key, fate and word of each of its places."""

    row: dict[str, Any] = field(default_factory=dict)
    placed: list[tuple[str, str, str]] = field(default_factory=list)
    """Key, `trained`, `context` or `about`, and word."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def put(self, key: str, fate: str = "context") -> str:
        word = f"{key.replace('_', '')}{next(self.numbers):03}qz"
        self.placed.append((key, fate, word))
        return word


def chance(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 4)) == 0


def content(draw: st.DrawFn, words: Words) -> Any:
    """Text or text parts that are context."""
    texts = [words.put("content") for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def call(draw: st.DrawFn, words: Words) -> list[dict[str, Any]]:
    """A tool's call and result."""
    arguments: Any = {words.put("tool_calls", "trained"): words.put("tool_calls", "trained")}
    if draw(st.booleans()):
        arguments = json.dumps(arguments)
    function = {"name": words.put("tool_calls", "trained"), "arguments": arguments}
    asks: dict[str, Any] = {"role": "assistant", "content": None, "function_call": function}
    if draw(st.booleans()):
        one = {"id": "call00001", "type": "function", "function": asks.pop("function_call")}
        asks["tool_calls"] = [one]
    return [asks, {"role": "tool", "content": content(draw, words)}]


def answer(draw: st.DrawFn, words: Words, *, last: bool) -> dict[str, Any]:
    """What the assistant says, perhaps with thoughts in one of their forms, and with a mark."""
    marks = itertools.product(MARKS, (1, True) if last else (0, 1, False, True))
    mark = draw(st.sampled_from([None, None, *marks]))
    fate = "trained" if mark is None or mark[1] else "context"
    says: dict[str, Any] = {"role": "assistant"} | dict([mark] if mark else [])
    thought = f"<think>\n{words.put('thoughts', fate)}\n</think>\n\n" if chance(draw) else ""
    says["content"] = f"{thought}{words.put('content', fate)}"
    keys = [key for key in THOUGHTS if chance(draw) and not thought]
    return says | {key: words.put(key, fate) for key in keys}


@st.composite
def rows(draw: st.DrawFn) -> Words:
    words = Words()
    messages: list[dict[str, Any]] = []
    if chance(draw):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": content(draw, words)})
    for number in reversed(range(draw(st.integers(1, 2)))):
        keys = [key for key in ("name", "note", "documents") if chance(draw)]
        asks = {"role": "user", "content": content(draw, words)}
        messages.append(asks | {key: words.put(key) for key in keys})
        messages += call(draw, words) if chance(draw) else []
        messages.append(answer(draw, words, last=number == 0))
    words.row["messages"] = messages
    for column in (*COLUMNS, *ABOUT):
        if chance(draw):
            words.row[column] = words.put(column, "about" if column in ABOUT else "context")
    for column in ("tools", "functions"):
        if chance(draw):
            function = {"name": words.put(column), "description": words.put(column)}
            words.row[column] = [{"function": function} if column == "tools" else function]
    if chance(draw):
        words.row["documents"] = [{"text": words.put("documents")}]
    return words


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A template that leaves out what it likes."""
    content = draw(
        st.sampled_from(
            [
                "{{ c }}",
                "{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}",
                "{% for p in c %}{{ p.text }}{% endfor %}",
            ]
        )
    )
    cut = draw(st.sampled_from(["", "not loop.last and ", "true and "]))
    if cut and "string" in content:
        content = (
            f"{{% if {cut}c is string and m.role == 'assistant' and '</think>' in c %}}"
            f"{{% set c = c.split('</think>')[-1] %}}{{{{ c }}}}{{% else %}}{content}{{% endif %}}"
        )
    reads = [key for key in (*THOUGHTS, "name", "note") if draw(st.booleans())]
    extra = "".join(f"{{{{ m.{key} if m.{key} else '' }}}}" for key in reads)
    calls = draw(
        st.sampled_from(
            [
                "",
                "{{ x.function.name }}",
                "{{ x.function.name }} {{ x.function.arguments | tojson }}",
                "{{ x.function.name + ' ' + x.function.arguments }}",
                "{{ x.function.name }}{% for k, v in x.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            ]
        )
    )
    calls = f"{{% for x in m.tool_calls or [] %}}{calls}{{% endfor %}}" if calls else ""
    said = f"{extra}{content}{calls}<|im_end|>"
    if draw(st.booleans()):
        said = f"{{% if m.role == 'assistant' %}}{{% generation %}}{said}{{% endgeneration %}}{{% else %}}{said}{{% endif %}}"
    start = draw(st.sampled_from(["", "{{ tools | tojson if tools }}", "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"]))  # fmt: skip
    start += draw(st.sampled_from(["", "{% for d in documents or [] %}{{ d.text }}{% endfor %}"]))
    skipped = draw(st.sampled_from(["nobody", "system", "developer", "tool"]))
    return (
        f"{start}{{% for m in messages if m.role != '{skipped}' %}}{{% set c = m.content %}}"
        f"<|im_start|>{{{{ m.role }}}}\n{said}\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def read(kind: Any, words: Words, template: str, **how: Any) -> tuple[Any, str]:
    """The first item or None, and what was said in warnings and the refusal."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger, item = logging.getLogger("burnish.data"), None
    logger.addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.jsonl")
            file.write_text(json.dumps(words.row) + "\n")
            item = kind(load_rows([str(file)]), char_tokenizer(template), DataConfig(), **how)[0]
    except UsageError as error:
        said.append(str(error))
    finally:
        logger.removeHandler(handler)
    return item, "\n".join(said)


@draws(100, deadline=None)
@given(rows(), templates())
def test_no_word_of_an_example_is_lost_without_a_name(words: Words, template: str) -> None:
    tokenizer = char_tokenizer(template)
    example, said = read(ExampleDataset, words, template, strict=True)
    if example is None:
        assert "row 0" in said
        return
    text = tokenizer.decode(example.token_ids)
    trained = tokenizer.decode(example.token_ids[example.loss_mask])
    for key, fate, word in words.placed:
        if fate == "about":
            assert f"'{key}'" not in said
        elif word not in text:
            named = "content" if key == "thoughts" else key
            assert f"'{key}'" in said or f"'{named}'" in said, (key, word)
            assert fate == "context" or key in (*THOUGHTS, "thoughts"), (key, word)
        else:
            assert (word in trained) == (fate == "trained"), (key, word)


@draws(60, deadline=None)
@given(rows(), templates())
def test_no_word_of_a_prompt_is_lost_without_a_name(words: Words, template: str) -> None:
    prompt, said = read(PromptDataset, words, template)
    if prompt is None:
        assert "row 0" in said
        return
    last = json.dumps(words.row["messages"][-1])
    targets = {"completion", "response", "chosen", "rejected"}
    for key, fate, word in words.placed:
        if fate != "about" and word not in last and key not in targets and word not in prompt.text:
            assert f"'{key}'" in said, (key, word)


EVERYTHING = (
    "{{ tools | tojson if tools }}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.reasoning_content if m.reasoning_content }}{{ m.reasoning if m.reasoning }}{{ m.thinking if m.thinking }}"
    "{{ m.content }}{% for x in m.tool_calls or [] %}{{ x.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.name if m.name }}{{ m.note if m.note }}{{ m.documents if m.documents }}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@draws(60, deadline=None)
@given(rows())
def test_a_template_that_writes_everything_refuses_nothing_and_says_nothing(words: Words) -> None:
    """Of columns, only those are named that it cannot have."""
    for column in COLUMNS:
        words.row.pop(column, None)
    if "tools" in words.row:
        words.row.pop("functions", None)
    example, said = read(ExampleDataset, words, EVERYTHING, strict=True)
    assert (example is not None, said) == (True, "")
