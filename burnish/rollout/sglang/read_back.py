"""Read back SGLang's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from burnish.rollout.inference_engine import joined_layer


def write_parameters(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write weights to files. SGLang's worker runs this as its weight loader.

    Each name is JSON: `name` in the checkpoint, `shapes` of the same module's tensors, and `path` to write to.
    """
    for told, _ in named_tensors:
        asked = json.loads(told)
        held = _held(model, asked["name"], asked["shapes"])
        if held is not None:
            save_file({"tensor": held.detach().cpu().contiguous()}, Path(asked["path"]))


def _held(model: Any, name: str, shapes: Mapping[str, Sequence[int]]) -> Tensor | None:
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
