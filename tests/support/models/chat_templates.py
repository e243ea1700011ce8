"""Chat templates in the manner of well-known families, and the special tokens they are written in."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from support.models.tokenizers import char_tokenizer

LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + (m['content'] | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + (m['content'] | trim) + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system if m == users[-1] else '') + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
"""No generation prompt; the system message stands in the last question, so it moves as turns are added."""
THINKING = (
    "{% set asked = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m['content'] else '' %}"
    "{% if loop.index0 > asked.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Qwen3's: the prompt opens the thoughts, past turns have none."""
HYBRID = THINKING.replace(
    "{{ '<|im_start|>assistant\n<think>\n' }}",
    "{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
"""Qwen3's with a choice: without thoughts the prompt has them empty already."""
THOUGHTLESS = THINKING.replace("loop.index0 > asked.last", "false")
"""DeepSeek R1's: no turn has its thoughts, the last one neither, and yet the prompt opens them."""
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] }}"
    "{% if m['role'] == 'assistant' %}"
    "{% if loop.last and m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ '<|channel|>final<|message|>' + m['content'] + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{% else %}{{ '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""gpt-oss's: only the conversation's last turn ends with the token that ends a sequence, and has its thoughts."""

GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}"
    "{{ '<|' + ('observation' if m['role'] == 'tool' else m['role']) + '|>\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""GLM-4.5's: a turn ends where the next role's token stands."""
GLM_MARKED = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}"
    "{{ '<|' + ('observation' if m['role'] == 'tool' else m['role']) + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

ENDS = {
    GLM: "<|endoftext|>",
    GLM_MARKED: "<|endoftext|>",
    HARMONY: "<|return|>",
    LLAMA: "<|eot_id|>",
    GEMMA: "<end_of_turn>",
    MISTRAL: "</s>",
    THINKING: "<|im_end|>",
    HYBRID: "<|im_end|>",
    THOUGHTLESS: "<|im_end|>",
}
SPECIAL = (
    "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]",
)  # fmt: skip


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """One token per character and per special token; `<think>` is spelled, as it is for some models."""
    tokenizer = char_tokenizer(template)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.eos_token = ENDS[template]
    return tokenizer
