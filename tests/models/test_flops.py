import pytest
import torch
from tiny import FAMILIES, MIXTURES, VOCAB, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from burnish.models.counting import count_flops
from burnish.models.flops import pairs

LENGTH = 23


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_counted_operations(family):
    model = tiny_model(family, attention="eager")
    if family in MIXTURES:
        model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None] % VOCAB)
    flops = count_flops(model.config)
    assert len(flops.attention) == model.config.num_hidden_layers
    every_pair = sum(cost.per_pair for cost in flops.attention) * LENGTH**2
    seen = sum(cost.per_pair * pairs(LENGTH, cost.window) for cost in flops.attention)
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
    windows = [cost.window for cost in count_flops(tiny_config("gemma3_text")).attention]
    assert windows == [6, None]
    assert count_flops(tiny_config("mistral")).attention[0].window == 7
    assert count_flops(tiny_config("llama")).attention[0].window is None


def test_training_is_three_forwards_and_adds_over_sequences():
    flops = count_flops(tiny_config("qwen3"))
    assert flops.training([5, 9]) == 3 * (flops.forward([5]) + flops.forward([9]))
    assert flops.training([5, 9], frozen=True) == flops.training([5, 9]) - 14 * flops.per_token
    assert flops.forward([]) == 0
