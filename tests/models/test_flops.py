from dataclasses import replace

import pytest
import torch
from support.models.tiny import FAMILIES, MIXTURES, VOCAB, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.models.flops import Passed, pairs
from burnish.models.meta_init import count_flops
from burnish.models.scorer import Scorer, ScoringPlan

LENGTH = 23
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
OTHERS = {
    "deepseek_v3": LATENT
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
    },
    "minicpm3": LATENT,
    "gpt_neox": {"num_hidden_layers": 2},
}
"""Families whose attention has no `head_dim`."""


def other_model(family):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **shape, vocab_size=VOCAB, **OTHERS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_forward_equals_counted_operations(family):
    model = other_model(family) if family in OTHERS else tiny_model(family, attention="eager")
    if family in (*MIXTURES, "deepseek_v3"):
        model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None] % VOCAB)
    flops = count_flops(model.config)
    every_pair = sum(flops.attention.values()) * LENGTH**2
    seen = sum(cost * pairs(LENGTH, window) for window, cost in flops.attention.items())
    rotary = _rotary_products(model)
    assert flops.forward([LENGTH]) - seen + every_pair == counter.get_total_flops() - rotary


def _rotary_products(model):
    """Some families make their angles with a matrix product, which is no weight's."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module = model.base_model.rotary_emb
        x, positions = torch.zeros(1, LENGTH, 32), torch.arange(LENGTH)[None]
        for kind in getattr(module, "layer_types", [None]):
            module(x, positions, *([kind] if kind else []))
    return counter.get_total_flops()


def test_pairs_by_counting():
    for length in range(12):
        for window in (None, 1, 3, 20):
            seen = [min(i + 1, window or length) for i in range(length)]
            assert pairs(length, window) == sum(seen)


def test_windows_of_layers():
    windows = {"gemma3_text": {6, None}, "mistral": {7}, "llama": {None}}
    for family, wanted in windows.items():
        assert set(count_flops(tiny_config(family)).attention) == wanted


def test_training_is_three_forwards_and_adds_over_sequences():
    flops = count_flops(tiny_config("qwen3"))
    both = Passed.all_of([5, 9])
    assert flops.training(both) == 3 * (flops.forward([5]) + flops.forward([9]))
    assert flops.training(both, frozen=True) == flops.training(both) - 14 * flops.per_token
    assert flops.forward([]) == flops.training(Passed()) == 0
    assert Passed.all_of([5]) + Passed.all_of([9]) == both


def test_training_counts_the_products_that_are_computed():
    model = tiny_model("llama")
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, *(0, 0, 0, 0, 1, 1), *(0, 0, 1, 1)]).bool()
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11, *(5, 6, 7, 8, 9, 12), *(5, 6, 7, 8)])
    ends = torch.tensor([0, 7, 13, 17], dtype=torch.int32)
    plan = ScoringPlan.of(ids, ends, mask)
    # Eight different beginnings; six of those that are scored; the last sequence is the beginning of another.
    assert plan.passed == Passed(8, 6, (7, 6), (5, 0))
    scorer = Scorer(model)
    with FlopCounterMode(display=False) as counter:
        scorer(plan).logprobs.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(kind, 0) for kind in (torch.ops.aten.mm, torch.ops.aten.addmm))
    flops = count_flops(model.config)
    assert replace(flops, attention={}).training(plan.passed) == products
    own, first = pairs(7, None) - pairs(5, None), pairs(6, None)
    assert flops.training(plan.passed) - products == 3 * flops.attention[None] * (own + first)


@pytest.mark.parametrize("frozen", [False, True])
def test_costs_of_training_are_the_operations_of_forward_and_backward(frozen):
    """Products of weights and of attention, counted apart; what goes in has a gradient, as behind an adapter."""
    model = tiny_model("qwen3", attention="eager").requires_grad_(not frozen)
    inputs = torch.randn(1, LENGTH, model.config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    rotary = _rotary_products(model)
    products = counted[torch.ops.aten.mm]
    attention = counted[torch.ops.aten.bmm] - rotary
    costs = count_flops(model.config).of_training(frozen=frozen)
    assert costs.per_token * LENGTH == products
    assert sum(costs.attention.values()) * LENGTH**2 == attention
    assert costs.forward([LENGTH]) == count_flops(model.config).training(
        Passed.all_of([LENGTH]), frozen=frozen
    )
