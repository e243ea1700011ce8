"""Templates get content, arguments and thoughts in the form that they write. Oracle: `transformers` with rows in that form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.chat_templates import HARMONY, THINKING
from support.models.tokenizers import CHATML, char_tokenizer

from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.example_encoder import ExampleEncoder
from burnish.data.messages import messages_of
from burnish.data.template import ChatTemplate
from burnish.data.tokenizer import load_tokenizer, single_template
from burnish.errors import BurnishError, UsageError

OPEN, CLOSE = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "<|im_end|>\n{% endfor %}"
AS_IS = f"{OPEN}{{{{ m.content }}}}{CLOSE}"
PARTS_ONLY = f"{OPEN}{{% for part in m.content %}}{{{{ part.text + ';' }}}}{{% endfor %}}{CLOSE}"
BOTH = (
    f"{OPEN}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
    f"{{% for part in m.content %}}{{{{ part.text + ';' }}}}{{% endfor %}}{{% endif %}}{CLOSE}"
)
FIRST_PART = f"{OPEN}{{{{ m.content[0].text }}}}{CLOSE}"


def rendered(template: str, messages: list[dict[str, Any]], **how: Any) -> str:
    found = ChatTemplate(char_tokenizer(template), {})
    return str(found.render(messages_of(messages, "row 0"), "row 0", **how))


def plainly(template: str, messages: list[dict[str, Any]]) -> str:
    return str(char_tokenizer(template).apply_chat_template(messages, tokenize=False))


def said(*contents: Any) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(contents)
    ]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [CHATML, AS_IS])
def test_parts_are_joined_for_templates_that_write_text(template: str) -> None:
    """With a newline between them, as vLLM joins them."""
    found = rendered(template, said(parts("a", "b"), parts("c")))
    assert found == plainly(template, said("a\nb", "c"))


@pytest.mark.parametrize("template", [PARTS_ONLY, BOTH])
def test_parts_stay_where_the_template_writes_them(template: str) -> None:
    messages = said(parts("a", "b"), parts("c"))
    assert rendered(template, messages) == plainly(template, messages)


def test_text_becomes_a_part_where_the_template_takes_no_text() -> None:
    assert rendered(PARTS_ONLY, said("a", "b")) == plainly(PARTS_ONLY, said(parts("a"), parts("b")))
    assert rendered(FIRST_PART, said("a", parts("b", "c"))) == plainly(
        FIRST_PART, said(parts("a"), parts("b\nc"))
    )
    assert rendered(BOTH, said("a", "b")) == plainly(BOTH, said("a", "b"))


CALLS = "{% for c in m.tool_calls or [] %}"
AS_JSON = f"{CALLS}{{{{ c.function.name }}}} {{{{ c.function.arguments | tojson }}}}{{% endfor %}}"
AS_ITEMS = (
    f"{CALLS}{{{{ c.function.name }}}}{{% for k, v in c.function.arguments.items() %}}"
    "<{{ k }}>{{ v }}{% endfor %}{% endfor %}"
)
EITHER = (
    f"{CALLS}{{% set a = c.function.arguments %}}{{{{ c.function.name }}}} "
    "{{ a if a is string else a | tojson }}{% endfor %}"
)
JOINED = f"{CALLS}{{{{ c.function.name + ' ' + c.function.arguments }}}}{{% endfor %}}"
PRINTED = f"{CALLS}{{{{ c.function.name }}}} {{{{ c.function.arguments }}}}{{% endfor %}}"
ARGUMENTS = {"city": 'Bonn "am" Rhein', "days": [1, None]}


def calling(arguments: Any, *more: Any) -> list[dict[str, Any]]:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": each}}
        for each in (arguments, *more)
    ]
    return [*said("weather?"), {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize("form", [AS_JSON, AS_ITEMS, EITHER])
def test_arguments_are_decoded_for_templates_that_write_objects(form: str) -> None:
    template = AS_IS.replace(CLOSE, form + CLOSE)
    want = plainly(template, calling(ARGUMENTS, {}))
    assert rendered(template, calling(json.dumps(ARGUMENTS), "")) == want
    assert rendered(template, calling(ARGUMENTS, {})) == want


@pytest.mark.parametrize("form", [JOINED, PRINTED])
def test_arguments_are_text_for_templates_that_write_text(form: str) -> None:
    template = AS_IS.replace(CLOSE, form + CLOSE)
    want = plainly(template, calling(json.dumps(ARGUMENTS)))
    assert rendered(template, calling(ARGUMENTS)) == want
    assert rendered(template, calling(json.dumps(ARGUMENTS))) == want


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "thought"])
def test_thoughts_are_found_under_the_key_that_the_template_reads(key: str) -> None:
    messages = said("a", "b")
    messages[1][key] = "hm"
    want = said("a", "b")
    want[1]["thinking"] = "hm"
    assert rendered(HARMONY, messages) == plainly(HARMONY, want)
    both = [messages[0], messages[1] | {"thinking": "first"}]
    assert "first" in rendered(HARMONY, both)


def test_documents_reach_a_template_that_reads_them() -> None:
    template = "{% for d in documents or [] %}{{ d.text }};{% endfor %}" + CHATML
    encoder = ExampleEncoder(char_tokenizer(template))
    beside = {"documents": [{"text": "the source"}]}
    row = Conversation(said("a", "b"), "row 0", beside=beside)
    text = char_tokenizer().decode(encoder.conversations([row])[0][0])
    assert text.startswith("the source;")
    assert encoder.warnings == {}


def named(**templates: str) -> Any:
    tokenizer = char_tokenizer(None)
    tokenizer.chat_template = {name: f"{name}:{template}" for name, template in templates.items()}
    return tokenizer


TOOL = {"type": "function", "function": {"name": "look"}}


def test_one_of_several_templates_is_chosen_as_transformers_does() -> None:
    tokenizer = named(default=CHATML, tool_use="{{ tools[0].function.name }}" + CHATML, rag=CHATML)
    encoder = ExampleEncoder(tokenizer)
    rows = [Conversation(said("a", "b"), f"row {i}", tools=t) for i, t in enumerate([None, [TOOL]])]
    texts = [char_tokenizer().decode(ids) for ids, _ in encoder.conversations([*rows, rows[0]])]
    wanted = [
        tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=False) for row in rows
    ]
    assert texts == [*wanted, wanted[0]]
    assert wanted[1].startswith("tool_use:look")
    assert encoder.prompt(said("a"), "row 0", [TOOL]).startswith("tool_use:look")
    chosen = ExampleEncoder(tokenizer, DataConfig(chat_template_name="rag"))
    assert chosen.prompt(said("a"), "row 0", [TOOL]).startswith("rag:")


def test_the_only_named_template_is_used_and_others_have_to_be_named() -> None:
    assert single_template(named(rag=CHATML)).chat_template.startswith("rag:")
    assert single_template(named(rag=CHATML, default=CHATML)).chat_template.startswith("default:")
    assert single_template(char_tokenizer()).chat_template == CHATML
    for tokenizer, name in (
        (named(rag=CHATML, tool_use=CHATML), None),
        (named(rag=CHATML, default=CHATML), "tool_use"),
        (char_tokenizer(), "rag"),
        (char_tokenizer(None), "rag"),
    ):
        with pytest.raises(UsageError):
            single_template(tokenizer, name)
        with pytest.raises(UsageError):
            ExampleEncoder(tokenizer, DataConfig(chat_template_name=name))


def test_all_named_templates_stay_with_the_tokenizer(tmp_path: Path) -> None:
    named(rag=CHATML, tool_use=THINKING).save_pretrained(str(tmp_path))
    with pytest.raises(UsageError, match="rag, tool_use"):
        load_tokenizer(str(tmp_path))
    loaded = load_tokenizer(str(tmp_path), template_name="rag")
    loaded.save_pretrained(str(tmp_path / "again"))
    again = load_tokenizer(str(tmp_path / "again"), template_name="tool_use")
    assert set(again.chat_template) == {"rag", "tool_use"}


@pytest.mark.parametrize("template", [5, ["text"], [{"name": "a"}], {"a": 1}])
def test_templates_that_are_no_text_are_refused(tmp_path: Path, template: Any) -> None:
    char_tokenizer(None).save_pretrained(str(tmp_path))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    with pytest.raises(BurnishError):
        load_tokenizer(str(tmp_path))
