"""Read back SGLang's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from burnish.rollout.inference_engine import JOINED


def write_parameters(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write tensors to files. SGLang's worker runs this in place of a loader of weights.

    Each name is JSON: `name` in the checkpoint, `shapes` in the same module, and `path`.
    """
    parameters = dict(model.named_parameters())
    joined = {**JOINED, **getattr(model, "packed_modules_mapping", {})}
    for told, _ in named_tensors:
        asked = json.loads(told)
        held = _held(parameters, joined, asked["name"], asked["shapes"])
        if held is not None:
            save_file({"tensor": held.detach().cpu().contiguous()}, Path(asked["path"]))


def _held(
    parameters: Mapping[str, Tensor],
    joined: Mapping[str, Sequence[str]],
    name: str,
    shapes: Mapping[str, Sequence[int]],
) -> Tensor | None:
    """Return a checkpoint's tensor, perhaps rows of a parameter; None if that cannot be told."""
    if name in parameters:
        return parameters[name][: shapes[name][0]]  # SGLang makes vocabularies longer
    owner, _, kind = name.rpartition(".")
    parent, _, last = owner.rpartition(".")
    for one, parts in joined.items():
        parameter = parameters.get(f"{parent}.{one}.{kind}")
        if last in parts and parameter is not None:
            rows = [shapes[f"{parent}.{part}.{kind}"][0] for part in parts]
            start = sum(rows[: parts.index(last)])
            if len(parameter) == sum(rows):
                return parameter[start : start + shapes[name][0]]
    return None
