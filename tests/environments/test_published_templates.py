"""Chat templates as published: which are proven, what is trained on, and which calls are read back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.published_templates import ENDS, published_tokenizer
from support.models.tool_templates import MULTIPLY
from support.nightly import by_day, draws

from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig
from burnish.data.bridge_proof import compare_turns, prove_bridge
from burnish.data.template import ChatTemplate
from burnish.data.tool_calls import parse_turn
from burnish.data.tool_forms import FORMS
from burnish.data.turn_bridge import TurnBridge
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError
from burnish.methods.parts.conversations import Conversations
from burnish.records import Completion, Prompt, Request
from burnish.rollout.base import Sampling

TALKERS = Path(__file__).with_name("talkers.py")
ASKED = {"role": "user", "content": "What is 3 times 4?"}
NO_TOOLS, NO_CALLS = "no place for tools", "is not known"
VERDICTS: dict[str, tuple[str | None, str | None]] = {
    "apertus": (None, None),
    "bielik-3": (None, None),
    "cohere2-moe": (None, None),
    "command-a": (None, None),
    "command-r7b": (None, "START"),
    "deepseek-r1-0528": ("'<' in parts", "'<' in parts"),
    "deepseek-r1-distill": (NO_TOOLS, "'<think>' in parts"),
    "deepseek-v3-0324": (NO_TOOLS, None),
    "deepseek-v3.1": (NO_TOOLS, None),
    "deepseek-v3.2": ("'<think>' in parts", "'<think>' in parts"),
    "devstral": (None, None),
    "exaone-3.5": (NO_TOOLS, None),
    "exaone-4": (None, None),
    "falcon-h1": (NO_CALLS, None),
    "functionary-3.1": (None, None),
    "gemma-2": (NO_TOOLS, None),
    "gemma-3": (NO_TOOLS, None),
    "gemma-3n": (NO_TOOLS, None),
    "gemma-4": ("'<|channel>' in parts", "'<|channel>' in parts"),
    "gemma-4-e": ("'<|tool_response>' in the whole", None),
    "glm-4.5": (None, "'</think>' in the whole"),
    "glm-4.6": (None, "'</think>' in the whole"),
    "glm-4.7": (None, "'</think>' in the whole"),
    "gpt-oss": (None, "'<|end|>' in the whole"),
    "granite-3.3": (NO_CALLS, None),
    "granite-4": (None, None),
    "hermes-2-pro": (None, "refuses"),
    "hunyuan-3": (NO_CALLS, None),
    "internlm3": (NO_TOOLS, None),
    "jamba": (None, None),
    "kimi-k2": (None, None),
    "kimi-k2.5": (NO_CALLS, None),
    "lfm2": (None, None),
    "lfm2.5": (None, "'<think>' in parts"),
    "ling-3": (None, None),
    "llama-3": (NO_TOOLS, None),
    "llama-3.1": (None, None),
    "llama-3.2": (None, None),
    "llama-4": (None, None),
    "minicpm5": (None, "'<think>' in parts"),
    "minimax-m1": (None, None),
    "minimax-m2": (None, "'<think>' in parts"),
    "ministral-3": (None, None),
    "mistral-7b-v0.3": (None, None),
    "mistral-nemo": (None, None),
    "mistral-small-3.2": (None, None),
    "nemotron-3-nano": (None, "'</think>' in the whole"),
    "nemotron-nano-2": ("in parts", "in parts"),
    "phi-3.5": (NO_TOOLS, None),
    "phi-4": (NO_TOOLS, None),
    "qwen2.5": (None, None),
    "qwen3": ("'<think>' in parts", "'<think>' in parts"),
    "qwen3-coder": (None, None),
    "qwen3-instruct-2507": (None, None),
    "qwen3-next-thinking": ("'<think>' in parts", "'<think>' in parts"),
    "qwen3.5": (None, "'<think>' in parts"),
    "qwen3.8": (None, None),
    "qwq": ("'<think>' in parts", "'<think>' in parts"),
    "seed-oss": (None, None),
    "smollm3": (NO_TOOLS, None),
    "solar-open": (NO_CALLS, "'<|think|>' in parts"),
    "step-3.5": (None, "'<think>' in parts"),
    "yi-1.5": (NO_TOOLS, None),
}
"""By template: why tools may not answer, and why users may not; None: it is proven. A text is part of what the user reads.

Where a token is named, the template rewrites: "in the whole" is what it writes, "in parts" what was said or opened.
"""


@cache
def bridge_of(name, *, tools=True):
    tokenizer, ends = published_tokenizer(name)
    return TurnBridge(tokenizer, DataConfig(), [MULTIPLY] if tools else [], ends)


def verdict(name, role, *, rendered=False):
    """None if conversations are proven, else what the user reads of the difference."""
    try:
        prove_bridge(bridge_of(name, tools=role == "tool"), role, rendered=rendered)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "role"),
    by_day(
        [(name, role) for name in ENDS for role in ("tool", "user")],
        [("qwen2.5", "tool"), ("glm-4.6", "tool"), ("mistral-nemo", "tool"), ("qwq", "user")],
    ),
)
def test_templates_are_proven_or_refused_for_a_reason(name, role):
    why = VERDICTS[name][role == "user"]
    refused = verdict(name, role)
    assert (refused is None) == (why is None), refused
    assert why is None or why in refused, refused


NOT_RENDERED = {
    ("cohere2-moe", "tool"): "'<|START_THINKING|>'",
    ("cohere2-moe", "user"): "'<|START_THINKING|>'",
    ("deepseek-r1-0528", "tool"): "when it was read",
    ("gemma-4-e", "tool"): "'nothing' when",
    ("gpt-oss", "tool"): "<|channel|>",
    ("gpt-oss", "user"): "when it was read",
    ("hermes-2-pro", "user"): "refuses",
    ("kimi-k2.5", "user"): "'</think>' when",
    ("llama-4", "tool"): "'<|python_start|>' when",
    ("minicpm5", "tool"): "when it was read",
    ("nemotron-nano-2", "tool"): "'<SPECIAL_12>' when",
    ("seed-oss", "tool"): "when it was read",
    ("seed-oss", "user"): "'<seed:think>'",
    ("solar-open", "user"): "when it was read",
}
"""Templates whose turns are not read as they are written: thoughts or content between marks of their own."""


@pytest.mark.parametrize(
    ("name", "role"),
    by_day(
        [(name, role) for name in ENDS for role in ("tool", "user")],
        [("qwen3", "tool"), ("gpt-oss", "user")],
    ),
)
def test_turns_are_read_as_the_template_writes_them_or_refused(name, role):
    if role == "tool" and VERDICTS[name][0] in (NO_TOOLS, NO_CALLS):
        return
    why = NOT_RENDERED.get((name, role))
    refused = verdict(name, role, rendered=True)
    assert (refused is None) == (why is None), refused
    assert why is None or why in refused, refused


@pytest.mark.parametrize("name", by_day(["apertus", "glm-4.6", "lfm2.5"], ["apertus"]))
def test_the_mark_that_ends_a_turn_may_end_a_call(name):
    bridge = bridge_of(name)
    tokenizer, ends = published_tokenizer(name)
    calls = [called("multiply", {"a": 3, "b": "two\nlines"})]
    turn = {"role": "assistant", "content": "So:", "tool_calls": calls}
    shown = [ASKED, turn, {"role": "tool", "content": "6", "tool_call_id": "000000000"}]
    text = tokenizer.apply_chat_template(shown, tools=[MULTIPLY], tokenize=False)
    spoken = text[text.rindex("So:") :]
    marks = [(spoken.find(mark), mark) for mark in map(tokenizer.decode, ends) if mark in spoken]
    place, mark = min(marks)
    ids = tokenizer(spoken[: place + len(mark)], add_special_tokens=False)["input_ids"]
    read = bridge.read(ids)
    assert (read.content, read.thoughts, read.problem) == ("So:", "", None)
    assert read.calls == [("multiply", {"a": 3, "b": "two\nlines"})]


WITH_TOOLS = [name for name, (tool, _) in VERDICTS.items() if tool is None]
ONE_CALL = ("gpt-oss", "llama-3.1", "llama-3.2")
"""Templates that write one call a turn."""


def called(name, arguments, number=0):
    function = {"name": name, "arguments": arguments}
    return {"id": f"{number:09d}", "type": "function", "function": function}


NO_ORACLE = "the template writes an earlier turn otherwise than it opens a new one"


def spoken(name, messages, said):
    """What the model says for this turn: what transformers renders after the opening, and up to what ends it."""
    bridge = bridge_of(name)
    tokenizer, _ = published_tokenizer(name)
    render = tokenizer.apply_chat_template
    fitted = bridge._template.fitted([*messages, said])
    opened = render(fitted[:-1], tools=[MULTIPLY], tokenize=False, add_generation_prompt=True)
    whole = render(fitted, tools=[MULTIPLY], tokenize=False)
    if not whole.startswith(opened):
        pytest.skip(NO_ORACLE)
    text = whole[len(opened) :]
    marks = [mark for mark in ENDS[name].split() if mark in text]
    return text[: min(map(text.find, marks))] if marks else text


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
PLAIN = st.text("abc xyz,.äΩ", max_size=12).map(lambda text: f"t{text}t")
VALUES = st.one_of(st.integers(-99, 99), PLAIN, st.lists(st.integers(0, 9), max_size=3))
ARGUMENTS = st.dictionaries(st.sampled_from(["c", "d", "text"]), VALUES, max_size=3)
JSON_FORMS = (
    "Hermes",
    "Mistral",
    "Llama",
    "DeepSeek",
    "Kimi",
    "Functionary",
    "marked JSON",
    "harmony",
)
NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.parametrize("name", by_day(WITH_TOOLS, ["qwen2.5", "qwen3-coder", "kimi-k2"]))
@draws(60, day=4)
@given(st.data())
def test_calls_that_a_template_writes_are_read_back(name, data):
    bridge = bridge_of(name)
    tokenizer, ends = published_tokenizer(name)
    is_json = bridge._form.name in JSON_FORMS
    arguments = st.dictionaries(st.sampled_from(["c", "d"]), NESTED) if is_json else ARGUMENTS
    most = 1 if name in ONE_CALL else 3
    calls = data.draw(st.lists(arguments, min_size=1, max_size=most))
    said = {"role": "assistant", "content": "", "tool_calls": []}
    said["tool_calls"] = [called("multiply", each, i) for i, each in enumerate(calls)]
    text = spoken(name, [ASKED], said)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = "<|tools_suffix|>" if name == "apertus" else tokenizer.decode(ends[:1])
    ids += tokenizer(end, add_special_tokens=False)["input_ids"]
    turn = bridge.read(ids)
    assert turn.problem is None, text
    assert turn.calls == [("multiply", each) for each in calls]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@draws(300, day=20)
@given(st.data())
def test_any_text_is_read(form, data):
    pieces = st.one_of(
        TEXTS,
        st.sampled_from(
            [
                "<tool_call>", "</tool_call>", "<function=a>", "</function>", "<parameter=b>", "</parameter>",
                "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]",
                '{"name": "a", "arguments": {', '"b": [1e999, NaN, "\\ud800"]', "<|message|>", "to=functions.a",
                "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_start|>", "<|tool_call_end|>", "a(b=1)", "<|tool_call>",
                "<tool_call|>", "call:a", '<|"|>', '<invoke name="a">', "</invoke>", '<parameter name="b">', "<think>", "</think>",
            ]
        ),
    )  # fmt: skip
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    turn = parse_turn(text, form)
    for called_name, arguments in turn.calls:
        assert isinstance(called_name, str)
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("Hermes", "<tool_call>" * 20000),
        ("Hermes", "</tool_call>" * 20000 + "<tool_call>" * 20000),
        ("Qwen XML", "<tool_call><function=a><parameter=b>" * 20000),
        ("GLM", "<tool_call>a<arg_key>" * 20000),
        ("Kimi", "<|tool_calls_section_begin|>" + "<|tool_call_begin|>" * 20000),
        ("DeepSeek", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 20000),
        ("harmony", " to=functions.a" * 100_000),
        ("Gemma", "<|tool_call>call:a{b:" + "[" * 20000),
        ("Python", "<|tool_call_start|>[" + "a(" * 20000 + "<|tool_call_end|>"),
        ("elements", '<invoke name="a">' * 20000),
        ("Llama", '{"name": ' * 20000),
        ("Mistral", "[TOOL_CALLS]" * 20000),
        ("marked JSON", "<TOOLCALL>" * 20000),
        ("Hermes", '<tool_call>{"name": "a", "arguments": {"b": ' + "[" * 500 + "]" * 500 + "}}</tool_call>"),
    ],
)  # fmt: skip
def test_long_texts_without_an_end_are_read_in_one_pass(form, text):
    """A reader that looks for each end from each beginning would take hours."""
    (form,) = [each for each in FORMS if each.name == form]
    turn = parse_turn(text, form)
    assert turn.problem is not None
    assert turn.calls == []


def test_thousands_of_calls_are_read():
    (form,) = [each for each in FORMS if each.name == "Hermes"]
    call = '<tool_call>{"name": "a", "arguments": {"b": "</tool_call>"}}</tool_call>'
    turn = parse_turn(call * 5000, form)
    assert turn.problem is None
    assert turn.calls == [("a", {"b": "</tool_call>"})] * 5000


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "17", "17"),
        ("integer", "17", 17),
        ("boolean", "True", True),
        ("string", "true", "true"),
    ],
)
def test_schemas_say_what_is_meant_by_a_value_without_quotes(kind, text, value):
    schema = {"type": "object", "properties": {"a": {"type": kind}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    (form,) = [each for each in FORMS if each.name == "Qwen XML"]
    text = f"<tool_call><function=look><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert parse_turn(text, form, [tool]).calls == [("look", {"a": value})]


def test_a_response_template_of_the_tokenizer_reads_calls():
    """As the tokenizers of Qwen3 and others have it in transformers."""
    tokenizer, ends = published_tokenizer("qwen2.5")
    content = {"content": "json", "repeats": True}
    content |= {"transform": {"type": "function", "function": "{content}"}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", **content},
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    bridge = TurnBridge(tokenizer, DataConfig(), [MULTIPLY], ends)
    assert bridge.read(ends) == ("", "", [], None)
    text = 'I look.<tool_call>{"name": "multiply", "arguments": {"a": 3, "b": 4}}</tool_call>'
    turn = bridge.read([*tokenizer(text, add_special_tokens=False)["input_ids"], *ends])
    assert turn == ("I look.", "", [("multiply", {"a": 3, "b": 4})], None)
    cut = bridge.read(tokenizer(text[:-20], add_special_tokens=False)["input_ids"])
    assert cut.problem is not None

    tokenizer.response_template["fields"]["tool_calls"]["open"] = "<calls>"
    with pytest.raises(UsageError, match="response_template"):
        TurnBridge(tokenizer, DataConfig(), [MULTIPLY], ends)


@pytest.mark.parametrize("role", by_day(["tool", "user"], ["tool"]))
def test_a_response_template_proves_a_template_of_channels(role):
    """Without it, gpt-oss is refused (`NOT_RENDERED`)."""
    tokenizer, ends = published_tokenizer("gpt-oss")
    start = r"(?:<\|start\|>assistant)?"
    function = {"name": "{name}", "arguments": "{content}"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": start
                + r" to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary json<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": function},
            },
            "content": {
                "open_pattern": start + r"<\|channel\|>final<\|message\|>",
                "close_pattern": r"<\|(?:return|end)\|>",
                "content": "text",
            },
        },
    }
    tools = [MULTIPLY] if role == "tool" else []
    bridge = TurnBridge(tokenizer, DataConfig(), tools, ends)
    prove_bridge(bridge, role, rendered=True)
    assert all(compare_turns(bridge, role, each, rendered=True).turns for each in bridge.thoughts)


@pytest.mark.parametrize("name", by_day(WITH_TOOLS, ["qwen3-coder"]))
def test_marks_of_the_template_in_a_tools_answer_stay_text(name):
    bridge = bridge_of(name)
    tokenizer, ends = published_tokenizer(name)
    control = {*tokenizer.added_tokens_decoder}
    marks = "".join(map(str, tokenizer.added_tokens_decoder.values()))
    calls = [("multiply", {})]

    def heard(text):
        told = [{"role": "tool", "name": "multiply", "tool_call_id": "000000000", "content": text}]
        return bridge.following(calls, told, ended_by=ends[0])

    hostile = [f"a{marks}b", "qzjxsaid", "qzjxheard0e", f"{marks[:9]}\n{marks}" * 50]
    wanted = [each for each in heard("harmless") if each in control]
    for text in hostile:
        ids = heard(text)
        assert [each for each in ids if each in control] == wanted
        assert text in tokenizer.decode(ids) or json.dumps(text)[1:-1] in tokenizer.decode(ids)
    named = bridge.following(
        [(marks, {})], [{"role": "tool", "name": marks, "content": "a"}], ended_by=ends[0]
    )
    assert [each for each in named if each in control] == wanted


@pytest.mark.parametrize("name", by_day(WITH_TOOLS, ["mistral-nemo", "kimi-k2"]))
def test_an_answer_to_an_unreadable_call_has_a_place(name):
    bridge = bridge_of(name)
    tokenizer, ends = published_tokenizer(name)
    error = {"role": "tool", "content": "Error: the call cannot be read"}
    told = bridge.told([error], rendered=False)
    assert (told == [error]) == (name != "apertus")
    for ended_by in (ends[0], None):
        text = tokenizer.decode(bridge.following([], told, ended_by=ended_by))
        assert "the call cannot be read" in text
    said = {"role": "assistant", "content": "<what>"}
    told = bridge.told([error], rendered=True)
    text = tokenizer.decode(bridge.first([ASKED, said], "a test", foreign=told))
    assert "the call cannot be read" in text


MULTIPLIED = {"a": 3, "b": 4}, {"a": 3, "b": 5}


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", by_day(WITH_TOOLS, ["qwen2.5", "glm-4.6"]))
def test_what_is_trained_on_is_what_the_model_said(calculators, name, cut):
    """Two calls, their results, and an answer: against what transformers renders of the recorded messages."""
    bridge = TurnBridge(*_read_as(name, calculators))
    tokenizer, _ = published_tokenizer(name)
    tools = calculators.described.tools
    count = 1 if name in ONE_CALL else 2
    calling = {"role": "assistant", "content": ""}
    calling["tool_calls"] = [called("multiply", MULTIPLIED[i], i) for i in range(count)]
    results = [
        {"role": "tool", "name": "multiply", "tool_call_id": f"{i:09d}", "content": str(12 + 3 * i)}
        for i in range(count)
    ]
    answer = {"role": "assistant", "content": "It is 12."}
    template = ChatTemplate(tokenizer, {})

    def rendered(*messages, opens=False):
        fitted = template.fitted(messages)
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": opens}
        return tokenizer.apply_chat_template(fitted, **options)

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    thinks = rendered(ASKED, opens=True).rstrip().endswith("<think>")
    if thinks:  # a turn without thoughts is not one that this template opens
        for said in (calling, answer):
            said["reasoning_content"] = "Hm."
    so_far = [(ASKED,), (ASKED, calling, *results)]
    lines, expected = [], []
    for before, said in zip(so_far, (calling, answer), strict=True):
        opened = rendered(*before, opens=True)
        text = rendered(*before, said)
        if not text.startswith(opened):
            pytest.skip(NO_ORACLE)
        text = text[len(opened) :]
        found = [(place, mark) for mark in ENDS[name].split() if (place := text.find(mark)) >= 0]
        if found:
            text = text[: min(found)[0]] + min(found)[1]
        else:  # the next role's mark ends a turn
            follows = rendered(*before, said, *results, opens=True)[len(opened) + len(text) :]
            text += next(mark for mark in ENDS[name].split() if follows.startswith(mark))
        lines.append(ids_of(text))
        expected.append((len(ids_of(opened)), len(lines[-1])))
    if cut:
        lines[1] = lines[1][:-3]
        expected[1] = expected[1][0], len(lines[1])
    prompt = ids_of(rendered(ASKED, opens=True))
    most = expected[1][0] + expected[1][1] - len(prompt) if cut else 5000

    def generate(requests):
        (request,) = requests
        ids = np.array(lines[request.turn], np.int64)
        assert len(ids) <= request.max_tokens
        reason = "length" if cut and request.turn == 1 else "stop"
        numbers = -np.ones(len(ids), np.float32)
        return [[Completion(ids, numbers, numbers, reason, 0)]]

    ids = np.array(prompt, np.int64)
    asked = Prompt(0, ids, "", [ASKED], None, "", {})
    config = EnvironmentConfig(function=f"{TALKERS}:Calculator", timeout_seconds=60)
    play = Conversations(config, calculators, bridge).play
    request = Request(0, ids, prompt=asked)
    sampling = Sampling(most, seed=1, step=0)
    ((rollout,),) = play([asked], [request], sampling, generate, lambda: None)
    assert rollout.end == ("length" if cut else "done"), rollout.reward_error
    made = [*prompt, *rollout.completion.token_ids.tolist()]
    whole = ids_of(rendered(ASKED, calling, *results, answer))
    assert made[: len(whole)] == whole[: len(made)]
    trained = np.zeros(len(made), bool)
    for start, length in expected:
        trained[start : start + length] = True
    assert rollout.completion.drawn.tolist() == trained[len(prompt) :].tolist()


def _read_as(name, calculators):
    tokenizer, ends = published_tokenizer(name)
    return tokenizer, DataConfig(), [dict(each) for each in calculators.described.tools], ends


@pytest.fixture(scope="module")
def calculators():
    config = EnvironmentConfig(function=f"{TALKERS}:Calculator", workers=1, timeout_seconds=60)
    with EnvironmentPool(config) as pool:
        yield pool
