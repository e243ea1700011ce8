"""Compare attention at the model's own width with the formula, and a whole model in bf16 with transformers in bf16 and in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.check.comparison import BatchOutcome
from burnish.check.plain_model import Difference, difference
from burnish.distributed.device import device_name
from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import PackedLayout, Softmax
from burnish.models.meta_init import build_on_meta, model_sizes

# Most relative difference of attention.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
_KEY_HEADS = 3
_WINDOW = 60
_SEED = 5
_LENGTHS = (5, 64, 1, 130)
# A model's error in bf16 may be so many times that of transformers, and so much more.
_TIMES = 2.0
_MORE = 0.01
_GRADIENT_TIMES = 3.0
_GRADIENT_MORE = 0.05


def require_attention(
    hf_config: PretrainedConfig, small: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare attention with the formula in fp64, with the model's width, soft cap and heads per key head.

    `small` is the small model's configuration. Raises `IncompatibleError`.
    """
    sizes = model_sizes(hf_config)
    text = hf_config.get_text_config()
    if not (sizes.head_dim and sizes.key_heads) or getattr(text, "qk_rope_head_dim", None):
        return  # latent attention, whose queries and values differ in width, has no kernel
    key_heads = min(sizes.key_heads, _KEY_HEADS)
    heads = (sizes.heads // sizes.key_heads * key_heads, key_heads, key_heads)
    softcap = getattr(text, "attn_logit_softcapping", None)
    names = [name for name, _ in build_on_meta(small).named_parameters()]
    sinks = [(heads[0],)] if any(name.endswith(".sinks") for name in names) else []
    layout = PackedLayout.of(_LENGTHS, device)
    shapes = [(1, each, sum(_LENGTHS), sizes.head_dim) for each in heads] + sinks
    # Scores near the soft cap.
    scaling = sizes.head_dim**-0.5 * max(1.0, (softcap or 0) / 4)
    for window in {None, _WINDOW if getattr(text, "sliding_window", None) else None}:
        draws = torch.Generator().manual_seed(_SEED)
        drawn = [torch.randn(shape, generator=draws).bfloat16() for shape in shapes]
        parts = [each.to(device, dtype).requires_grad_() for each in drawn]
        how = Softmax(scaling, window, softcap, *parts[3:])
        output = layout.attend(0, (parts[0], parts[1], parts[2]), how)
        upstream = torch.randn(output.shape, generator=draws).bfloat16()
        results = [output, *torch.autograd.grad(output, parts, upstream.to(device, dtype))]
        exact = [each.double().requires_grad_() for each in drawn]
        right = _attended(exact, how)
        expected = [right, *torch.autograd.grad(right, exact, upstream.double())]
        of = ("output", *(f"gradient of {each}" for each in ("queries", "keys", "values", "sinks")))
        for what, result, reference in zip(of, results, expected, strict=False):
            wrong = difference(what, result.detach().cpu(), reference.detach())
            if not wrong.error <= _BOUNDS[dtype]:
                raise _wrong_attention(wrong, dtype, device)


def _attended(parts: list[Tensor], how: Softmax) -> Tensor:
    """Return attention [1, T, heads, head_dim] of packed sequences by the formula."""
    query, key, value = (part[0] for part in parts[:3])
    key, value = (part.repeat_interleave(len(query) // len(key), 0) for part in (key, value))
    scores = query @ key.mT * how.scaling
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    sequence = torch.repeat_interleave(torch.tensor(_LENGTHS))
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (distance >= 0)
    if how.window is not None:
        visible &= distance < how.window
    scores = scores.masked_fill(~visible, -torch.inf)
    if len(parts) > 3:
        sinks = parts[3][:, None, None].expand(-1, len(sequence), 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(0, 1)[None]


def _wrong_attention(
    wrong: Difference, dtype: torch.dtype, device: torch.device
) -> IncompatibleError:
    in_half = dtype == torch.bfloat16
    return IncompatibleError(
        f"attention in {'bf16' if in_half else 'fp32'} is computed wrongly on {device_name(device)}",
        have=f"{wrong.what}: a relative difference of {wrong.error:.1e}",
        want=f"the formula in fp64, to {_BOUNDS[dtype]:.0e}",
        do=f"{'set engine.precision=fp32, and ' if in_half else ''}report this with the versions of torch and of the driver",
    )


def of_rounding(
    outcome: BatchOutcome, plain: BatchOutcome, exact: BatchOutcome
) -> list[tuple[Difference, float]]:
    """Return the errors of a step in bf16, each with its bound.

    `plain` is transformers' step in bf16 and `exact` the one in fp32. Of outputs, the median token counts: rounding sends some tokens of
    a mixture to other experts.
    """
    pairs: list[tuple[Difference, float]] = []
    for what, own_values, plain_values, right in (
        ("log-probs", outcome.logprobs, plain.logprobs, exact.logprobs),
        ("entropies", outcome.entropies, plain.entropies, exact.entropies),
    ):
        if right:
            error, bound = (_median_error(each, right) for each in (own_values, plain_values))
            pairs.append((Difference(f"{what} in bf16", error), _TIMES * bound + _MORE))
    for name, gradient in exact.gradients.items():
        least = 0.05 * exact.norm
        own_error, plain_error = (
            difference(f"gradient of {name} in bf16", each.get(name), gradient, least)
            for each in (outcome.gradients, plain.gradients)
        )
        bound = _GRADIENT_TIMES * plain_error.error + _GRADIENT_MORE
        pairs.append((own_error, bound))
    return pairs


def _median_error(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the median token's difference, relative to the mean of what is wanted."""
    right = torch.cat([exact[name] for name in exact])
    computed = torch.cat([values[name].float() for name in exact])
    scored = right != 0
    apart = (computed - right)[scored].abs()
    return float(apart.median() / right[scored].abs().mean())
