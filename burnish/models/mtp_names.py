"""The layer for multi-token prediction (MTP) in a checkpoint: which of its tensors is what. transformers' models lack it.

arXiv 2412.19437, section 2.2: such a layer joins a hidden state with the embedding of the next token, and predicts the one behind that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, UsageError, few
from burnish.models.composite import mtp_layers
from burnish.models.language_model import Composite
from burnish.models.meta_init import build_on_meta
from burnish.models.names import tensor_specs, tied_names

_log = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kind of checkpoint names the parts; `{depth}` stands for the number of decoder layers."""

    prefix: str
    inside: str
    """What precedes the names of its decoder layer, behind `prefix`."""
    of_embedding: str
    of_hidden: str
    joins: str
    norm: str
    copies: Mapping[str, str]
    """Names of what the model has, too, with the names there."""


_FORMS = (
    _Form(  # DeepSeek-V3, GLM-4.5
        "model.layers.{depth}.",
        "",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        {"embed_tokens.weight": _EMBEDDING, "shared_head.head.weight": _HEAD},
    ),
    _Form(  # Qwen3-Next, Qwen3.5
        "mtp.",
        "layers.0.",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "fc.weight",
        "norm.weight",
        {},
    ),
)


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The names of an MTP layer's tensors."""

    like: int
    """The decoder layer of the model, from 0, that its own has the kind of: the last one with attention."""
    inside: str
    """What precedes the names of its decoder layer's tensors, as `model.layers.N.` does in the model."""
    parts: Mapping[str, str]
    """The tensors around that layer, by `enorm`, `hnorm` (norms of embedding and hidden state), `eh_proj` (what joins both) and `norm`."""
    copies: Mapping[str, str]
    """Names under which the files repeat tensors of the model, with their names there."""

    def of_layer(self, name: str) -> str:
        """Return the name of the tensor that is called `name` in the decoder layer `like`."""
        return self.inside + name.removeprefix(f"model.layers.{self.like}.")


def trained_layer(
    composite: Composite | None, hf_config: PretrainedConfig, layout: Layout
) -> tuple[MTPNames, Composite | None]:
    """Return the MTP layer of a model that is to be trained, and what else lies around it in its checkpoint.

    `composite` is all that lies around it. Warns of tensors that the layer repeats with other values. Raises as `mtp_names` does.
    """
    stored = {} if composite is None else mtp_layers(composite.rest, hf_config)
    names = mtp_names(stored, hf_config)
    assert composite is not None
    if layout.is_main:
        _warn_of_other_copies(composite, names)
    rest = {name: each for name, each in composite.rest.items() if name not in stored}
    return names, replace(composite, rest=rest) if rest or composite.names else None


def _warn_of_other_copies(composite: Composite, names: MTPNames) -> None:
    with DirectoryReader(composite.directory) as reader:
        there = {copy: composite.names.get(of, of) for copy, of in names.copies.items()}
        for copy, of in there.items():
            if of in reader.tensors and not reader.same(copy, of):
                message = "%s differs from %s in %s: the model's own is trained and saved as both"
                _log.warning(message, copy, of, composite.directory)


def mtp_names(stored: Mapping[str, TensorInfo], hf_config: PretrainedConfig) -> MTPNames:
    """Return the names of the one MTP layer, whose tensors are `stored`, of the model `hf_config`.

    Raises `UsageError` if there is none, and `IncompatibleError` for several or for one that is built otherwise.
    """
    if not stored:
        raise UsageError(
            "model.train_mtp is set, and the model has no layer for multi-token prediction",
            have="no tensor of such a layer beside the model",
            want="a checkpoint with one, as published ones of DeepSeek-V3, GLM-4.5 and Qwen3-Next",
            do="remove model.train_mtp",
        )
    model = build_on_meta(hf_config)
    shapes = {spec.name: spec.shape for spec in tensor_specs(model)}
    same = {_HEAD: _HEAD} | tied_names(model)
    forms = [*_forms_of(stored, shapes, same, hf_config)]
    wrong = {
        name
        for _, wanted in forms
        for name in wanted.keys() | stored.keys()
        if name not in wanted or name not in stored or stored[name].shape != wanted[name]
    }
    if len(forms) != 1 or wrong:
        raise IncompatibleError(
            "this checkpoint's layers for multi-token prediction cannot be trained",
            have=few(sorted(wrong or stored)),
            want="one layer, with the tensors of the model's last layer with attention and the names of DeepSeek-V3's or Qwen3-Next's",
            do="set model.train_mtp=false: every step then keeps these tensors as they are",
        )
    return forms[0][0]


def _forms_of(
    stored: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    same: Mapping[str, str],
    hf_config: PretrainedConfig,
) -> Iterator[tuple[MTPNames, dict[str, tuple[int, ...]]]]:
    """Yield each form that the stored tensors may have, with the shapes of all that it wants."""
    layers = (name.split(".") for name in shapes if ".self_attn." in name)
    like = max(int(parts[2]) for parts in layers)
    own = f"model.layers.{like}."
    width = shapes[_EMBEDDING][1]
    for form in _FORMS:
        prefix = form.prefix.format(depth=hf_config.num_hidden_layers)
        if prefix + form.joins not in stored:
            continue
        copies = {prefix + copy: same.get(of, of) for copy, of in form.copies.items()}
        copies = {copy: of for copy, of in copies.items() if copy in stored}
        parts = {"enorm": form.of_embedding, "hnorm": form.of_hidden}
        parts |= {"eh_proj": form.joins, "norm": form.norm}
        names = MTPNames(
            like,
            prefix + form.inside,
            {part: prefix + name for part, name in parts.items()},
            copies,
        )
        wanted = {names.of_layer(n): shape for n, shape in shapes.items() if n.startswith(own)}
        wanted |= dict.fromkeys(names.parts.values(), (width,))
        wanted |= {copy: shapes[of] for copy, of in copies.items()}
        yield names, wanted | {names.parts["eh_proj"]: (width, 2 * width)}
