"""The experts of a mixture as two grouped products, beside those that Megatron-Core uses without CUDA kernels.

    python -m bench.experts [--json] [--rounds N] [--sizes 8x64 64x64 8x1024 32x1024] [--rows 1024] [--threads 1] [--clock cpu|wall]

Both sides have the same weights, the same rows, unevenly divided among the experts, and the same router probabilities.
`burnish.engines.megatron.modules.GroupedExperts` is ours, Megatron's `SequentialMLP` the peer. A round is forward, backward
and adding the gradients to the fp32 buffers in which Megatron sums micro-batches. Sizes are experts x width of the
hidden state; an expert's hidden layer is half as wide. The sides take turns; the ratio is the median over rounds of the peer's
time over ours.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.machine import Result, command_line, interleaved, ratio, report
from bench.peers import CLOCKS
from burnish.config.schema import EngineConfig
from burnish.distributed.processes import process_group
from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.modules import GroupedExperts


def both_sides(
    count: int, hidden: int, dtype: torch.dtype, mesh: MegatronMesh
) -> tuple[nn.Module, nn.Module]:
    """Return our module and Megatron's, with the same weights, and with buffers for their gradients."""
    with megatron_called():
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.transformer_config import TransformerConfig

        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=1,
            num_moe_experts=count,
            moe_ffn_hidden_size=hidden // 2,
            ffn_hidden_size=hidden // 2,
            gated_linear_unit=True,
            activation_func=functional.silu,
            add_bias_linear=False,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            perform_initialization=False,
        )
        ours = GroupedExperts(count, config, pg_collection=mesh.groups)
        theirs: Any = SequentialMLP(count, config, linear, pg_collection=mesh.groups)
    with torch.no_grad():
        for name in ("linear_fc1", "linear_fc2"):
            stacked = getattr(ours, name).weight.normal_(0, hidden**-0.5)
            for number, expert in enumerate(theirs.local_experts):
                getattr(expert, name).weight.copy_(stacked[number])
    for parameter in (*ours.parameters(), *theirs.parameters()):
        parameter.main_grad = torch.zeros(parameter.shape)  # Megatron's name for the buffer
    return ours, theirs


def step(side: nn.Module, rows: Tensor, counts: Tensor, probabilities: Tensor) -> None:
    """Run a micro-batch as Megatron's data parallelism does."""
    output, _ = side(rows, counts, probabilities)
    output.backward(rows.detach())
    for parameter in side.parameters():
        if parameter.grad is not None:
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None


def measure(
    size: str, dtype: torch.dtype, options: argparse.Namespace, mesh: MegatronMesh
) -> Result:
    """Measure one size in one dtype."""
    count, hidden = map(int, size.split("x"))
    ours, theirs = both_sides(count, hidden, dtype, mesh)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, count, (options.rows,), generator=generator)
    counts = torch.bincount(chosen, minlength=count)
    rows = torch.randn(options.rows, hidden, generator=generator).to(dtype).requires_grad_()
    probabilities = torch.rand(options.rows, generator=generator).to(dtype).requires_grad_()
    sides = {
        "ours": lambda: step(ours, rows, counts, probabilities),
        "peer": lambda: step(theirs, rows, counts, probabilities),
    }
    seconds = interleaved(sides, options.rounds, CLOCKS[options.clock])
    mine, peer = (1e3 * median(seconds[name]) for name in sides)
    name = f"experts/{size}/{str(dtype).removeprefix('torch.')}"
    return Result(name, mine, peer, None, "ms", ratio(seconds["peer"], seconds["ours"]), 1.0)


def main() -> None:
    parser = command_line(__doc__, rounds=7, threads=1, clock="cpu")
    parser.add_argument("--sizes", nargs="+", default=["8x64", "64x64", "8x1024", "32x1024"])
    parser.add_argument("--rows", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    with process_group(device, 60.0):
        mesh = MegatronMesh.of(EngineConfig(kind="megatron"), device)
        dtypes = (torch.float32, torch.bfloat16)
        results = [
            measure(size, dtype, options, mesh) for dtype in dtypes for size in options.sizes
        ]
        mesh.close()
    report(results, options.json)


if __name__ == "__main__":
    main()
