"""Refuse a composite whose own class computes other texts than its language model alone."""

from __future__ import annotations

import logging

import torch
from transformers import AutoConfig, PretrainedConfig

from burnish.check.proof_key import keep_proof, proof_place
from burnish.check.small_model import shrink_model
from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, refusing
from burnish.models.composite import class_of, module_like
from burnish.models.language_model import Composite
from burnish.models.meta_init import plain_model

_VOCABULARY = 64
_TOKENS = 24
_SEED = 5
_TOLERANCE = 1e-4
_PLACEHOLDERS = ("_token_id", "_token_index")

_log = logging.getLogger("burnish")


def prove_composite(
    composite: Composite, hf_config: PretrainedConfig, layout: Layout | None = None
) -> None:
    """Compare logits of a small language model alone and within transformers' class of the composite.

    Towers have their full size and no values, because a text does not reach them. A file in the cache records a passed
    comparison. Raises `IncompatibleError`.
    """
    whole = AutoConfig.from_pretrained(composite.directory, local_files_only=True)
    place = proof_place(hf_config, torch.device("cpu"), ["composite", whole.to_dict()])
    if place.is_file():
        return
    do = "train its language model from a directory of its own, or report this with its config.json"
    with refusing(
        f"a small {whole.model_type} fails when it reads text without images",
        IncompatibleError,
        want="a model that reads texts without images, video and audio",
        do=do,
    ):
        error = _error(whole, hf_config)
    if not error <= _TOLERANCE:
        raise IncompatibleError(
            f"a {whole.model_type} computes other logits for text than its language model alone",
            have=f"logits that differ by {error:.0e}",
            want=f"at most {_TOLERANCE:.0e}",
            do=do,
        )
    if layout is None or layout.is_main:
        _log.info("checked: a small %s reads texts as its language model does", whole.model_type)
    keep_proof(place, layout or Layout())


def _error(whole: PretrainedConfig, hf_config: PretrainedConfig) -> float:
    text = whole.get_text_config()
    [key] = [key for key in whole.sub_configs if getattr(whole, key, None) is text]
    small = shrink_model(hf_config, EngineConfig(), _VOCABULARY)
    setattr(whole, key, small)
    for name, value in list(vars(whole).items()):
        if name.endswith(_PLACEHOLDERS) and isinstance(value, int):
            setattr(whole, name, _VOCABULARY - 1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_SEED)
        alone = plain_model(small).eval()
        with torch.device("meta"):
            within = class_of(whole)._from_config(whole)
        within.to_empty(device="cpu")
        within.set_submodule(module_like(within, alone.base_model), alone.base_model)
        within.set_output_embeddings(alone.get_output_embeddings())
        token_ids = torch.randint(1, _VOCABULARY - 1, (1, _TOKENS))
        logits = within.eval()(input_ids=token_ids).logits
        return float((logits - alone(input_ids=token_ids).logits).abs().max())
