"""Show a row of the data as the model will see it, and propose lengths, for `burnish init`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.cli.plan import devices_of, fit
from burnish.config.load import load_settings
from burnish.config.schema import DataConfig
from burnish.data.sources import load_rows
from burnish.launch.elastic import planner_of
from burnish.method import Method
from burnish.records import Example, Prompt
from burnish.runs.setup import lay_foundation

_ROWS = 512
"""How many rows are tokenized."""
_LEAST = 64
"""The shortest limit that is proposed."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What is printed of the rows, and the lines of the configuration that their lengths suggest."""

    text: str
    proposed: str


def first_look(method: Method, settings: Mapping[str, Any]) -> FirstLook:
    """Tokenize the first rows as a run with these settings does. Raises the errors that the run would raise."""
    config = load_settings(settings, {})
    foundation = lay_foundation(config)
    proposed = ""
    if foundation.tokenizer.chat_template is not None and _are_strings(method, config.data):
        data = config.data.model_copy(update={"string_prompts": "user"})
        foundation = replace(foundation, config=config.model_copy(update={"data": data}))
        proposed = "  string_prompts: user    # the chat template for prompts that are strings\n"
    dataset = method.dataset(foundation, config.data.train, "data.train", first=_ROWS)
    item = dataset[0]
    if isinstance(item, Prompt):
        tokens = list(item.token_ids)
        trained = [False] * len(tokens)
        legend = "The first prompt as the model sees it; it writes on from there:"
        name = "max_prompt_length"
    else:
        example = item if isinstance(item, Example) else item[0]
        tokens = list(example.token_ids)
        trained = [bool(each) for each in example.loss_mask]
        legend = f"The first row as the model sees it; it learns to write the {sum(trained)} tokens in colour, or between › and ‹:"
        name = "max_length"
    longest = int(dataset.lengths.max())
    limit = min(_rounded(longest), _positions(foundation.hf_config))
    sizes = f"{len(dataset)} rows were tokenized: {np.mean(dataset.lengths):.0f} tokens on average, at most {longest}."
    shown = _coloured(foundation.tokenizer, tokens, trained)
    plan_for = partial(planner_of, foundation.config, method)
    plans = dict(fit(plan_for, devices_of(None), dataset.lengths.tolist()))
    plan = plans.get("as rows are", "").partition(";")
    sizes += (
        f"\nEstimated: {plan[0]} of memory, {plan[2].split(';')[0].strip()}." if plan[2] else ""
    )
    return FirstLook(f"{legend}\n\n{shown}\n\n{sizes}", f"{proposed}  {name}: {limit}\n")


def _are_strings(method: Method, data: DataConfig) -> bool:
    """Return whether the first row's prompt is a string, to which no template applies by itself."""
    rows = load_rows(data.train)
    return isinstance(method.prompt_of(rows, data), str)


def _rounded(length: int) -> int:
    """Return a limit with room for rows that are half as long again: a power of two."""
    return max(_LEAST, 1 << (length * 3 // 2 - 1).bit_length())


def _positions(hf_config: PretrainedConfig) -> int:
    return int(getattr(hf_config, "max_position_embeddings", None) or 1 << 30)


def _coloured(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], trained: Sequence[bool]
) -> str:
    """Return the text, trained tokens in green on a terminal, else between › and ‹."""
    console = Console(highlight=False)
    parts = Text()
    for is_trained, group in groupby(zip(tokens, trained, strict=True), key=lambda each: each[1]):
        text = tokenizer.decode([token for token, _ in group])
        marked = is_trained and not console.is_terminal
        parts.append(f"›{text}‹" if marked else text, style="bold green" if is_trained else "dim")
    with console.capture() as captured:
        console.print(parts, soft_wrap=True)
    return captured.get().rstrip("\n")
