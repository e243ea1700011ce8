"""The proof finds faults planted in Burnish's own code, which show only in some shapes, at some lengths or in some settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.nightly import by_day
from torch import Tensor
from transformers import AttentionInterface, AutoConfig

from burnish.check.proof import prove
from burnish.config.schema import EngineConfig
from burnish.engines.optim.optimizer import ShardedOptimizer
from burnish.errors import IncompatibleError
from burnish.models import scorer
from burnish.models.kernels import attention, fused, mixers
from burnish.models.logprobs import LogprobOptions
from burnish.models.scorer import ScoringPlan
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import generator, sampling
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.builtin.sampling import Drawn
from burnish.rollout.builtin.shared_cache import SharedCache

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def attending(change: Callable[[Any, list[Tensor], dict[str, Any]], None]) -> Plant:
    """Change queries, keys, values and options of attention, in place of a list and a mapping."""

    def plant(patch: Patch) -> None:
        right = attention.attention_forward

        def wrong(module: Any, *parts: Any, **options: Any) -> Any:
            *heads, mask = parts
            change(module, heads, options)
            return right(module, *heads, mask, **options)

        mapping = AttentionInterface._global_mapping
        patch.setitem(mapping, attention.IMPLEMENTATION, wrong)
        patch.setattr(fused, "attention_forward", wrong)

    return plant


def scale_of_hidden(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    options["scaling"] = (module.q_proj.in_features // heads[0].shape[1]) ** -0.5


def first_dims_alone(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    heads[0] = heads[0] * (torch.arange(heads[0].shape[-1]) < 16)


def windows_from(layer: int) -> Plant:
    def change(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
        if module.layer_idx >= layer:
            options["sliding_window"] = 5

    return attending(change)


def other_keys(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    if heads[1].shape[1] > 2:
        heads[1] = heads[1].roll(1, 1)


def other_values(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    if heads[2].shape[1] > 2:
        heads[2] = heads[2].roll(1, 1)


def low_cap(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    if options.get("softcap"):
        options["softcap"] = min(options["softcap"], 3.0)


def wide_window(module: Any, heads: list[Tensor], options: dict[str, Any]) -> None:
    if options.get("sliding_window"):
        options["sliding_window"] += 1


def scoring(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Change log-probs and entropies, given hidden states too."""

    def plant(patch: Patch) -> None:
        right = scorer.token_logprobs

        def wrong(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return change(hidden, *right(hidden, *rest))

        patch.setattr(scorer, "token_logprobs", wrong)

    return plant


def entropy_at_one(patch: Patch) -> None:
    right = scorer.token_logprobs

    def wrong(
        hidden: Tensor, head: Tensor, targets: Tensor, options: LogprobOptions, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        logprobs, _ = right(hidden, head, targets, options, *rest)
        return logprobs, right(hidden, head, targets, replace(options, temperature=1.0), *rest)[1]

    patch.setattr(scorer, "token_logprobs", wrong)


def later_positions(first: int) -> Plant:
    """Positions from `first` on that are one too high."""

    def plant(patch: Patch) -> None:
        right = ScoringPlan.of.__func__  # type: ignore[attr-defined]

        def wrong(kind: Any, *given: Any, **options: Any) -> ScoringPlan:
            plan: ScoringPlan = right(kind, *given, **options)
            return replace(plan, positions=plan.positions + (plan.positions >= first))

        patch.setattr(ScoringPlan, "of", classmethod(wrong))

    return plant


def norms_left_out(patch: Patch) -> None:
    """Of queries and keys, where heads are not as wide as hidden states."""
    right = fused.rotate_both

    def wrong(heads: Any, norms: Any, positions: Any) -> Any:
        is_apart = heads[0].shape[-1] * heads[0].shape[1] % 64 != 0
        return right(heads, (None, None) if is_apart else norms, positions)

    patch.setattr(fused, "rotate_both", wrong)


def small_epsilon(patch: Patch) -> None:
    """In bf16 alone."""
    right = fused.norm_rotate

    def wrong(rows: Tensor, weight: Any, epsilon: float, rotation: Any) -> Tensor:
        return right(rows, weight, 1e-6 if rows.dtype == torch.bfloat16 else epsilon, rotation)

    patch.setattr(fused, "norm_rotate", wrong)


def rounded_again(hidden: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """The fp32 part in 4 bits more or less, where the model is in bf16."""
    if hidden.dtype == torch.bfloat16:
        return logprobs.to(torch.float8_e4m3fn).float(), entropy
    return logprobs, entropy


def nucleus_of_one_more(patch: Patch) -> None:
    def wrong(masses: Tensor, top_p: float) -> Tensor:
        rising = masses.sort(dim=-1).values
        running = rising.cumsum(dim=-1)
        border = torch.searchsorted(running, running[:, -1:] * (1 - top_p), right=True)
        return rising.gather(1, (border - 1).clamp(min=0))

    patch.setattr(sampling, "_nucleus_border", wrong)


def filtered_as(**other: float) -> Plant:
    def plant(patch: Patch) -> None:
        right = sampling.truncate

        def wrong(masses: Tensor, how: Sampling) -> None:
            right(masses, replace(how, **{n: getattr(how, n) + v for n, v in other.items()}))

        patch.setattr(sampling, "truncate", wrong)

    return plant


def drawing(change: Callable[[Drawn, Tensor, Sampling], Drawn]) -> Plant:
    """Change what is drawn of logits."""

    def plant(patch: Patch) -> None:
        right = generator.draw

        def wrong(logits: Tensor, how: Sampling, numbers: Tensor) -> Drawn:
            return change(right(logits.clone(), how, numbers), logits, how)

        patch.setattr(generator, "draw", wrong)

    return plant


def without_filters(drawn: Drawn, logits: Tensor, how: Sampling) -> Drawn:
    """Log-probs before the filters take their share."""
    scores = (logits / (how.temperature or 1.0)).log_softmax(-1)
    return drawn._replace(sampled_logprobs=scores.gather(1, drawn.tokens[:, None])[:, 0])


def after_filters(drawn: Drawn, logits: Tensor, how: Sampling) -> Drawn:
    return drawn._replace(logprobs=drawn.sampled_logprobs) if how.temperature else drawn


def next_number(patch: Patch) -> None:
    right = generator.uniforms
    patch.setattr(generator, "uniforms", lambda keys, counts: right(keys, counts + 1))


def untied_head(patch: Patch) -> None:
    """A head that keeps its first values."""
    right = InferenceModel.load

    def wrong(model: InferenceModel, *given: Any) -> None:
        head: Any = model.module.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight) / 8, requires_grad=False)
        right(model, *given)

    patch.setattr(InferenceModel, "load", wrong)


def late_positions_of_decoding(patch: Patch) -> None:
    right = SharedCache._hidden

    def wrong(cache: SharedCache, window: int | None) -> Tensor:
        hidden = right(cache, window)
        return hidden | (torch.arange(hidden.shape[1]) == 128)

    patch.setattr(SharedCache, "_hidden", wrong)


def unbounded_steps(patch: Patch) -> None:
    patch.setattr(mixers, "_bounded_steps", lambda *_: nullcontext())


def larger_gradients(patch: Patch) -> None:
    """Of what FSDP shards and reduces."""
    right = ShardedOptimizer.gradients

    def wrong(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        found = right(optimizer)
        next(iter(found.values())).mul_(1.01)
        return found

    patch.setattr(ShardedOptimizer, "gradients", wrong)


def stale_prompts(patch: Patch) -> None:
    """A second sample that starts without its prompt's log-probs."""
    right = BuiltinGenerator._logprobs

    def wrong(made: BuiltinGenerator, sequence: Any) -> Any:
        drawn_from, plain = right(made, sequence)
        plain[:1] = plain[:1] if sequence.sample == 0 else plain[:1] * 1.01
        return drawn_from, plain

    patch.setattr(BuiltinGenerator, "_logprobs", wrong)


Precision = Literal["fp32", "bf16"]
FAULTS: dict[str, tuple[Plant, str, dict[str, Any], Precision]] = {
    "a scale of hidden / heads": (
        attending(scale_of_hidden),
        "llama",
        {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 20},
        "fp32",
    ),
    "heads cut after 16": (attending(first_dims_alone), "llama", {"head_dim": 64}, "fp32"),
    "a window in the third layer": (windows_from(2), "llama", {}, "fp32"),
    "a window in the fourth layer": (windows_from(3), "llama", {}, "fp32"),
    "the third layer of a kind": (
        windows_from(4),
        "gemma2",
        {"layer_types": ["sliding_attention", "full_attention"] * 4, "num_hidden_layers": 8},
        "fp32",
    ),
    "keys of another head": (attending(other_keys), "llama", {}, "fp32"),
    "values of another head": (attending(other_values), "qwen2", {}, "fp32"),
    "a soft cap of at most 3": (attending(low_cap), "gemma2", {"head_dim": 16}, "fp32"),
    "a window one too wide": (
        attending(wide_window),
        "mistral",
        {"sliding_window": 4096},
        "fp32",
    ),
    "entropy 2 % too high": (scoring(lambda _, p, e: (p, e * 1.02)), "llama", {}, "fp32"),
    "entropy at temperature 1": (entropy_at_one, "llama", {}, "fp32"),
    "positions from 64 on": (later_positions(64), "llama", {}, "fp32"),
    "positions from 129 on": (later_positions(129), "llama", {}, "fp32"),
    "positions from 256 on": (later_positions(256), "qwen3", {}, "fp32"),
    "norms of queries and keys left out": (
        norms_left_out,
        "qwen3",
        {"head_dim": 32, "num_key_value_heads": 2},
        "fp32",
    ),
    "another epsilon in bf16": (small_epsilon, "llama", {}, "bf16"),
    "log-probs rounded in bf16": (scoring(rounded_again), "llama", {}, "bf16"),
    "top-p of one token more": (nucleus_of_one_more, "llama", {}, "fp32"),
    "top-k of one token more": (filtered_as(top_k=1), "llama", {}, "fp32"),
    "min-p twice as high": (filtered_as(min_p=0.03), "llama", {}, "fp32"),
    "log-probs without filters": (drawing(without_filters), "llama", {}, "fp32"),
    "plain log-probs with filters": (drawing(after_filters), "llama", {}, "fp32"),
    "the next random number": (next_number, "llama", {}, "fp32"),
    "a tied head that is not tied": (
        untied_head,
        "qwen2",
        {"tie_word_embeddings": True},
        "fp32",
    ),
    "a key that is hidden beyond 128": (late_positions_of_decoding, "llama", {}, "fp32"),
    "a second sample's first token": (stale_prompts, "llama", {}, "fp32"),
    "time steps without bounds": (
        unbounded_steps,
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": None,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
        },
        "fp32",
    ),
    "a gradient that is reduced wrongly": (larger_gradients, "llama", {}, "fp32"),
}
"""What is planted, the model type, its fields, and the run's precision."""
DAY = (
    "a scale of hidden / heads",
    "a window in the fourth layer",
    "entropy 2 % too high",
    "top-p of one token more",
)


@pytest.fixture(autouse=True)
def _nothing_proven(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", by_day(FAULTS, DAY))
def test_what_is_planted_is_found(name: str, monkeypatch: Patch) -> None:
    plant, family, fields, precision = FAULTS[name]
    fields = {key: value for key, value in (SIZES | fields).items() if value is not None}
    plant(monkeypatch)
    with pytest.raises(IncompatibleError):
        prove(
            AutoConfig.for_model(family, **fields),
            CPU,
            generates=True,
            engine=EngineConfig(precision=precision),
        )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "temperature"])
def test_the_runs_own_sampling_is_compared(name: str, monkeypatch: Patch) -> None:
    """A fault that only the run's own values show."""
    own = {"top_p": 0.5, "top_k": 7, "min_p": 0.2, "temperature": 1.4}
    config, engine = AutoConfig.for_model("llama", **SIZES), EngineConfig(precision="fp32")

    def only_then(drawn: Drawn, logits: Tensor, how: Sampling) -> Drawn:
        is_own = getattr(how, name) == own[name]
        return drawn._replace(sampled_logprobs=drawn.sampled_logprobs + 0.01 * is_own)

    drawing(only_then)(monkeypatch)
    prove(config, CPU, generates=True, engine=engine)
    run = Sampling(50, **{name: own[name]})  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError):
        prove(config, CPU, generates=True, engine=engine, sampling=run)


@pytest.mark.parametrize("family", by_day(["qwen3_moe", "mixtral", "gemma2", "nemotron_h", "lfm2"], ["gemma2"]))  # fmt: skip
@pytest.mark.nightly
def test_what_bf16_rounds_passes(family: str) -> None:
    """Also where rounding sends tokens to other experts."""
    fields = {"layer_types": ["conv", "full_attention"] * 16} if family == "lfm2" else {}
    config = AutoConfig.for_model(family, **fields)
    prove(config, CPU, generates=True, engine=EngineConfig(precision="bf16"))
