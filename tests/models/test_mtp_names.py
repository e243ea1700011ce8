"""Which tensors of a checkpoint are a layer for multi-token prediction that can be trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.models.tiny import tiny_config

from burnish.boxes.tensor_reader import TensorInfo
from burnish.errors import IncompatibleError, UsageError
from burnish.models.meta_init import build_on_meta
from burnish.models.mtp_names import mtp_names
from burnish.models.names import tensor_specs

Stored = dict[str, TensorInfo]


def stored_in(family: str) -> tuple[Stored, int]:
    """A layer's tensors as DeepSeek-V3's files name them, and its number."""
    config = tiny_config(family)
    depth, width = config.num_hidden_layers, config.hidden_size
    shapes = {spec.name: spec.shape for spec in tensor_specs(build_on_meta(config))}
    own = f"model.layers.{depth}."
    last = f"model.layers.{depth - 1}."
    made = {n.replace(last, own): shape for n, shape in shapes.items() if n.startswith(last)}
    made |= {f"{own}{n}.weight": (width,) for n in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{own}eh_proj.weight"] = (width, 2 * width)
    made[f"{own}embed_tokens.weight"] = shapes["model.embed_tokens.weight"]
    return {name: TensorInfo(torch.bfloat16, shape) for name, shape in made.items()}, depth


def test_a_layer_is_found_with_what_it_repeats() -> None:
    stored, depth = stored_in("glm4_moe")
    names = mtp_names(stored, tiny_config("glm4_moe"))
    assert names.like == depth - 1
    assert names.of_layer(f"model.layers.{depth - 1}.mlp.gate.weight") in stored
    assert set(names.parts.values()) <= stored.keys()
    copy = f"model.layers.{depth}.embed_tokens.weight"
    assert names.copies == {copy: "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    "change",
    [
        lambda stored, own: stored.pop(f"{own}enorm.weight"),
        lambda stored, own: stored.pop(f"{own}mlp.gate.weight"),
        lambda stored, own: stored.update({f"{own}adapter.weight": TensorInfo(torch.float32, ())}),
        lambda stored, own: stored.update({"mtp.fc.weight": TensorInfo(torch.float32, (1, 2))}),
        lambda stored, own: stored.update(
            {f"{own}eh_proj.weight": TensorInfo(torch.float32, (2, 2))}
        ),
        lambda stored, own: stored.update(
            {n.replace(own, "model.layers.9."): each for n, each in [*stored.items()]}
        ),
    ],
    ids=["a norm less", "a router less", "one more", "two forms", "a shape", "two layers"],
)
def test_other_layers_are_refused(change: Callable[[Stored, str], object]) -> None:
    stored, depth = stored_in("glm4_moe")
    change(stored, f"model.layers.{depth}.")
    with pytest.raises(IncompatibleError, match=r"train_mtp=false"):
        mtp_names(stored, tiny_config("glm4_moe"))


def test_a_model_without_one_is_refused() -> None:
    with pytest.raises(UsageError, match="train_mtp"):
        mtp_names({}, tiny_config("qwen3"))
