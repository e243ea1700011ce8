from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    BETAS,
    CLIP,
    LR,
    STEPS,
    assert_relative,
    make_examples,
    score_by_hand,
    train,
)
from contracts.engine import whole as whole_of
from safetensors.torch import load_file
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.schema import OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.optim.muon import Muon, orthogonalized
from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions

OPTIM = OptimConfig(kind="muon", betas=BETAS, momentum=0.9, weight_decay=0.1)


def test_a_step_is_torchs_own_muon() -> None:
    torch.manual_seed(0)
    model = build_on_meta(tiny_config("llama"))
    weights = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    muon = Muon.of_model(model, regions(model), weights, OPTIM, Layout())
    ours = muon.weights
    assert set(ours) == {n for n, p in weights.items() if ".layers." in n and p.ndim == 2}
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in ours.items()}
    oracle = torch.optim.Muon(
        theirs.values(), momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(1, 4):
        gradients = {name: torch.randn(tensor.shape) for name, tensor in ours.items()}
        muon.step(0.01 * step, gradients)
        oracle.param_groups[0]["lr"] = 0.01 * step
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        oracle.step()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter.detach()), name
        assert torch.equal(
            muon.slots["momentum_buffer"][name], oracle.state[parameter]["momentum_buffer"]
        )


def test_orthogonalizing_keeps_directions_and_evens_out_sizes() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(12, 30)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix.bfloat16()).float()
    sizes = torch.linalg.vecdot(u.T @ result, v)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
    assert orthogonalized(torch.zeros(4, 3, dtype=torch.bfloat16)).count_nonzero() == 0


def train_rank(layout: Layout, path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    return train(make_engine(layout, path, OPTIM, **settings), make_examples(VOCAB), 2)


def weights_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, shape in rank["shapes"].items()}
    return whole_of([rank["weights"] for rank in ranks], shapes)


def moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


def train_by_hand(path: Path) -> dict[str, Tensor]:
    """A plain model, torch's Muon for the matrices in its layers and torch's AdamW for the rest."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    named = dict(model.named_parameters())
    hidden = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    tables = [p for name, p in named.items() if ".layers." not in name and p.ndim == 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    muon = torch.optim.Muon(
        hidden, lr=LR, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    examples = make_examples(VOCAB)
    tokens = sum(int(example.loss_mask.sum()) for example in examples)
    for _ in range(STEPS):
        model.zero_grad()
        for example in examples:
            logprobs, entropy = score_by_hand(model, example)
            mask = torch.from_numpy(example.loss_mask)
            (torch.where(mask, -logprobs - 0.01 * entropy, 0.0).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_every_layout_takes_the_steps_of_torchs_muon(tmp_path: Path, family: str) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    before = {
        name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()
    }
    layouts = [(1, {}), (2, {})]
    of_mixture = [(2, {"expert_parallel": 2}), (4, {"replicas": 2})]
    layouts += [(2, {"tensor_parallel": 2})] if family == "llama" else of_mixture
    found = [weights_of(run_ranks(train_rank, world, path, how)) for world, how in layouts]
    wanted = train_by_hand(path) if family == "llama" else found[0]  # experts are stacked there
    for after, (world, how) in zip(found, layouts, strict=True):
        # Orthogonalizing is done in bf16, where gradients that differ in the last bit round apart.
        assert_relative(moved(after, before), moved(wanted, before), 2e-2, f"{world} {how}")


def test_momentum_is_saved_for_matrices_and_moments_for_the_rest(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32)
    [result] = run_ranks(train_rank, 1, path, {})
    slots = {name.partition("/")[::2] for name, _, _ in result["slots"]}
    by_weight = {weight: {s for s, w in slots if w == weight} for _, weight in slots}
    assert by_weight["model.layers.0.mlp.experts.1.gate_proj.weight"] == {"momentum_buffer"}
    assert by_weight["model.layers.0.self_attn.q_proj.weight"] == {"momentum_buffer"}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert by_weight[name] == {"exp_avg", "exp_avg_sq"}
