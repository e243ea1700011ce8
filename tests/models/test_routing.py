"""Routers that are told where tokens go, against routers written by hand in plain transformers models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.engine import assert_relative, make_examples, score_by_hand
from hypothesis import given
from hypothesis import strategies as st
from support.models.routers import balancing_loss, prescribe, record_routed
from support.models.tiny import VOCAB, tiny_config, tiny_model
from torch import Tensor

from burnish.boxes.box import whole
from burnish.errors import IncompatibleError, UsageError
from burnish.families import family_of
from burnish.models.meta_init import build_on_meta, materialize, router_sizes
from burnish.models.names import model_shards
from burnish.models.packing import PrefixTree, TokenSharing
from burnish.models.routing import (
    Routing,
    _Router,
    balance_factors,
    index_dtype,
    require_recorded,
    require_routers,
    row_weights,
    rows_of,
    tokens_of,
)
from burnish.models.scorer import Scorer, ScoringPlan
from burnish.records import Example

CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "gpt-oss": ("gpt_oss", {}),
    "shared and not normalized": ("qwen3_next", {"norm_topk_prob": False}),
    "shared": ("qwen3_5_moe_text", {}),
    "normalized": ("qwen3_moe", {"norm_topk_prob": True}),
    "shared beside a dense layer": ("qwen2_moe", {"norm_topk_prob": True}),
    "all layers, all heads normed": ("olmoe", {}),
    "a linear layer in the router": ("hunyuan_v1_moe", {}),
    "not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "by softmax and a bias": ("ernie4_5_moe", {}),
    "by sigmoid, of groups": ("glm4_moe", {}),
    "by sigmoid, not normalized": ("dots1", {}),
    "of groups, times a factor": ("deepseek_v2", {"norm_topk_prob": True}),
    "by sigmoid, a bias beside": ("minimax_m2", {}),
}


def scorer_of(kind: str) -> Scorer:
    family, changes = KINDS[kind]
    model = build_on_meta(tiny_config(family, **changes))
    materialize(model, CPU)
    theirs = {shard.spec.name: shard for shard in model_shards(tiny_model(family, **changes))}
    for shard in model_shards(model):
        shard.tensor.copy_(theirs[shard.spec.name].part(whole(shard.spec.shape)))
    return Scorer(model)


def plan_of(examples: list[Example]) -> ScoringPlan:
    lengths = [len(example.token_ids) for example in examples]
    return ScoringPlan.of(
        torch.from_numpy(np.concatenate([e.token_ids for e in examples])),
        torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        torch.from_numpy(np.concatenate([e.loss_mask for e in examples])),
    )


def outcome(scorer: Scorer, routing: Routing | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of their sum."""
    scorer.zero_grad()
    output = scorer(plan_of(make_examples(VOCAB)), 1.0, routing)
    output.logprobs.sum().backward()
    named = scorer.model.named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return output.logprobs.detach(), gradients


def random_experts(scorer: Scorer, tokens: int) -> Tensor:
    """[T, L, k], the k of each different."""
    routers, experts, chosen = router_sizes(scorer.model.config)
    return torch.rand(tokens, routers, experts).argsort(-1)[..., :chosen].to(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_choice_changes_nothing(kind: str) -> None:
    scorer = scorer_of(kind)
    recording = Routing()
    plain = outcome(scorer, None)
    recorded = outcome(scorer, recording)
    experts = recording.record()
    assert experts.dtype == torch.uint8
    again = outcome(scorer, Routing(experts))
    for found in (recorded, again):
        assert torch.equal(found[0], plain[0])
        assert found[1].keys() == plain[1].keys()
        assert all(torch.equal(found[1][name], plain[1][name]) for name in plain[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_of_another_is_that_of_a_router_written_by_hand(kind: str) -> None:
    scorer, examples = scorer_of(kind), make_examples(VOCAB)
    torch.manual_seed(1)
    experts = random_experts(scorer, sum(len(e.token_ids) for e in examples))
    routing = Routing(experts)
    logprobs, gradients = outcome(scorer, routing)
    assert torch.equal(routing.record(), experts)

    family, changes = KINDS[kind]
    model = tiny_model(family, **changes)
    made, wanted = prescribe(model), []
    for example, mine in zip(
        examples, experts.split([len(e.token_ids) for e in examples]), strict=True
    ):
        for number, router in enumerate(made):
            router.experts = mine[:, number].long()
        wanted.append(score_by_hand(model, example)[0])
    torch.cat(wanted).sum().backward()
    assert_relative(logprobs, torch.cat(wanted).detach(), 1e-5, "log-probs")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mine = gradients.get(name, gradients.get(name.replace("gate.", "gate.wg.")))
        assert mine is not None
        assert_relative(mine, parameter.grad, 1e-5, name)
        assert "gate.weight" not in name or parameter.grad.norm() > 1e-3  # it is alive


@pytest.mark.parametrize("kind", KINDS)
def test_the_load_balancing_loss_is_that_of_transformers(kind: str) -> None:
    scorer, examples = scorer_of(kind), make_examples(VOCAB)
    plan, recording = plan_of(examples), Routing()
    with torch.no_grad():
        scorer(plan, 1.0, recording)
    counts = torch.stack(
        [
            torch.bincount(layer.flatten(), minlength=router_sizes(scorer.model.config)[1])
            for layer in recording.record().unbind(1)
        ]
    )
    factors = balance_factors(counts, 0.5, router_sizes(scorer.model.config)[2])
    routing = Routing(None, factors, row_weights(plan, CPU))
    scorer.zero_grad()
    scorer(plan, 1.0, routing).logprobs.sum().backward()

    family, changes = KINDS[kind]
    model = tiny_model(family, **changes)
    routed = record_routed(model)
    total = torch.stack([score_by_hand(model, example)[0].sum() for example in examples]).sum()
    wanted = balancing_loss(model, routed)
    (total + 0.5 * wanted).backward()
    assert float(routing.loss()) == pytest.approx(0.5 * wanted.item(), rel=1e-5)
    for (name, mine), theirs in zip(
        scorer.model.named_parameters(), model.parameters(), strict=True
    ):
        if not mine.requires_grad:
            continue
        assert mine.grad is not None
        assert theirs.grad is not None
        assert_relative(mine.grad, theirs.grad, 1e-5, name)


@st.composite
def packed(draw: st.DrawFn) -> list[list[int]]:
    return draw(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)
    )


@given(packed(), st.integers(1, 3))
def test_rows_have_the_experts_of_a_token_that_they_are(
    sequences: list[list[int]], ranks: int
) -> None:
    lengths = [len(each) for each in sequences]
    tree = PrefixTree.of(np.concatenate(sequences), lengths)
    count = len(tree.computed)
    deals = [TokenSharing(rank, ranks, count, -(-count // ranks)) for rank in range(ranks)]
    tokens = torch.arange(sum(lengths))[:, None]
    found = [SimpleNamespace(tree=tree, lengths=tuple(lengths), deal=deal) for deal in deals]
    weights = torch.stack([row_weights(plan, CPU) for plan in found], dim=1).flatten()
    last = set((np.cumsum(lengths) - 1).tolist())
    for rank, plan in enumerate(found):
        for place, token in enumerate(rows_of(plan, tokens)[:, 0].tolist()):
            row = place * ranks + rank
            if row >= count:
                assert weights[row] == 0
                continue
            alike = np.flatnonzero(tree.rows == row)
            assert token in alike
            assert token not in last or set(alike) <= last
            assert weights[row] == len(alike)
    if ranks == 1:
        again = tokens_of(found[0], rows_of(found[0], tokens))[:, 0].numpy()
        assert np.array_equal(tree.rows[again], tree.rows)


def test_experts_of_another_model_are_refused() -> None:
    assert router_sizes(tiny_config("qwen3_moe")) == (2, 4, 2)  # of three layers one is dense
    require_recorded(torch.zeros(5, 2, 2, dtype=torch.uint8), (5, 2, 2), 4)
    no_token, other_shapes = torch.zeros(4, 2, 2), (torch.zeros(5, 3, 2), torch.zeros(5, 2, 1))
    for wrong in (no_token, *other_shapes, *(torch.full((5, 2, 2), expert) for expert in (4, -1))):
        wanted = r"(?s)want: 5 tokens × 2 routers × 2 of the experts 0 to 3"
        with pytest.raises(IncompatibleError, match=wanted):
            require_recorded(wrong, (5, 2, 2), 4)


def test_models_without_known_routers_are_refused() -> None:
    require_routers(tiny_config("mixtral"), "engine.router_aux_loss")
    with pytest.raises(UsageError, match=r"(?s)engine\.router_aux_loss.*qwen3"):
        require_routers(tiny_config("qwen3"), "engine.router_aux_loss")
    dense = tiny_config("qwen3_moe", mlp_only_layers=[0, 1, 2], num_hidden_layers=3)
    with pytest.raises(UsageError, match="qwen3_moe"):
        require_routers(dense, "engine.router_aux_loss")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("mixtral", {}),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3, "mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 3}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 4}),
        ("qwen3_moe", {"num_experts": 0}),
    ],
)
def test_a_configuration_says_whether_its_model_has_routers(
    family: str, changes: dict[str, Any]
) -> None:
    config = tiny_config(family, num_hidden_layers=3, **changes)
    layers: Any = build_on_meta(config).base_model.layers
    routers = sum(hasattr(layer.mlp, "experts") for layer in layers)
    assert router_sizes(config) == ((routers, 4, 2) if routers else (0, 0, 0))


@pytest.mark.parametrize("kind", ["mixtral", "normalized"])
def test_experts_of_no_probability_get_no_weight(kind: str) -> None:
    """As filler's, which are prescribed expert 0 several times."""
    logits = torch.tensor([[-300.0, 0.0, 1.0, -250.0], [1.0, 0.0, 0.0, 0.0]], requires_grad=True)
    config = scorer_of(kind).model.config
    router = _Router(0, family_of(config.model_type), getattr(config, "norm_topk_prob", True))
    router._routing = Routing(torch.zeros(2, 1, 2, dtype=torch.uint8))
    own = torch.full((2, 2), 0.5), torch.ones(2, 2, dtype=torch.long)
    _, weights, _ = router.route(torch.nn.Identity(), (), (logits, *own))
    assert weights.tolist() == [[0.0, 0.0], [0.5, 0.5]]
    (weights * torch.tensor([100.0, -50.0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_numbers_of_experts_have_room() -> None:
    assert index_dtype(256) == torch.uint8
    assert index_dtype(257) == torch.int16
