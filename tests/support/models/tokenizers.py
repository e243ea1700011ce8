"""Small tokenizers that tests make on the spot: one token per character, ChatML around turns."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders turn by turn, without generation marks."""

CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders the same text, with `{% generation %}` around what the assistant writes."""

SPECIAL = ("<unk>", "<eos>", "<|im_start|>", "<|im_end|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def char_tokenizer(
    chat_template: str | None = CHATML,
    eos_token: str | None = "<|im_end|>",
    pad_token: str | None = "<eos>",
) -> PreTrainedTokenizerFast:
    """A character-level tokenizer of 100 ids: `SPECIAL`, then `CHARACTERS`.

    `chat_template` None makes one without. The ids are dense, so a model's `vocab_size` may be
    `len(char_tokenizer())`.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token=eos_token,
        pad_token=pad_token,
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_char_tokenizer(path: Path, chat_template: str | None = CHATML) -> str:
    """Write `char_tokenizer` to a directory, as a model directory holds it; returns the path as text."""
    char_tokenizer(chat_template).save_pretrained(str(path))
    return str(path)
