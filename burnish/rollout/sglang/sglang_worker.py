"""Functions that run inside SGLang: draw tokens as the built-in generator does, and read back weights.

SGLang takes the largest logit and reports the log-softmax of a custom logit processor's result. This processor draws each row's
token and leaves three logits: 0 for the token, and in its two neighbours the sampled and raw log-probs, times 2^80. Beside 0 these
have no mass, so log-softmax changes no bit of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from burnish.records import Floats
from burnish.rollout.base import Sampling, not_finite
from burnish.rollout.builtin.sampling import Drawn
from burnish.rollout.inference_engine import draw_groups, draw_settings, joined_layer

# The key of the processor's arguments in `custom_params`.
_ARGUMENT = "burnish"
# Factor of log-probs, and what stands for a log-prob of 0. SGLang may replace -inf by -1e30, far below any scaled log-prob.
_SCALE = 2.0**80
_LEAST = 2.0**-70
TOP = 3
"""How many of the largest log-probs `read` needs."""


def custom_params(
    sampling: Sampling, key: int, drawn: int, room: int, stop: Sequence[int]
) -> dict[str, Any]:
    """Return SGLang's parameters for at most `room` tokens of a completion; ids of `stop` end it."""
    return {
        "temperature": 0.0,
        "max_new_tokens": room,
        "stop_token_ids": list(stop),
        "custom_params": {_ARGUMENT: [key, drawn, *draw_settings(sampling)]},
    }


class DrawingLogitProcessor(CustomLogitProcessor):
    """Draws a batch's tokens."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        """Draw a token for every row."""
        rows: dict[Sampling, list[int]] = {}
        numbers = []
        for row, params in enumerate(custom_param_list or ()):
            key, drawn, *settings = params[_ARGUMENT]
            rows.setdefault(Sampling(1, *settings), []).append(row)
            numbers.append((key, drawn + len(params["__req__"].output_ids)))
        keys, counts = torch.tensor(numbers, dtype=torch.int64).to(logits.device).unbind(-1)
        groups = [(sampling, torch.tensor(own).to(logits.device)) for sampling, own in rows.items()]
        draw_groups(logits, groups, keys, counts, _leave_three)
        return logits


def _leave_three(logits: Tensor, drawn: Drawn) -> None:
    """Leave three logits around each drawn token."""
    chosen = drawn.tokens[:, None]
    vocabulary = logits.shape[-1]
    logits.fill_(-torch.inf)
    for distance, logprobs in ((1, drawn.sampled_logprobs), (2, drawn.logprobs)):
        coded = logprobs[:, None].clamp(max=-_LEAST).nan_to_num(nan=-torch.inf) * _SCALE
        logits.scatter_(1, (chosen + distance) % vocabulary, coded)
    logits.scatter_(1, chosen, 0.0)


def read_top_logprobs(
    reported: Sequence[Sequence[tuple[float, int, Any]]], tokens: Sequence[int], vocabulary: int
) -> tuple[Floats, Floats]:
    """Return sampled and raw log-probs of `tokens` from SGLang's largest ones. Raises `BurnishError` for NaN."""
    table = np.zeros((len(tokens), 2), dtype=np.float32)
    for place, (token, largest) in enumerate(zip(tokens, reported, strict=False)):
        logprob_of = {number: logprob for logprob, number, _ in largest}
        for column in (0, 1):
            coded = logprob_of.get((token + column + 1) % vocabulary, -np.inf)
            if not coded > -1e30:
                raise not_finite()
            table[place, column] = coded / _SCALE if coded < -_LEAST * _SCALE else 0
    return table[:, 0], table[:, 1]


def write_parameters(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write weights to files. SGLang's worker runs this as its weight loader.

    Each name is JSON: `name` in the checkpoint, `shapes` of the same module's tensors, and `path` to write to.
    """
    for question, _ in named_tensors:
        fields = json.loads(question)
        parameter = _find_parameter(model, fields["name"], fields["shapes"])
        if parameter is not None:
            save_file({"tensor": parameter.detach().cpu().contiguous()}, Path(fields["path"]))


def _find_parameter(model: Any, name: str, shapes: Mapping[str, Sequence[int]]) -> Tensor | None:
    """Return a checkpoint's tensor, perhaps rows of a parameter; None if it cannot be found."""
    layer, _, kind = name.rpartition(".")
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    owner, parts = joined_layer(model, {each.rpartition(".")[0] for each in parameters}, layer)
    parameter = parameters.get(f"{owner}.{kind}")
    if parameter is None:
        return None
    if not parts:
        return parameter[: shapes[name][0]]  # SGLang pads vocabularies
    rows = [shapes[f"{part}.{kind}"][0] for part in parts]
    start = sum(rows[: parts.index(layer)])
    return parameter[start : start + shapes[name][0]] if len(parameter) == sum(rows) else None
