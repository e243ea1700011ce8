"""Read and load the frozen models of a method (`Method.frozen`), as engines in the policy's layout."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.boxes.shards import ShardSource
from burnish.config.frozen_models import FrozenModel
from burnish.config.schema import ModelConfig
from burnish.data.tokenizer import load_tokenizer
from burnish.data.vocabularies import require_same_vocabulary
from burnish.engines.base import Engine, Part
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError
from burnish.models.heads import has_value_head, require_language_model
from burnish.models.loading import read_model_config, require_embeddings, weights_source
from burnish.models.meta_init import count_flops
from burnish.runs.setup import Foundation, prove_directory, prove_model


class ReadModel(NamedTuple):
    """A frozen model before its weights are read."""

    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    """Its own."""
    source: ShardSource


class LoadedModel(NamedTuple):
    """A frozen model on this rank."""

    engine: Engine
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    """Its own."""


def read_frozen(model: FrozenModel, foundation: Foundation) -> ReadModel:
    """Return what a model says of itself; reads only the weights' headers. Collective.

    Raises `IncompatibleError` for a model that does not give what is wanted, and for log-probs with other tokens than the policy's.
    """
    gives_scores = model.gives == "scores"
    trusts = foundation.config.model.trust_remote_code and not gives_scores
    own = ModelConfig(path=model.path, trust_remote_code=trusts)
    hf_config = read_model_config(own)
    if gives_scores:
        _require_one_label(model, hf_config)
    else:
        do = f"set {model.setting} to a language model; this one belongs in reward.models"
        require_language_model(model.path, hf_config, do)
    tokenizer = load_tokenizer(model.path, trust_remote_code=trusts)
    if not gives_scores:
        policys = foundation.tokenizer.get_vocab()
        require_same_vocabulary(model.path, model.setting, policys, tokenizer.get_vocab())
        _require_as_many_rows(model, hf_config, foundation)
    require_embeddings(hf_config, tokenizer if gives_scores else foundation.tokenizer)
    prove_model(hf_config, foundation.layout, foundation.device)
    return ReadModel(hf_config, tokenizer, weights_source(own, hf_config, foundation.config.seed))


def load_beside(foundation: Foundation, policy: Engine | None) -> dict[str, LoadedModel]:
    """Load the models that compute during the run, in the policy's process groups; return them by setting. Collective."""
    config = foundation.config
    loaded = dict[str, LoadedModel]()
    beside = policy
    for model in foundation.beside:
        if model.phase == "start":
            continue
        hf_config, tokenizer, source = read_frozen(model, foundation)
        engine = make_engine(
            hf_config,
            config.engine,
            None,
            layout=foundation.layout,
            device=foundation.device,
            beside=beside,
        )
        beside = beside or engine
        engine.load(source, Part.WEIGHTS)
        prove_directory(engine, source, hf_config, count_flops(hf_config), config.engine)
        loaded[model.setting] = LoadedModel(engine, hf_config, tokenizer)
    return loaded


def _require_one_label(model: FrozenModel, hf_config: PretrainedConfig) -> None:
    if not has_value_head(hf_config) or hf_config.num_labels != 1:
        raise IncompatibleError(
            f"{model.path} gives no reward",
            have=f"{', '.join(hf_config.architectures or ())} with {hf_config.num_labels} labels",
            want="a sequence or token classification model with one label",
            do=f"set {model.setting} to a model that was trained as a reward model",
        )


def _require_as_many_rows(
    model: FrozenModel, hf_config: PretrainedConfig, foundation: Foundation
) -> None:
    """Raise `IncompatibleError` if the policy may draw tokens that the model's output layer lacks, or ranks would divide both otherwise."""
    tensor = foundation.config.engine.tensor_parallel
    rows = hf_config.get_text_config().vocab_size
    policys = foundation.hf_config.get_text_config().vocab_size
    is_start = model.phase == "start"  # which scores no drawn tokens
    if not is_start and (rows < policys or (rows > policys and tensor > 1)):
        raise IncompatibleError(
            f"the output layers of {model.path} and of model.path have different sizes",
            have=f"{rows} rows and {policys}, engine.tensor_parallel: {tensor}",
            want=f"as many rows, or without tensor parallelism more of {model.setting}",
            do=f"set another {model.setting}, or engine.tensor_parallel=1",
        )
