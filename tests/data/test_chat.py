import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.tokenizers import CHARACTERS, CHATML, CHATML_MARKED, char_tokenizer
from support.nightly import draws
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from burnish.config.constraints import _RENDERING
from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.example_encoder import ExampleEncoder, Text
from burnish.errors import UsageError

PLAIN = ExampleEncoder(char_tokenizer(CHATML))
MARKED = ExampleEncoder(char_tokenizer(CHATML_MARKED))

# What thinking models do: thoughts stay in the last turn only.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(hm)' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTING = "{{ messages | length }}" + CHATML
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
END_OUTSIDE = CHATML_MARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def user(text):
    return ("user", text)


def bot(text):
    return ("assistant", text)


def spelled(encoder, encoded):
    """The text with what is trained on in brackets."""
    tokens = char_tokenizer(None).convert_ids_to_tokens(encoded[0].tolist())
    text, inside = "", False
    for token, trained in zip(tokens, encoded[1].tolist(), strict=True):
        if trained != inside:
            text += "[" if trained else "]"
        text, inside = text + token, trained
    return text + ("]" if inside else "")


MULTI = chat(("system", "s"), user("a"), bot("one"), user("b"), bot("two"))


def test_what_is_no_variable_of_a_template_is_what_rendering_takes():
    """All that transformers takes beside the data for templates; `messages` is how it hands the conversation over."""
    takes = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    assert takes - {"self", "tools", "documents", "kwargs"} | {"messages"} == _RENDERING


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_every_assistant_turn_and_its_end_is_trained_on(encoder):
    encoded = encoder.conversations([Conversation(MULTI, "row 0")])[0]
    assert spelled(encoder, encoded) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n[one<|im_end|>]\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n[two<|im_end|>]\n"
    )
    assert encoded[0].dtype == np.int64
    assert encoded[1].dtype == np.bool_


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_turns_before_the_completion_are_context(encoder):
    row = Conversation(MULTI, "row 0", trained_from=3)
    text = spelled(encoder, encoder.conversations([row])[0])
    assert text.endswith(
        "assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>]\n"
    )
    assert text.count("[") == 1


def test_a_prompt_whose_thoughts_go_once_the_completion_follows_is_context():
    """With generation marks: the prompt alone still has its thoughts, as no user has spoken since."""
    later = "messages[loop.index:] | selectattr('role', 'equalto', 'user') | list"
    thought = f"{{{{ '' if {later} else '(hm)' }}}}"
    encoder = ExampleEncoder(
        char_tokenizer(CHATML_MARKED.replace("{% generation %}", f"{{% generation %}}{thought}"))
    )
    messages = chat(user("a"), bot("call"), ("tool", "r"), bot("x"), user("b"), bot("y"))
    text = spelled(encoder, encoder.conversations([Conversation(messages, "row 0", 3)])[0])
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\ncall<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n"
        "<|im_start|>assistant\n[x<|im_end|>]\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n[(hm)y<|im_end|>]\n"
    )


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_turns_of_no_weight_are_context(encoder):
    """As in OpenAI's format for fine-tuning."""
    turns = chat(user("a"), bot("x"), user("b"), bot("y"), user("c"), bot("z"))
    turns[1] |= {"weight": 0}
    turns[3] |= {"weight": 1}
    text = spelled(encoder, encoder.conversations([Conversation(turns, "row 0")])[0])
    assert "assistant\nx<|im_end|>\n" in text
    assert [each.partition("]")[0] for each in text.split("[")[1:]] == [
        "y<|im_end|>",
        "z<|im_end|>",
    ]


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_an_empty_answer_trains_on_its_end_alone(encoder):
    encoded = encoder.conversations([Conversation(chat(user("a"), bot("")), "row 0")])[0]
    assert spelled(encoder, encoded).endswith("assistant\n[<|im_end|>]\n")


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_two_assistant_turns_in_a_row_are_both_trained_on(encoder):
    row = Conversation(chat(user("a"), bot("x"), bot("y")), "row 0")
    text = spelled(encoder, encoder.conversations([row])[0])
    assert text.endswith("assistant\n[x<|im_end|>]\n<|im_start|>assistant\n[y<|im_end|>]\n")


@pytest.mark.parametrize("encoder", [PLAIN, MARKED])
def test_nothing_is_trained_on_without_an_assistant(encoder):
    assert not encoder.conversations([Conversation(chat(user("a")), "row 0")])[0][1].any()


TURN = st.tuples(st.text(CHARACTERS, max_size=6), st.text(CHARACTERS, max_size=6))


@draws(40)
@given(st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_differencing_agrees_with_generation_marks(chats, system):
    """The same rendering, masked in two ways; also with several rows at once."""
    start = [("system", "be brief")] if system else []
    rows = [
        Conversation(chat(*start, *[t for u, a in turns for t in (user(u), bot(a))]), f"row {i}")
        for i, turns in enumerate(chats)
    ]
    for one, other in zip(PLAIN.conversations(rows), MARKED.conversations(rows), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_tools_stand_where_the_template_puts_them_and_are_context(template):
    tokenizer = char_tokenizer(
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + template
    )
    encoder, messages = ExampleEncoder(tokenizer), chat(user("a"), bot("b"), user("c"), bot("d"))
    plain = encoder.conversations([Conversation(messages, "row 0", trained_from=2)])[0]
    given = encoder.conversations([Conversation(messages, "row 0", 2, [TOOL])])[0]
    assert spelled(encoder, given) == "look;" + spelled(encoder, plain)
    assert encoder.prompt(messages[:1], "row 0", [TOOL]) == "look;" + encoder.prompt(
        messages[:1], "row 0"
    )
    own = ExampleEncoder(tokenizer, DataConfig(chat_template_kwargs={"tools": [TOOL, TOOL]}))
    assert own.prompt(messages[:1], "row 0").startswith("look;look;<")
    assert own.prompt(messages[:1], "row 0", [TOOL]).startswith("look;<")


def test_an_end_of_turn_outside_the_marks_is_trained_on_too():
    encoder = ExampleEncoder(char_tokenizer(END_OUTSIDE))
    encoded = encoder.conversations([Conversation(chat(user("a"), bot("x")), "row 0")])[0]
    assert spelled(encoder, encoded).endswith("assistant\n[x<|im_end|>]\n")


def test_without_an_end_token_the_whole_turn_is_trained_on():
    encoder = ExampleEncoder(char_tokenizer(NO_END, eos_token="<eos>"))
    row = Conversation(chat(user("a"), bot("x"), user("b"), bot("y")), "row 0")
    text = spelled(encoder, encoder.conversations([row])[0])
    assert text == "user: a\nassistant: [x\n]user: b\nassistant: [y\n]"


def test_a_template_that_forgets_thoughts_is_masked_as_it_renders():
    encoder = ExampleEncoder(char_tokenizer(FORGETFUL))
    row = Conversation(chat(user("a"), bot("x"), user("b"), bot("y")), "row 0")
    text = spelled(encoder, encoder.conversations([row])[0])
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[x<|im_end|>]\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n[(hm)y<|im_end|>]\n"
    )


def test_a_template_that_is_not_prefix_stable_is_refused():
    encoder = ExampleEncoder(char_tokenizer(COUNTING))
    rows = [
        Conversation(chat(user("a")), "row 6"),
        Conversation(chat(user("a"), bot("x")), "row 7"),
    ]
    with pytest.raises(UsageError, match="message 1 of row 7") as caught:
        encoder.conversations(rows)
    assert "'2<|im_start|>" in str(caught.value.have)
    assert "'1<|im_start|>" in str(caught.value.want)


def test_a_template_that_rewrites_a_turn_without_an_end_token_is_refused():
    template = NO_END.replace("m['content']", "(m['content'] if loop.last else '...')")
    encoder = ExampleEncoder(char_tokenizer(template, eos_token="<eos>"))
    row = Conversation(chat(user("a"), bot("x"), user("b"), bot("y")), "row 0")
    with pytest.raises(UsageError, match="message 1 of row 0"):
        encoder.conversations([row])


def test_a_conversation_that_the_assistant_begins_is_refused():
    row = Conversation(chat(bot("x")), "row 4")
    with pytest.raises(UsageError, match="row 4"):
        PLAIN.conversations([row])
    assert spelled(MARKED, MARKED.conversations([row])[0]).endswith("[x<|im_end|>]\n")


def test_what_the_template_refuses_is_named():
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + CHATML
    )
    encoder = ExampleEncoder(char_tokenizer(template))
    with pytest.raises(UsageError, match="row 3") as caught:
        encoder.conversations([Conversation(MULTI, "row 3")])
    assert "system, user, assistant, user, assistant" in caught.value.have


def test_a_conversation_needs_a_chat_template():
    with pytest.raises(UsageError, match=r"model\.chat_template"):
        ExampleEncoder(char_tokenizer(None)).conversations([Conversation(MULTI, "row 0")])


def test_prompts_are_open_for_the_assistant():
    assert (
        PLAIN.prompt(chat(user("a")), "row 0")
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    begun = PLAIN.prompt(chat(user("a"), bot("Sure")), "row 0")
    assert begun == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nSure"


def test_a_completion_and_its_end_are_trained_on():
    encoded = PLAIN.texts([Text("2", "1+1="), Text("", "a"), Text("x<|im_end|>", "b")])
    assert [spelled(PLAIN, e) for e in encoded] == [
        "1+1=[2<|im_end|>]",
        "a[<|im_end|>]",
        "b[x<|im_end|>]",
    ]


def test_an_empty_completion_of_a_prompt_that_ends_like_one_is_closed():
    assert spelled(PLAIN, PLAIN.texts([Text("", "a<|im_end|>")])[0]) == "a<|im_end|>[<|im_end|>]"


def test_plain_text_trains_on_all_but_its_first_token():
    encoded = PLAIN.texts([Text("abc"), Text("")])
    assert [spelled(PLAIN, e) for e in encoded] == ["a[bc<|im_end|>]", "<|im_end|>"]


def test_without_an_eos_nothing_is_appended():
    encoder = ExampleEncoder(char_tokenizer(None, eos_token=None))
    assert spelled(encoder, encoder.texts([Text("b", "a")])[0]) == "a[b]"


def bpe_tokenizer(template=None, post=None):
    """A byte-level BPE trained here, which merges across boundaries: newlines in pairs, "ab"."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["\n\n", "ab"] * 50, trainer)
    if post:
        backend.post_processor = processors.TemplateProcessing(
            single=post, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def trained_text(tokenizer, encoded):
    return tokenizer.decode(encoded[0][encoded[1]])


def test_a_prompt_keeps_the_ids_it_has_alone_where_tokens_would_merge():
    tokenizer = bpe_tokenizer()
    assert len(tokenizer("ab")["input_ids"]) == 1
    ids, mask = ExampleEncoder(tokenizer).texts([Text("b", "a")])[0]
    assert ids.tolist() == [*tokenizer("a")["input_ids"], *tokenizer("b")["input_ids"], 1]
    assert mask.tolist() == [False, True, True]


def test_a_token_merged_with_the_start_of_an_answer_is_trained_on():
    tokenizer = bpe_tokenizer(CHATML)
    row = Conversation(chat(user("q"), bot("\nab")), "row 0")
    encoded = ExampleEncoder(tokenizer).conversations([row])[0]
    whole = tokenizer.apply_chat_template(row.messages)["input_ids"]
    assert encoded[0].tolist() == whole
    assert trained_text(tokenizer, encoded) == "\n\nab<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, END_OUTSIDE])
def test_a_last_character_of_several_tokens_is_trained_on_with_the_end(template):
    """`transformers` marks only its first byte."""
    encoder = ExampleEncoder(tokenizer := bpe_tokenizer(template))
    row = Conversation(chat(user("\U0001f600"), bot("ab\U0001f600")), "row 0")
    encoded = encoder.conversations([row])[0]
    assert trained_text(tokenizer, encoded) == "ab\U0001f600<|im_end|>"


def test_a_special_token_at_the_start_stays_and_one_at_the_end_is_not_part_of_a_prompt():
    tokenizer = bpe_tokenizer(post="<s> $A </s>")
    encoder = ExampleEncoder(tokenizer)
    assert encoder.ids(["a"], special=True)[0] == tokenizer("a")["input_ids"][:-1]
    ids, mask = encoder.texts([Text("ab", "q ")])[0]
    assert tokenizer.decode(ids) == "<s>q ab</s>"
    assert tokenizer.decode(ids[mask]) == "ab</s>"
    assert encoder.texts([Text("ab")])[0][1].tolist() == [False, True, True]


@pytest.mark.parametrize("text", ["<s>q ab", "<s>"])
def test_a_text_that_has_the_beginning_of_sequence_gets_no_second_one(text):
    """As texts that a chat template has rendered."""
    tokenizer = bpe_tokenizer(post="<s> $A")
    encoder = ExampleEncoder(tokenizer)
    assert encoder.ids(["q "], special=True)[0] == tokenizer("q ")["input_ids"]
    assert not encoder.warnings
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoder.ids([text], special=True)[0] == whole
    assert len(encoder.warnings) == 1
    for row in (Text(text), Text("ab", text)):
        assert tokenizer.decode(encoder.texts([row])[0][0]) == f"{row.prompt}{row.text}</s>"


def test_one_id_that_begins_and_ends_texts_takes_nothing_away():
    tokenizer = char_tokenizer(None, eos_token="<eos>")
    tokenizer.bos_token = "<eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    encoder = ExampleEncoder(tokenizer)
    assert tokenizer.decode(encoder.ids(["2+3="], special=True)[0]) == "<eos>2+3="
    ids, mask = encoder.texts([Text("5", "2+3=")])[0]
    assert (tokenizer.decode(ids), tokenizer.decode(ids[mask])) == ("<eos>2+3=5<eos>", "5<eos>")


def test_no_space_comes_between_a_prompt_and_what_follows():
    """With a tokenizer that puts one before what begins, as Llama 2's."""
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"])
    words.train_from_iterator(["Answer: 42\nQuestion: 3 + 4?\nAnswer: 7"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    encoder = ExampleEncoder(tokenizer)
    for prompt, text in (("Answer: ", "42"), ("Answer:", " 42"), ("Answer: 4", "2")):
        ids, mask = encoder.texts([Text(text, prompt)])[0]
        assert tokenizer.decode(ids[:-1]) == prompt + text
        assert ids[~mask].tolist() == encoder.ids([prompt], special=True)[0]
