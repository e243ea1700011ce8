"""Triton's kernels without a GPU: in its interpreter beside the definition, and compiled for four architectures.

The interpreter has to be chosen before Triton is imported, so this file is also a program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed"),
]
ARCHITECTURES = (80, 90, 100, 120)
MOST_REGISTERS = 64
# A program of 256 threads has a whole row's sums.
MOST_OF_DRAWS = 160


@pytest.mark.parametrize("kernel", ["logprobs", "sums", "rotation", "decoding", "draws"])
def test_they_are_right_in_the_interpreter(kernel):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, kernel], env=env, check=True)


def definition(logits, columns, scale, bound):
    z = logits * scale if bound is None else bound * torch.tanh(scale * logits)
    logp = z.log_softmax(dim=-1)
    return logp.gather(1, columns[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def interpret_logprobs():
    from burnish.models.kernels.triton_logprobs import softmax_sums, write_gradients

    torch.manual_seed(0)
    columns, upstream = torch.tensor([0, 9_000, 4, 8_191, 8_192]), torch.randn(2, 5)
    for bound in (None, 3.0):
        for uses_entropy in (True, False):
            logits = (4 * torch.randn(5, 9_001)).requires_grad_()
            logprobs, entropy = definition(logits, columns, 0.5, bound)
            sums = softmax_sums(logits.detach(), columns, 0.5, bound)
            top, total, dot, chosen = sums
            torch.testing.assert_close(chosen - total.log(), logprobs.detach())
            torch.testing.assert_close(total.log() - dot / total, entropy.detach())
            absent = softmax_sums(logits.detach(), torch.full((5,), -1), 0.5, bound)
            assert torch.equal(absent[:3], sums[:3])
            assert (absent[3] == -torch.inf).all()
            (logprobs @ upstream[0] + uses_entropy * (entropy @ upstream[1])).backward()
            written, factor = logits.detach().clone(), 0.5 * (bound or 1)
            known = [total.log() + top, factor * upstream[0]]
            known += [entropy.detach(), factor * upstream[1]] if uses_entropy else []
            write_gradients(written, columns, torch.stack(known), 0.5, bound)
            torch.testing.assert_close(written, logits.grad, rtol=1e-4, atol=1e-7)


def interpret_sums():
    """Segments have the bits of the rounds in which other devices add."""
    from burnish.models.kernels.triton_sums import add_segments
    from burnish.models.packing import RowMap

    torch.manual_seed(0)
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for rows, shape in ((7, (3, 700)), (40, (1,)), (5, ()), (1, (2048,))):
            for index in (torch.randint(rows, (60,)), torch.arange(rows), torch.tensor([2 % rows])):
                source = torch.randn(rows, *shape).to(dtype).requires_grad_()
                upstream = torch.randn(len(index), *shape).to(dtype)
                RowMap.of(index.numpy(), cpu).take(source).backward(upstream)
                order = index.argsort(stable=True)
                places, counts = index.unique(return_counts=True)
                starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
                found = add_segments(upstream, order, starts, places, rows)
                # The interpreter rounds to bf16 towards 0, and compiled kernels to the nearest.
                bound = 2**-7 if dtype == torch.bfloat16 else 0
                torch.testing.assert_close(found, source.grad, rtol=bound, atol=0)


def interpret_rotation():
    """Heads of any number, width and stride, and gradients, beside torch's operations."""
    from burnish.models.kernels.fused import rotate
    from burnish.models.kernels.triton_rotation import rotate_heads

    torch.manual_seed(0)
    for heads, width in ((1, 8), (3, 24), (16, 64), (40, 128)):
        angle = torch.randn(7, 1, width // 2).repeat(1, 1, 2)
        rotation = angle.cos(), angle.sin()
        joined = torch.randn(7, heads + 2, width)
        for given in (joined[:, :heads], joined.transpose(1, 2).contiguous().mT[:, 2:]):
            rows = given.detach().requires_grad_()
            wanted = rotate(rows, rotation)
            upstream = torch.randn_like(wanted)
            wanted.backward(upstream)
            torch.testing.assert_close(rotate_heads(given, rotation), wanted.detach())
            found = rotate_heads(upstream, rotation, backward=True)
            torch.testing.assert_close(found, rows.grad)
    assert len(rotate_heads(joined[:0], (angle[:0], angle[:0]))) == 0


def interpret_decoding():
    from burnish.models.kernels.fused import norm_rotate
    from burnish.models.kernels.triton_decoding import rotate_and_write, silu_gate

    torch.manual_seed(0)
    for heads, kv_heads, width in ((4, 2, 16), (3, 3, 24), (8, 1, 128)):
        joined = torch.randn(5, heads + 2 * kv_heads, width)
        rotation = (torch.randn(5, 1, width), torch.randn(5, 1, width))
        places = torch.tensor([9, 0, 31, 7, 8], dtype=torch.int32)
        for weights in (None, (torch.randn(width), torch.randn(width))):
            pools = (torch.zeros(32, kv_heads, width), torch.zeros(32, kv_heads, width))
            query = rotate_and_write(joined, weights, 1e-6, rotation, places, pools)
            parts = joined.split([heads, kv_heads, kv_heads], dim=1)
            of_query, of_key = weights or (None, None)
            wanted = norm_rotate(parts[0], of_query, 1e-6, rotation)
            torch.testing.assert_close(query, wanted)
            keys = torch.zeros(32, kv_heads, width)
            keys[places.long()] = norm_rotate(parts[1], of_key, 1e-6, rotation)
            torch.testing.assert_close(pools[0], keys)
            torch.testing.assert_close(pools[1][places.long()], parts[2])
    for width in (1, 640, 1500):
        joined = torch.randn(3, 2 * width)
        gate, up = joined.chunk(2, dim=-1)
        torch.testing.assert_close(silu_gate(joined), torch.nn.functional.silu(gate) * up)


def interpret_draws():
    """Numbers, tokens and totals have the bits of torch's operations on the CPU."""
    from burnish.models.kernels import triton_draws
    from burnish.rollout.builtin import sampling

    rng, width = np.random.default_rng(0), sampling._BLOCK
    integers = torch.from_numpy(rng.integers(-(2**63), 2**63, 300))
    counts = torch.arange(300) * 7
    numbers = sampling.uniforms(integers, counts)
    assert torch.equal(triton_draws.uniform_numbers(integers, counts), numbers)
    for words, spread in ((151_936, 1), (50_257, 3), (97, 2), (64, 1), (5, 9)):
        masses = (spread * torch.from_numpy(rng.normal(size=(8, words)))).float()
        masses = (masses - masses.amax(-1, keepdim=True)).exp_()
        masses[2:] *= masses[2:] >= masses[2:].median(-1, keepdim=True).values
        masses[5:6, 1:-1] = 0
        masses[7, words // 2] = torch.nan
        goals = numbers[:8].clone()
        goals[:2] = torch.tensor([0, 1 - 2.0**-53])
        goals[4] = 1 - 2.0**-53
        wanted = sampling._invert(masses, goals)
        blocks = functional.pad(masses, (0, -words % width)).view(8, -1, width)
        found = triton_draws.invert(masses, blocks.sum(-1), goals, width)
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_they_compile_to_few_registers_and_wide_loads(architecture, element, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from burnish.models.kernels import (
        triton_decoding,
        triton_draws,
        triton_logprobs,
        triton_rotation,
        triton_sums,
    )

    values, indices, sums = f"*{element}", "*i64", "*fp32"
    numbers = dict.fromkeys(("rows", "stride"), "i32") | dict.fromkeys(("scale", "bound"), "fp32")
    wide = {"words": 151_936, "block": triton_logprobs._BLOCK}
    options = {"num_warps": triton_logprobs._WARPS, "enable_fp_fusion": True}
    kernels = [
        (
            triton_logprobs._sums_kernel,
            {"logits": values, "columns": indices, "sums": sums, **numbers},
            {**wide, "capped": True},
            options,
        ),
        (
            triton_logprobs._gradient_kernel,
            {"logits": values, "columns": indices, "known": sums, **numbers},
            {**wide, "capped": True, "uses_entropy": True},
            options,
        ),
        (
            triton_sums._sums_kernel,
            {
                "values": values,
                **dict.fromkeys(("order", "starts", "places"), indices),
                "sums": values,
                "width": "i32",
            },
            {"block": triton_sums._BLOCK},
            {"enable_fp_fusion": True},
        ),
        (
            triton_rotation._rotate_kernel,
            {
                "rows": values,
                "result": values,
                "cosines": sums,
                "sines": sums,
                **dict.fromkeys(("heads", "row_stride", "head_stride"), "i32"),
            },
            {"half": 64, "backward": True, "some": 16, "block": 64},
            {"enable_fp_fusion": True},
        ),
        (
            triton_decoding._gate_kernel,
            {"joined": values, "result": values, "width": "i32"},
            {"block": triton_decoding._GATE_BLOCK},
            {"enable_fp_fusion": True},
        ),
        (
            triton_decoding._rotate_kernel,
            {
                **dict.fromkeys(("joined", "query_weight", "key_weight"), values),
                **dict.fromkeys(("queries", "keys", "values"), values),
                "cosines": sums,
                "sines": sums,
                "places": "*i32",
                "epsilon": "fp32",
            },
            {"heads": 16, "kv_heads": 8, "half": 64, "normed": True, "block": 64},
            {"num_warps": 1, "enable_fp_fusion": True},
        ),
    ]
    kernels += [
        (
            triton_draws._uniforms_kernel,
            {"keys": indices, "counts": indices, "numbers": "*fp64", "size": "i32"},
            {"block": triton_draws._KEYS},
            {"enable_fp_fusion": False},
        ),
        (
            triton_draws._invert_kernel,
            {
                "masses": sums,
                "sums": sums,
                "numbers": "*fp64",
                "tokens": indices,
                "logs": sums,
                "words": "i32",
                "blocks": "i32",
            },
            {"size": 64, "most": 4096},
            {"num_warps": triton_draws._WARPS, "enable_fp_fusion": False},
        ),
    ]
    for kernel, signature, constants, how in kernels:
        names = kernel.arg_names
        types = {name: signature.get(name, "constexpr") for name in names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types[name].startswith("*") or name in ("width", "row_stride", "head_stride")
        }
        source = ASTSource(kernel, types, constants, aligned)
        compiled = triton.compile(source, GPUTarget("cuda", architecture, 32), options=how)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        used = subprocess.run(
            [cuobjdump(), "--dump-resource-usage", file], capture_output=True, text=True, check=True
        ).stdout
        [registers] = map(int, re.findall(r"REG:(\d+)", used))
        draws = kernel.fn.__module__ == triton_draws.__name__
        assert registers <= (MOST_OF_DRAWS if draws else MOST_REGISTERS)
        assert re.findall(r"STACK:(\d+)", used) == ["0"]
        # A head is narrow: two elements for each thread. A draw reads few numbers.
        is_narrow = draws or kernel is triton_decoding._rotate_kernel
        assert is_narrow or re.search(r"ld\.global\S*\.v[248]\.", compiled.asm["ptx"])


def cuobjdump():
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


if __name__ == "__main__":
    interpret = {
        "logprobs": interpret_logprobs,
        "sums": interpret_sums,
        "rotation": interpret_rotation,
        "decoding": interpret_decoding,
        "draws": interpret_draws,
    }
    interpret[sys.argv[1]]()
