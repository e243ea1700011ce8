"""What an adapter drops: PEFT's share, by the tokens alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.models.tiny import tiny_config

from burnish.config.schema import LoraConfig
from burnish.errors import IncompatibleError
from burnish.models.lora.adapter import target_weights
from burnish.models.lora.dropout import TokenDropout, token_keys
from burnish.models.meta_init import build_on_meta

FEATURES = 96


def kept(layer: str, ids: np.ndarray, lengths: list[int], seed: int, share: float) -> torch.Tensor:
    """What a layer makes of ones."""
    dropout = TokenDropout(share, layer, FEATURES)
    dropout.tokens = torch.from_numpy(token_keys(ids, lengths, seed)).int()
    return dropout(torch.ones(1, len(ids), FEATURES))[0]


def test_the_share_is_dropped_and_the_rest_is_scaled_as_in_torchs_dropout() -> None:
    ids = np.random.default_rng(0).integers(0, 1000, 3000)
    for share in (0.05, 0.1, 0.5, 0.9):
        values = kept("q_proj", ids, [2000, 1000], 7, share)
        wanted = torch.nn.functional.dropout(torch.ones(4), share).max() or 1 / (1 - share)
        assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - share)])
        assert wanted in (0, pytest.approx(1 / (1 - share)))
        tokens = values.numel()
        dropped = int((values == 0).sum())
        assert abs(dropped - share * tokens) < 5 * (tokens * share * (1 - share)) ** 0.5


def test_masks_of_tokens_inputs_layers_and_steps_are_unrelated() -> None:
    ids = np.random.default_rng(1).integers(0, 50, 1200)
    cases = [("q_proj", 7), ("k_proj", 7), ("q_proj", 8)]
    masks = [kept(layer, ids, [1200], seed, 0.5).bool() for layer, seed in cases]
    for one, other in itertools.combinations(masks, 2):
        agreeing = float((one == other).float().mean())
        assert abs(agreeing - 0.5) < 5 * 0.5 / masks[0].numel() ** 0.5
    (mask, *_) = masks
    for table in (mask.double(), mask.double().T):
        correlations = torch.corrcoef(table).fill_diagonal_(0)
        assert float(correlations.abs().max()) < 6 / table.shape[1] ** 0.5


def test_a_token_is_masked_by_its_sequence_up_to_it_however_it_is_packed() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.integers(0, 50, 20), rng.integers(0, 50, 9)
    branch = np.concatenate([one[:12], other])
    packed = kept("up_proj", np.concatenate([one, other, branch]), [20, 9, 21], 3, 0.3)
    alone = [kept("up_proj", ids, [len(ids)], 3, 0.3) for ids in (one, other, branch)]
    assert torch.equal(packed, torch.cat(alone))
    assert torch.equal(alone[0][:12], alone[2][:12])
    assert not torch.equal(alone[1], alone[2][12:])


def test_an_evaluation_drops_nothing() -> None:
    dropout = TokenDropout(0.5, "q_proj", FEATURES).eval()
    rows = torch.randn(1, 4, FEATURES)
    assert dropout(rows) is rows


def test_a_layer_that_sees_other_rows_than_tokens_is_refused() -> None:
    dropout = TokenDropout(0.5, "gate_proj", FEATURES)
    dropout.tokens = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(IncompatibleError, match="gate_proj"):
        dropout(torch.randn(4, FEATURES))


def test_layers_with_state_are_refused() -> None:
    model = build_on_meta(tiny_config("qwen3_next"))
    with pytest.raises(IncompatibleError, match="dropout"):
        target_weights(model, LoraConfig(rank=2, dropout=0.1, targets=["in_proj_qkvz"]))
    assert target_weights(model, LoraConfig(rank=2, dropout=0.1, targets=["q_proj"]))
