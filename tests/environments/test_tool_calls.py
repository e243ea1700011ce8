"""Reading the calls that a model wrote, against what chat templates write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.tokenizers import CHATML
from support.models.tool_templates import (
    BY_FORM,
    HARMONY_CALLS,
    MULTIPLY,
    calling_tokenizer,
)

from burnish.data.template import ChatTemplate
from burnish.data.tool_calls import form_of, parse_turn
from burnish.data.tool_forms import FORMS

CASES = [(name, template) for name, templates in BY_FORM.items() for template in templates]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "b", "text"]),
    st.one_of(
        st.integers(-99, 99), st.text("abc xyz,.{}[]\"'", max_size=12).map(lambda s: f"t{s}t")
    ),
    max_size=3,
)


@pytest.mark.parametrize(("name", "template"), CASES, ids=IDS)
def test_a_form_is_found_by_what_the_template_writes(name, template):
    form = form_of(ChatTemplate(calling_tokenizer(template), {}))
    assert form is not None
    assert form.name == name


def test_a_template_without_calls_has_no_form():
    assert form_of(ChatTemplate(calling_tokenizer(CHATML), {})) is None


@pytest.mark.parametrize(("name", "template"), CASES, ids=IDS)
@given(
    st.lists(st.tuples(st.sampled_from(["multiply", "look_up"]), ARGUMENTS), min_size=1, max_size=3)
)
def test_calls_that_a_template_writes_are_read_back(name, template, calls):
    tokenizer = calling_tokenizer(template)
    asked = {"role": "user", "content": "hello"}
    said = {
        "role": "assistant",
        "content": "" if name == "Llama" else "I look.",
        "tool_calls": [
            {"id": f"{i:09d}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ],
    }
    render = tokenizer.apply_chat_template
    before = render([asked], tools=[MULTIPLY], tokenize=False, add_generation_prompt=True)
    whole = render([asked, said], tools=[MULTIPLY], tokenize=False)
    text = whole.removeprefix(before).removesuffix("<|im_end|>\n")
    (form,) = [form for form in FORMS if form.name == name]
    turn = parse_turn(text, form)
    assert turn.problem is None
    assert turn.calls == calls
    assert turn.content == said["content"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Hermes", '<tool_call>{"name": "look", "arguments": {"a": 1}'),
        ("Hermes", "<tool_call>look</tool_call>"),
        ("Hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("Qwen XML", "<tool_call><function=look><parameter=a>1</function></tool_call>"),
        ("GLM", "<tool_call>look<arg_key>a</arg_key></tool_call>"),
        ("Mistral", '[TOOL_CALLS][{"name": "look"'),
        ("Llama", '{"name": "look", "parameters": '),
        (
            "DeepSeek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜>",
        ),
        ("Kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_problem(name, text):
    (form,) = [form for form in FORMS if form.name == name]
    assert parse_turn(text, form).problem is not None


def test_thoughts_are_no_content():
    (form,) = [form for form in FORMS if form.name == "Hermes"]
    said = '<think>\n<tool_call> perhaps\n</think>\n\nYes.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    turn = parse_turn(said, form)
    assert turn == ("Yes.", "<tool_call> perhaps", [("look", {})], None)


@pytest.mark.parametrize(
    "text",
    [
        ' to=functions.look<|channel|>commentary json<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": 1}',
        '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look<|message|>{"a": 1}<|call|>',
    ],
)
def test_calls_of_harmony_are_read(text):
    form = form_of(ChatTemplate(calling_tokenizer(HARMONY_CALLS), {}))
    assert form is not None
    assert form.name == "harmony"
    assert parse_turn(text, form).calls == [("look", {"a": 1})]
