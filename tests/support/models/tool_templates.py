"""Chat templates that write tool calls, in the manner of well-known families, and what each writes for two calls."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from support.models.tokenizers import char_tokenizer

_ARGUMENTS = "(call.function.arguments | tojson)"
_NAME = "call.function.name"


def _chatml(
    calls: str, results: str = "{{ '<|im_start|>tool\n' + m['content'] + '<|im_end|>\n' }}"
) -> str:
    """ChatML with tools in a system message; `calls` writes one call."""
    return (
        "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' + m['content'] }}"
        f"{{% for call in m.tool_calls or [] %}}{calls}{{% endfor %}}"
        "{{ '<|im_end|>\n' }}"
        f"{{% elif m['role'] == 'tool' %}}{results}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


HERMES = _chatml(
    f"{{{{ '\n<tool_call>\n{{\"name\": \"' + {_NAME} + '\", \"arguments\": ' + {_ARGUMENTS} + '}}\n</tool_call>' }}}}"
)
"""Qwen2.5's and Hermes's."""
HERMES_IN_USER = _chatml(
    f"{{{{ '\n<tool_call>\n{{\"name\": \"' + {_NAME} + '\", \"arguments\": ' + {_ARGUMENTS} + '}}\n</tool_call>' }}}}",
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}",
)
"""Qwen3's: the results of neighbouring calls share one user's turn."""
QWEN_XML = _chatml(
    f"{{{{ '\n<tool_call>\n<function=' + {_NAME} + '>\n' }}}}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
"""Qwen3-Coder's."""
GLM_CALLS = _chatml(
    f"{{{{ '\n<tool_call>' + {_NAME} + '\n' }}}}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\n' }}{% endfor %}"
    "{{ '</tool_call>' }}"
)
"""GLM-4.5's."""
MISTRAL_CALLS = _chatml(
    "{% if loop.first %}{{ '[TOOL_CALLS][' }}{% else %}{{ ', ' }}{% endif %}"
    f'{{{{ \'{{"name": "\' + {_NAME} + \'", "arguments": \' + {_ARGUMENTS} + \', "id": "\' + call.id + \'"}}\' }}}}'
    "{% if loop.last %}{{ ']' }}{% endif %}"
)
"""Mistral's up to version 7."""
MISTRAL_ARGS = _chatml(f"{{{{ '[TOOL_CALLS]' + {_NAME} + '[ARGS]' + {_ARGUMENTS} }}}}")
"""Mistral's since version 11."""
LLAMA_CALLS = _chatml(
    f"{{% if not loop.first %}}{{{{ '; ' }}}}{{% endif %}}{{{{ '{{\"name\": \"' + {_NAME} + '\", \"parameters\": ' + {_ARGUMENTS} + '}}' }}}}"
)
"""Llama 3's."""
DEEPSEEK = _chatml(
    "{% if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}"
    f"{{{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + {_NAME} + '\n```json\n' + {_ARGUMENTS} + '\n```<｜tool▁call▁end｜>' }}}}"
    "{% if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
)
"""DeepSeek V3's."""
DEEPSEEK_31 = _chatml(
    "{% if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}"
    f"{{{{ '<｜tool▁call▁begin｜>' + {_NAME} + '<｜tool▁sep｜>' + {_ARGUMENTS} + '<｜tool▁call▁end｜>' }}}}"
    "{% if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
)
"""DeepSeek V3.1's."""
KIMI = _chatml(
    "{% if loop.first %}{{ '<|tool_calls_section_begin|>' }}{% endif %}"
    f"{{{{ '<|tool_call_begin|>functions.' + {_NAME} + ':' + (loop.index0 | string) + '<|tool_call_argument_begin|>' + {_ARGUMENTS} + '<|tool_call_end|>' }}}}"
    "{% if loop.last %}{{ '<|tool_calls_section_end|>' }}{% endif %}"
)
"""Kimi K2's."""

HARMONY_CALLS = _chatml(
    f"{{{{ ' to=functions.' + {_NAME} + '<|channel|>commentary json<|message|>' + {_ARGUMENTS} + '<|call|>' }}}}"
)
"""gpt-oss's, which has one call a turn."""

BY_FORM = {
    "Hermes": (HERMES, HERMES_IN_USER),
    "Qwen XML": (QWEN_XML,),
    "GLM": (GLM_CALLS,),
    "Mistral": (MISTRAL_CALLS, MISTRAL_ARGS),
    "Llama": (LLAMA_CALLS,),
    "DeepSeek": (DEEPSEEK, DEEPSEEK_31),
    "Kimi": (KIMI,),
}
"""Templates by the name of the form that reads their calls."""

_SPECIAL = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip


def calling_tokenizer(template: str = HERMES) -> PreTrainedTokenizerFast:
    """One token per character, and one for each mark that families write around calls."""
    tokenizer = char_tokenizer(template)
    tokenizer.add_tokens(list(_SPECIAL), special_tokens=True)
    return tokenizer


MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
"""The schema of a tool."""
