import json
from types import SimpleNamespace

import pytest
from support.models.tokenizers import CHATML, CHATML_MARKED, char_tokenizer, save_char_tokenizer
from tokenizers import AddedToken
from transformers import GenerationConfig

from burnish.data.tokenizer import (
    completion_decoder,
    end_of_turn_id,
    eos_token_ids,
    has_generation_marks,
    load_tokenizer,
)
from burnish.errors import MissingError, UsageError

GEMMA = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
WRITES_EOS = "{% for m in messages %}{{ m['content'] + '<|im_end|>' + eos_token }}{% endfor %}"
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def saved(tmp_path, **options):
    char_tokenizer(**options).save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_a_complete_tokenizer_is_loaded_as_it_is_and_silently(tmp_path, caplog):
    tokenizer = load_tokenizer(save_char_tokenizer(tmp_path))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<eos>")
    assert tokenizer.chat_template == CHATML
    assert tokenizer.decode(tokenizer("Hi, 2 .\n")["input_ids"]) == "Hi, 2 .\n"
    assert not caplog.records


def test_a_missing_pad_token_becomes_eos_with_a_notice(tmp_path, caplog):
    tokenizer = load_tokenizer(saved(tmp_path, pad_token=None))
    assert tokenizer.pad_token == "<|im_end|>"
    assert "no pad token; padding with '<|im_end|>'" in caplog.text


def test_without_eos_the_unknown_token_pads(tmp_path, caplog):
    tokenizer = load_tokenizer(saved(tmp_path, chat_template=None, eos_token=None, pad_token=None))
    assert tokenizer.pad_token == "<unk>"
    assert "padding with '<unk>'" in caplog.text
    assert eos_token_ids(tokenizer) == ()


def test_nothing_to_pad_with_is_refused(tmp_path):
    tokenizer = char_tokenizer(chat_template=None, eos_token=None, pad_token=None)
    tokenizer.unk_token = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(UsageError):
        load_tokenizer(str(tmp_path))


def test_an_eos_that_turns_never_end_with_is_repaired(tmp_path, caplog):
    """As in gemma-2-it: eos is <eos>, turns end with another special token."""
    path = saved(tmp_path, chat_template=GEMMA, eos_token="<eos>")
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert "eos is set to '<|im_end|>'" in caplog.text
    assert [record.name for record in caplog.records] == ["burnish.data.tokenizer"]


def test_a_missing_eos_is_taken_from_the_template(tmp_path):
    assert load_tokenizer(saved(tmp_path, eos_token=None)).eos_token == "<|im_end|>"


def test_eos_stays_where_the_template_writes_it(tmp_path, caplog):
    tokenizer = load_tokenizer(saved(tmp_path, chat_template=WRITES_EOS, eos_token="<eos>"))
    assert tokenizer.eos_token == "<eos>"
    assert not caplog.records
    assert eos_token_ids(tokenizer) == (1, 3)


def test_eos_stays_where_it_follows_another_token_that_ends_a_turn(tmp_path, caplog):
    """Command R7B's turns end with two. A template of parts of content writes no text: nobody knows its end."""
    both = CHATML.replace("'<|im_end|>", "'<|im_end|><eos>")
    parts = CHATML.replace("message['content']", "(message['content'] | selectattr('text') | join)")
    for template in (both, parts, "<|im_start|>" + parts):
        char_tokenizer(template, eos_token="<eos>").save_pretrained(tmp_path)
        caplog.clear()
        assert load_tokenizer(str(tmp_path)).eos_token == "<eos>"
        assert caplog.text == ""


def test_eos_stays_where_turns_end_with_ordinary_text(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, chat_template=NO_END, eos_token="<eos>"))
    assert tokenizer.eos_token == "<eos>"
    assert end_of_turn_id(tokenizer) is None


def test_the_end_of_turn_is_found_through_a_template_that_wants_more():
    picky = "{{ raise_exception('system first') if messages[0]['role'] != 'system' }}"
    assert end_of_turn_id(char_tokenizer(picky)) is None
    assert end_of_turn_id(char_tokenizer(CHATML_MARKED)) == 3
    assert end_of_turn_id(char_tokenizer(None)) is None


@pytest.mark.parametrize(
    ("configs", "want"),
    [
        ((), (3,)),
        ((None,), (3,)),
        ((GenerationConfig(eos_token_id=[5, 1]),), (1, 3, 5)),
        ((GenerationConfig(eos_token_id=1), SimpleNamespace(eos_token_id=7)), (1, 3, 7)),
        ((SimpleNamespace(eos_token_id=None), SimpleNamespace()), (3,)),
    ],
)
def test_all_ids_that_end_a_completion(configs, want):
    assert eos_token_ids(char_tokenizer(), *configs) == want


def test_generation_marks_are_recognised():
    assert has_generation_marks(char_tokenizer(CHATML_MARKED))
    assert not has_generation_marks(char_tokenizer(CHATML))
    assert not has_generation_marks(char_tokenizer(None))
    assert has_generation_marks(char_tokenizer("{%- generation -%}x{%- endgeneration -%}"))


def test_a_template_from_a_file_replaces_the_tokenizers(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML_MARKED)
    tokenizer = load_tokenizer(save_char_tokenizer(tmp_path / "tok"), str(template))
    assert tokenizer.chat_template == CHATML_MARKED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}\n{{ m['role' }}\n{% endfor %}", r"chat\.jinja, line 2"),
        ("{{ messages['nothing'].more }}", "chat.jinja"),
        ("{{ raise_exception('no') }}", "chat.jinja"),
        ("{{ '\\ud800' }}", "chat.jinja"),
        ("\udcff", "chat.jinja"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(tmp_path, text, message):
    template = tmp_path / "chat.jinja"
    template.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=message):
        load_tokenizer(save_char_tokenizer(tmp_path / "tok"), str(template))


def test_a_missing_template_is_named(tmp_path):
    with pytest.raises(MissingError, match=r"nowhere\.jinja"):
        load_tokenizer(save_char_tokenizer(tmp_path), "nowhere.jinja")


def test_a_missing_directory_is_named():
    with pytest.raises(MissingError, match="some/model"):
        load_tokenizer("some/model")


@pytest.mark.parametrize("family", [None, "qwen3", "gpt2", "gemma2", "bert", "t5", "llama"])
def test_a_directory_without_a_tokenizer_is_named(tmp_path, family):
    """Of a model's configuration alone, transformers makes a tokenizer of special tokens."""
    if family is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(MissingError):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ['{"version": "1.0"', '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_named(tmp_path, text):
    path = save_char_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(MissingError):
        load_tokenizer(path)


def test_a_tokenizer_that_fails_at_its_first_text_is_named(tmp_path):
    path = save_char_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": "x"}))
    with pytest.raises(MissingError):
        load_tokenizer(path)


def test_code_in_the_directory_is_not_run_unasked(tmp_path):
    path = save_char_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "mine.MyTokenizer"]}
    config["tokenizer_class"] = "MyTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')\n")
    with pytest.raises(UsageError, match=r"trust_remote_code"):
        load_tokenizer(path)


ENDING = "</answer>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("7</answer>", "7</answer>"),
        ("<|im_start|>7</answer>", "7</answer>"),
        ("7</answer>\n", "7</answer>\n"),
        ("7<|im_end|>", "7"),
        ("", ""),
        ("</answer>", "</answer>"),
        ("7 8; ", "7 8; "),
    ],
)
def test_rewards_see_a_stop_text_that_is_a_special_token(text, shown):
    """Where it ends the completion; and no other special token."""
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([AddedToken(ENDING, special=True, normalized=False)])
    ids = tokenizer(text)["input_ids"]
    stops = [";", ENDING, f"{ENDING}\n", "<|im_end|>"]
    decode = completion_decoder(tokenizer, stops, [tokenizer.eos_token_id])
    assert decode(ids) == shown
    plain = completion_decoder(tokenizer, [";"], [tokenizer.eos_token_id])
    assert plain(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_stop_text_of_several_tokens_keeps_its_special_one():
    tokenizer = char_tokenizer()
    decode = completion_decoder(tokenizer, ["<|im_start|>user"], [])
    assert decode(tokenizer("<|im_start|>7<|im_start|>user")["input_ids"]) == "7<|im_start|>user"
