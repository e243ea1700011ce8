import pytest
import torch
from support.models.tiny import VOCAB, tiny_model
from torch import nn

from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import (
    IMPLEMENTATION,
    PackedLayout,
    Softmax,
    attention_forward,
)

CPU = torch.device("cpu")


class Layer(nn.Module):
    is_causal = True
    layer_idx = 0


def test_layout_of_lengths():
    layout = PackedLayout.of([3, 7], CPU)
    assert layout.lengths == (3, 7)
    assert layout.max_seqlen == 7
    assert layout.cu_seqlens.tolist() == [0, 3, 10]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.blocks is layout.blocks


def test_another_object_may_answer():
    """The generator's cache takes the place of the layout."""
    calls = []

    class Cache:
        def attend(self, layer, parts, softmax):
            calls.append((layer, tuple(parts[0].shape), tuple(parts[1].shape), softmax.window))
            return torch.zeros_like(parts[0].transpose(1, 2))

    model = tiny_model("mistral", attention=IMPLEMENTATION)
    model.base_model(torch.arange(6)[None] % VOCAB, packing=Cache(), use_cache=False)
    assert calls == [(i, (1, 4, 6, 8), (1, 2, 6, 8), 7) for i in (0, 1)]


def test_scaling_defaults_to_the_width():
    query = torch.randn(1, 2, 5, 16)
    layout = PackedLayout.of([5], CPU)
    given = attention_forward(Layer(), query, query, query, None, packing=layout, scaling=0.25)
    default = attention_forward(Layer(), query, query, query, None, packing=layout)
    assert torch.equal(given[0], default[0])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_indices", torch.zeros(1, 2, 5, 1, dtype=torch.int64)),  # MiniMax-M3's chosen keys
        ("of_tomorrow", 0.5),
    ],
)
def test_other_kinds_of_attention_are_refused(option, value):
    query = torch.randn(1, 2, 5, 16)
    options = {"packing": PackedLayout.of([5], CPU), option: value}
    with pytest.raises(IncompatibleError, match=option):
        attention_forward(Layer(), query, query, query, None, **options)


def test_masks_and_bidirectional_layers_are_refused():
    query = torch.randn(1, 2, 5, 16)
    packing = PackedLayout.of([5], CPU)
    with pytest.raises(IncompatibleError):
        attention_forward(Layer(), query, query, query, torch.ones(1), packing=packing)
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(IncompatibleError):
        attention_forward(layer, query, query, query, None, packing=packing)


def test_a_layer_that_is_not_told_of_packing_is_refused():
    query = torch.randn(1, 2, 5, 16)
    with pytest.raises(IncompatibleError):
        attention_forward(Layer(), query, query, query, None)


def test_one_sequence_that_is_longer_than_the_window_gives_contiguous_output():
    """As every interface of transformers does, so that a model may view it (afmoe)."""
    parts = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    assert PackedLayout.of([20], CPU).attend(0, parts, Softmax(0.25, 8)).is_contiguous()
