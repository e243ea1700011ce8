"""Prove that the weights of a directory have arrived: score a sequence with the loaded model and with plain transformers.

transformers reads the directory on its own, configuration included. So a tensor that was dropped, swapped or cut wrongly shows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from burnish.check.plain_model import difference, plain_outputs
from burnish.data.batching import make_batch
from burnish.distributed.collectives import agree, gather_objects
from burnish.engines.base import Engine, Part
from burnish.errors import IncompatibleError
from burnish.files.strict_json import parse_object
from burnish.models.flops import ModelFlops
from burnish.models.heads import has_value_head
from burnish.models.meta_init import has_own_code, longest_sequence
from burnish.models.names import model_shards
from burnish.records import Example

# Tokens of the sequence, and its seed.
_TOKENS = 32
_SEED = 7
# Most parameters of a model that is held twice, in 4 bytes each. 135 million take 2 seconds of one processor.
_MOST_PARAMETERS = 700_000_000
# Most relative difference. In bf16 a token may go to other experts. Without its head, a model differs by half.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15}

_log = logging.getLogger("burnish")


def prove_loaded(
    engine: Engine,
    hf_config: PretrainedConfig,
    directory: Path,
    flops: ModelFlops,
    dtype: torch.dtype,
    part: Part = Part.WEIGHTS,
) -> None:
    """Compare the outputs of `engine`, which computes in `dtype`, with plain transformers on rank 0's CPU. Collective.

    `part` has the weights of the directory. Skips large models, and those that transformers cannot load, with a line that
    says so. Raises `IncompatibleError` naming the first tensor that differs, or that holds what is no number.
    """
    layout = engine.layout
    if flops.parameters > _MOST_PARAMETERS:
        if layout.is_main:
            _log.info(
                "not checked after loading: %s parameters are too many to hold twice",
                f"{flops.parameters:,}",
            )
        return
    begun = perf_counter()
    example = _example(hf_config, directory)
    batch = make_batch([example], layout, len(example.token_ids), flops)
    is_valued = has_value_head(hf_config)
    outputs = [each.values if is_valued else each.logprobs for each in engine.forward(batch)]
    scored = batch.by_example([each.float().cpu().numpy() for each in outputs])
    gathered = [own[0] for own in gather_objects(scored, layout) if 0 in own]
    with agree(layout):
        if layout.is_main and (plain := _plain_or_none(hf_config, directory)) is not None:
            error = _distance(plain, example, torch.tensor(gathered[0]), directory)
            if not error <= _TOLERANCES[dtype]:
                raise _refusal(directory, _first_tensor(engine, plain, part), error, dtype)
            seconds = perf_counter() - begun
            message = "checked after loading: a sequence is the same in plain transformers, to %.0e, in %.1f s"
            _log.info(message, error, seconds)


def _distance(plain: PreTrainedModel, example: Example, scored: Tensor, directory: Path) -> float:
    with torch.no_grad():
        outputs = plain_outputs(plain, example, 1.0)
    expected = outputs.values if has_value_head(plain.config) else outputs.logprobs
    if expected.isnan().any():
        _require_numbers(plain, directory)
    # What is not a number is so in both.
    return difference("outputs", scored.nan_to_num(), expected.nan_to_num()).error


def _require_numbers(plain: PreTrainedModel, directory: Path) -> None:
    for name, parameter in plain.named_parameters():
        if not parameter.isfinite().all():
            raise IncompatibleError(
                f"{name} in {directory} holds values that are not numbers",
                have=f"{int((~parameter.isfinite()).sum())} of {parameter.numel()} are NaN or infinite",
                want="finite weights",
                do="get or make the model again; a merge of models may divide by 0",
            )


def _refusal(directory: Path, name: str, error: float, dtype: torch.dtype) -> IncompatibleError:
    return IncompatibleError(
        f"the model of {directory} is not what plain transformers loads from there: the first to differ is {name}",
        have=f"outputs of {_TOKENS} tokens with a relative difference of {error:.1e}",
        want=f"at most {_TOLERANCES[dtype]:.0e}",
        do="do not train from this directory; report it with its config.json and the names of its tensors",
    )


def _plain_or_none(hf_config: PretrainedConfig, directory: Path) -> PreTrainedModel | None:
    try:
        return _plain(hf_config, directory)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything, and Burnish did load it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        message = "not checked after loading: transformers cannot load %s: %s"
        _log.warning(message, directory, reason)
        return None


def _example(hf_config: PretrainedConfig, directory: Path) -> Example:
    """Return a random sequence of the real vocabulary.

    It lacks tokens with a meaning: some families zero the padding token's embedding on loading, or expect an image.
    """
    text = hf_config.get_text_config()
    count = max(2, min(longest_sequence(hf_config) or _TOKENS, _TOKENS))
    fields = parse_object((directory / "config.json").read_bytes(), f"{directory}/config.json")
    special = [value for name, value in fields.items() if re.search("token_(id|index)$", name)]
    special.append(getattr(text, "pad_token_id", None))
    draws = np.random.default_rng(_SEED).integers(0, text.vocab_size, 4 * count)
    plain = [token for token in draws.tolist() if token not in special]
    ids = np.array((plain or draws.tolist())[:count])
    return Example(ids, np.arange(len(ids)) >= 1)


def _plain(hf_config: PretrainedConfig, directory: Path) -> PreTrainedModel:
    """Return transformers' eager model of a directory, in fp32."""
    options: dict[str, Any] = {
        "trust_remote_code": has_own_code(hf_config),
        "local_files_only": True,
    }
    config = AutoConfig.from_pretrained(directory, **options)
    for part in (config, config.get_text_config()):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
    kind: Any = AutoModelForCausalLM
    if has_value_head(config):
        from burnish.models.value_head import value_class

        kind = value_class(config)
        options = {"local_files_only": True}
    # `require_plain_weights` has passed: a description of anything else is left over.
    described = config.__dict__.pop("quantization_config", None)
    if described and dict(described).get("quant_method") == "mxfp4":
        config.quantization_config = described
        from transformers import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    with _quiet():
        model: PreTrainedModel = kind.from_pretrained(
            directory, config=config, dtype=torch.float32, **options
        )
    return model.float().eval()


def _first_tensor(engine: Engine, plain: PreTrainedModel, part: Part) -> str:
    """Return the name of the first tensor of this process that differs from the plain model's."""
    plain_tensors = {shard.spec.name: shard.tensor for shard in model_shards(plain)}
    for shard in engine.shards(part):
        right = plain_tensors.get(shard.spec.name)
        if right is None or right.shape != shard.spec.shape:
            return shard.spec.name
        tensor = shard.tensor.detach().cpu()
        if not torch.equal(tensor, right[shard.box.slices].to(tensor.dtype)):
            return shard.spec.name
    own_names = {shard.spec.name for shard in engine.shards(part)}
    if missing := [name for name in plain_tensors if name not in own_names]:
        return missing[0]
    return "no tensor of rank 0, so a tensor of another rank or the computation"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' bars and advice, which speak of a model that is not trained."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
