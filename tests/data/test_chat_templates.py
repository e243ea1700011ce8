"""What is trained on of a conversation, by templates in the manner of well-known families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.models.chat_templates import (
    GEMMA,
    GLM,
    GLM_MARKED,
    HARMONY,
    HYBRID,
    LLAMA,
    MISTRAL,
    THINKING,
    THOUGHTLESS,
    tokenizer_of,
)

from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.example_encoder import ExampleEncoder
from burnish.errors import UsageError

SYSTEM = {"role": "system", "content": "s"}
THOUGHT = "<think>\nhm\n</think>\n\n"


def talk(*contents: str) -> list[dict[str, str]]:
    """Question, answer, question, ..."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def trained(
    template: str,
    messages: list[dict[str, Any]],
    trained_from: int = 0,
    eos: Sequence[str] = (),
    added: Sequence[str] = (),
) -> str:
    """The conversation as it is fed to the model, with what is trained on in braces."""
    tokenizer = tokenizer_of(template)
    row = Conversation(messages, "row 0", trained_from)
    eos_ids = tokenizer.convert_tokens_to_ids(list(eos))
    ids, mask = ExampleEncoder(tokenizer, eos_token_ids=eos_ids).conversations([row])[0]
    rendered = tokenizer.apply_chat_template(messages)["input_ids"]
    assert ids.tolist() == [*rendered, *tokenizer.convert_tokens_to_ids(list(added))]
    text, inside = "", False
    for token, now in zip(
        tokenizer.convert_ids_to_tokens(ids.tolist()), mask.tolist(), strict=True
    ):
        text += {(False, True): "{", (True, False): "}"}.get((inside, now), "") + token
        inside = now
    return text + ("}" if inside else "")


def test_llama() -> None:
    user, bot = (f"<|start_header_id|>{r}<|end_header_id|>\n\n" for r in ("user", "assistant"))
    assert trained(LLAMA, talk("a", " x ", "b", "y")) == (
        f"<|begin_of_text|>{user}a<|eot_id|>{bot}{{x<|eot_id|>}}{user}b<|eot_id|>{bot}{{y<|eot_id|>}}"
    )


def test_gemma() -> None:
    user, bot = "<start_of_turn>user\n", "<start_of_turn>model\n"
    assert trained(GEMMA, talk("a", "x", "b", "y")) == (
        f"<bos>{user}a<end_of_turn>\n{bot}{{x<end_of_turn>}}\n{user}b<end_of_turn>\n{bot}{{y<end_of_turn>}}\n"
    )
    with pytest.raises(UsageError, match="row 0"):
        trained(GEMMA, [SYSTEM, *talk("a", "x")])


def test_mistral() -> None:
    want = "<s>[INST] a[/INST]{ x</s>}[INST] b[/INST]{ y</s>}"
    assert trained(MISTRAL, talk("a", "x", "b", "y")) == want
    assert trained(MISTRAL, [SYSTEM, *talk("a", "x")]) == "<s>[INST] s\n\na[/INST]{ x</s>}"


def test_mistral_with_a_system_message_that_moves() -> None:
    """The first answer was given to another text than stands before it; the second may be trained on."""
    messages = [SYSTEM, *talk("a", "x", "b", "y")]
    with pytest.raises(UsageError, match="message 2 of row 0"):
        trained(MISTRAL, messages)
    text = trained(MISTRAL, messages, trained_from=4)
    assert text == "<s>[INST] a[/INST] x</s>[INST] s\n\nb[/INST]{ y</s>}"


@pytest.mark.parametrize("past", ["x", THOUGHT + "x", "<thin", "<", ""])
@pytest.mark.parametrize("thought", ["", "hm"])
def test_thoughts_are_trained_on_where_the_template_keeps_them(past: str, thought: str) -> None:
    """Content that begins like the thoughts' opening is content, although the prompt goes on alike."""
    answer = f"<think>\n{thought}\n</think>\n\ny" if thought else "y"
    user, bot, left = "<|im_start|>user\n", "<|im_start|>assistant\n", past.removeprefix(THOUGHT)
    assert trained(THINKING, talk("a", past, "b", answer)) == (
        f"{user}a<|im_end|>\n{bot}{{{left}<|im_end|>}}\n"
        f"{user}b<|im_end|>\n{bot}<think>\n{{{thought}\n</think>\n\ny<|im_end|>}}\n"
    )


def test_thoughts_that_the_prompt_opens_and_the_last_turn_lacks_are_refused() -> None:
    """What would be trained on is never asked of the model: its prompt is another."""
    with pytest.raises(UsageError, match="message 1 of row 0"):
        trained(THOUGHTLESS, talk("a", THOUGHT + "x"))
    text = trained(THOUGHTLESS, talk("a", THOUGHT + "x", "b"))
    assert text.endswith("<|im_start|>assistant\n{x<|im_end|>}\n<|im_start|>user\nb<|im_end|>\n")


def test_a_switch_of_thoughts_that_is_not_as_the_rows_is_named() -> None:
    rows = [Conversation(talk("a", "<think>\nhm\n</think>\n\nx"), "row 0")]
    off = ExampleEncoder(
        tokenizer_of(HYBRID), DataConfig(chat_template_kwargs={"enable_thinking": False})
    )
    with pytest.raises(UsageError, match=r"enable_thinking in data\.chat_template_kwargs"):
        off.conversations(rows)
    assert ExampleEncoder(tokenizer_of(HYBRID)).conversations(rows)[0][1].any()


@pytest.mark.parametrize("thoughts", [{}, {"thinking": "hm"}])
def test_a_past_turn_ends_with_its_own_token_before_the_next_message(
    thoughts: dict[str, str],
) -> None:
    """gpt-oss ends the last turn alone with its end of sequence; what the user says is never trained on."""
    messages = [each | thoughts for each in talk("a", "x", "b<|end|>", "y", "c")]
    user, bot = "<|start|>user<|message|>", "<|start|>assistant"
    past = f"{user}a<|end|>{bot}{{<|channel|>final<|message|>x<|end|>}}{user}b<|end|><|end|>{bot}{{"
    thought = f"<|channel|>analysis<|message|>hm<|end|>{bot}" if thoughts else ""
    assert trained(HARMONY, messages[:4]) == (
        f"{past}{thought}<|channel|>final<|message|>y<|return|>}}"
    )
    assert trained(HARMONY, messages) == (
        f"{past}<|channel|>final<|message|>y<|end|>}}{user}c<|end|>"
    )


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_the_next_role_s_token_is_trained_on_where_it_ends_completions(template: str) -> None:
    """Of GLM: a last turn gets the token that a template would write next. Other models' turns stay as they are."""
    eos = ("<|endoftext|>", "<|user|>", "<|observation|>")
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    asked = [*talk("a", "x", "b", "y"), {"role": "user", "content": "c"}]
    called = [*asked, {"role": "assistant", "content": "z"} | call]
    answered = [*called, {"role": "tool", "content": "r"}, *talk("", "w")[1:]]
    bot, start = "<|assistant|>\n", "[gMASK]<sop><|user|>\na<|assistant|>\n{x<|user|>}\nb"
    one, two = "<|user|>", "<|observation|>"
    tool = "z\n<tool_call>f</tool_call><|observation|>"
    assert trained(template, talk("a", "x", "b", "y"), 0, eos, [one]) == (
        f"{start}{bot}{{y<|user|>}}"
    )
    assert trained(template, asked, 0, eos) == f"{start}{bot}{{y<|user|>}}\nc"
    assert trained(template, called, 0, eos, [two]) == (
        f"{start}{bot}{{y<|user|>}}\nc{bot}{{{tool}}}"
    )
    assert trained(template, answered, 0, eos, [one]) == (
        f"{start}{bot}{{y<|user|>}}\nc{bot}{{{tool}}}\nr{bot}{{w<|user|>}}"
    )
    context = trained(template, talk("a", "x", "b", "y"), 3, eos, [one])
    assert context == f"{start.translate({123: None, 125: None})}{bot}{{y<|user|>}}"
    plain = trained(template, talk("a", "x", "b", "y"), 0, ["<|endoftext|>"])
    assert plain == f"{start.replace('<|user|>}', '}<|user|>')}{bot}{{y}}"
    for other, ends in ((LLAMA, ["<|eot_id|>", "<|end_header_id|>"]), (HARMONY, ["<|return|>"])):
        assert trained(other, asked, 0, ends) == trained(other, asked)


def test_the_next_role_s_token_is_no_part_of_turns_of_no_weight() -> None:
    messages = talk("a", "x", "b", "y")
    messages[3] |= {"weight": 0}
    text = trained(GLM, messages, 0, ["<|user|>"])
    assert text == "[gMASK]<sop><|user|>\na<|assistant|>\n{x<|user|>}\nb<|assistant|>\ny"
