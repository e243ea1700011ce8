"""Chat templates as published, with the tokens that end a turn; and a tokenizer of bytes that knows the marks of one.

`published/README.md` says where each comes from.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("published")
ENDS = {
    "apertus": "<|assistant_end|> <|tools_suffix|>",
    "bielik-3": "<|im_end|>",
    "cohere2-moe": "<|END_OF_TURN_TOKEN|>",
    "command-a": "<|END_OF_TURN_TOKEN|>",
    "command-r7b": "<|END_OF_TURN_TOKEN|>",
    "deepseek-r1-0528": "<｜end▁of▁sentence｜>",
    "deepseek-r1-distill": "<｜end▁of▁sentence｜>",
    "deepseek-v3-0324": "<｜end▁of▁sentence｜>",
    "deepseek-v3.1": "<｜end▁of▁sentence｜>",
    "deepseek-v3.2": "<｜end▁of▁sentence｜>",
    "devstral": "</s>",
    "exaone-3.5": "[|endofturn|]",
    "exaone-4": "[|endofturn|]",
    "falcon-h1": "<|im_end|>",
    "functionary-3.1": "<|eot_id|> <|eom_id|>",
    "gemma-2": "<end_of_turn>",
    "gemma-3": "<end_of_turn>",
    "gemma-3n": "<end_of_turn>",
    "gemma-4": "<turn|> <|tool_response>",
    "gemma-4-e": "<turn|> <|tool_response>",
    "glm-4.5": "<|user|> <|observation|>",
    "glm-4.6": "<|user|> <|observation|>",
    "glm-4.7": "<|user|> <|observation|>",
    "gpt-oss": "<|return|> <|call|>",
    "granite-3.3": "<|end_of_text|>",
    "granite-4": "<|end_of_text|>",
    "hermes-2-pro": "<|im_end|>",
    "hunyuan-3": "<｜hy_eos:opensource｜>",
    "internlm3": "<|im_end|>",
    "jamba": "<|eom|>",
    "kimi-k2": "<|im_end|>",
    "kimi-k2.5": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "lfm2.5": "<|im_end|>",
    "ling-3": "<|role_end|>",
    "llama-3": "<|eot_id|>",
    "llama-3.1": "<|eot_id|> <|eom_id|>",
    "llama-3.2": "<|eot_id|> <|eom_id|>",
    "llama-4": "<|eot|> <|eom|>",
    "minicpm5": "<|im_end|>",
    "minimax-m1": "<end_of_sentence>",
    "minimax-m2": "[e~[",
    "ministral-3": "</s>",
    "mistral-7b-v0.3": "</s>",
    "mistral-nemo": "</s>",
    "mistral-small-3.2": "</s>",
    "nemotron-3-nano": "<|im_end|>",
    "nemotron-nano-2": "<SPECIAL_12>",
    "phi-3.5": "<|end|>",
    "phi-4": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3-coder": "<|im_end|>",
    "qwen3-instruct-2507": "<|im_end|>",
    "qwen3-next-thinking": "<|im_end|>",
    "qwen3.5": "<|im_end|>",
    "qwen3.8": "<|im_end|>",
    "qwq": "<|im_end|>",
    "seed-oss": "<seed:eos>",
    "smollm3": "<|im_end|>",
    "solar-open": "<|end|> <|calls|>",
    "step-3.5": "<|im_end|>",
    "yi-1.5": "<|im_end|>",
}
"""The tokens after which a model of the family stops, by the template's name."""
_MARK = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|?>|<[a-z_]{1,20}\|>|<｜[^｜]+｜>|\[/?[A-Z][A-Z_]+\]|</?s>|<bos>|<eos>|\]~!?b\]|\[e~\[|<seed:[a-z_:]+>|\[\|[a-z]+\|\]"
    r"|<(?:start|end)_of_turn>|<(?:beginning|end)_of_sentence>|<SPECIAL_\d+>"
)
"""A special token."""
_TAG = re.compile(r"</?(?:think|tool_call|tool_response|tool_calls|arg_key|arg_value|TOOLCALL)>")
"""A token that is added to a vocabulary, but is not special, so that it stays in the decoded text."""


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def published_tokenizer(name: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """One token per byte, and one for each mark of the template; and the ids that end a turn."""
    template = template_of(name)
    ends = ENDS[name].split()
    special = sorted({*_MARK.findall(template), *ends, "<s>", "</s>"})
    tags = sorted({*_TAG.findall(template)} - {*special})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=ends[0],
        pad_token=ends[0],
        clean_up_tokenization_spaces=False,
    )
    for texts, is_special in ((special, True), (tags, False)):
        tokens = [AddedToken(text, special=is_special, normalized=False) for text in texts]
        tokenizer.add_tokens(tokens, special_tokens=is_special)
    tokenizer.chat_template = template
    return tokenizer, tokenizer.convert_tokens_to_ids(ends)
