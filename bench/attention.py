"""Attention on a CPU in bf16, forward and backward, beside torch's flash attention in bf16 and in fp32.

    python -m bench.attention [--json] [--rounds N] [--threads N] [--shapes 4x1024x12x4 ...]

A shape is sequences x tokens x heads x key heads, with heads of width 64. The fp32 side's time includes the casts from and to bf16.
Errors of output and gradients, relative to attention in fp64 (up to 1,024 tokens), go to stderr.
Sides take turns; ratios are medians over rounds of the faster peer's time over ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.machine import Result, command_line, interleaved, ratio, report
from burnish.distributed.device import keep_freed_pages
from burnish.models.kernels.span_attention import causal_attention

WIDTH = 64
SHAPES = ("4x1024x12x4", "1x4096x12x4", "8x512x12x4", "32x128x12x4", "64x88x10x5", "128x32x10x5")
Parts = tuple[Tensor, Tensor, Tensor]
"""Query, key, value."""
Attention = Callable[[Parts], Tensor]


def ours(parts: Parts) -> Tensor:
    output: Tensor = causal_attention(*parts, WIDTH**-0.5, parts[0].shape[2])
    return output


def flash(parts: Parts) -> Tensor:
    query, key, value = parts
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def in_fp32(parts: Parts) -> Tensor:
    query, key, value = (part.float() for part in parts)
    return flash((query, key, value)).to(parts[0].dtype)


SIDES: dict[str, Attention] = {"ours": ours, "torch bf16": flash, "torch fp32": in_fp32}


def draw(count: int, length: int, heads: Sequence[int]) -> Parts:
    """Return random query, key and value in the memory layout of a linear layer's output, viewed by head."""
    query, key, value = (
        torch.randn(count, length, each, WIDTH).bfloat16().transpose(1, 2).requires_grad_()
        for each in (heads[0], heads[1], heads[1])
    )
    return query, key, value


def passes(attend: Attention, parts: Parts, upstream: Tensor) -> list[Tensor]:
    """Return output and gradients."""
    output = attend(parts)
    return [output.detach(), *torch.autograd.grad(output, parts, upstream)]


def errors(parts: Parts, upstream: Tensor) -> None:
    """Print each side's relative errors against fp64."""
    query, key, value = (part.detach().double().requires_grad_() for part in parts)
    exact = passes(flash, (query, key, value), upstream.double())
    for name, attend in SIDES.items():
        found = passes(attend, parts, upstream)
        off = [float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
        print(f"  {name}: {', '.join(f'{each:.1e}' for each in off)}", file=sys.stderr)


def measure(shape: str, rounds: int) -> Result:
    """Measure one shape."""
    count, length, *heads = map(int, shape.split("x"))
    parts = draw(count, length, heads)
    upstream = draw(count, length, heads)[0].detach()
    if length <= 1024:
        errors(parts, upstream)
    sides = {name: partial(passes, attend, parts, upstream) for name, attend in SIDES.items()}
    seconds = interleaved(sides, rounds)
    middle = {name: 1e3 * median(times) for name, times in seconds.items()}
    print("  " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in middle.items()), file=sys.stderr)
    peer = min((name for name in SIDES if name != "ours"), key=lambda name: middle[name])
    faster = ratio(seconds[peer], seconds["ours"])
    return Result(f"attention/{shape}", middle["ours"], middle[peer], None, "ms", faster, 1.0)


def main() -> None:
    parser = command_line(__doc__, rounds=9, threads=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_pages()
    report([measure(shape, options.rounds) for shape in options.shapes], options.json)


if __name__ == "__main__":
    main()
