"""Layers with Gated DeltaNet (arXiv 2412.06464), whose state goes on from token to token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor, nn

from burnish.boxes.box import Box
from burnish.engines.megatron import VERSION
from burnish.engines.megatron.modules import LayerModules, Packing
from burnish.engines.megatron.traits import MIXER, ModelTraits
from burnish.errors import UsageError
from burnish.models.megatron_names import MegatronSlot
from burnish.models.names import Region

SHARES_GATES = Version("0.19")
"""The first tested Megatron-Core whose tensor ranks divide the gates of a group of heads."""
_OUTPUT = "out_proj"
_NORM = "mixer.norm.weight"


def require_divisible_heads(traits: ModelTraits, tensor: int) -> None:
    """Raise `UsageError` if so many tensor ranks cannot divide the heads of Gated DeltaNet, or of the attention beside it."""
    own = f"engine.tensor_parallel: {tensor}"
    lower = "lower engine.tensor_parallel"
    if traits.mixer_heads % tensor:
        raise UsageError(
            "engine.tensor_parallel does not divide the heads of Gated DeltaNet",
            have=f"{own}, linear_num_key_heads: {traits.mixer_heads}",
            want=f"a divisor of {traits.mixer_heads}",
            do=lower,
        )
    most = traits.sizes.key_heads
    if traits.gates_attention and tensor > most and VERSION < SHARES_GATES:
        raise UsageError(
            "this Megatron-Core does not divide the gates of attention between tensor ranks that share a key head",
            have=f"megatron-core {VERSION}, {own}, {most} key heads",
            want=f"megatron-core {SHARES_GATES} on Python 3.12, or at most {most} tensor ranks",
            do=f"install it, or {lower}",
        )


class GatedDeltaNet(nn.Module):
    """transformers' module, with this rank's heads, between two of Megatron's linear layers.

    Megatron's own needs flash-linear-attention, and refuses packed sequences in 0.16. Every rank that shares a micro-batch's tokens computes
    the states of all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        modules: LayerModules,
        mixer: Callable[[int, int], Any],
        pg_collection: ProcessGroupCollection,
        **others: Any,
    ) -> None:
        """`mixer` makes transformers' module of a layer, from 0, with one part of its heads of so many."""
        super().__init__()
        self.number = layer_number - 1
        self._group = pg_collection.tp
        ranks = self._group.size()
        with torch.device("meta"):
            self.mixer = mixer(self.number, ranks)
        linear = [name for name, child in self.mixer.named_children() if type(child) is nn.Linear]
        self._inputs = {
            name: self.mixer.get_submodule(name).out_features for name in linear if name != _OUTPUT
        }
        """The rows of this rank's parts of the checkpoint's matrices, which are one matrix here."""
        options = {"config": config, "bias": False, "tp_group": self._group, "is_expert": False}
        self.in_proj = modules.column(
            config.hidden_size,
            ranks * sum(self._inputs.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        self.out_proj = modules.row(
            ranks * self.mixer.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )
        begin = 0
        for name, rows in self._inputs.items():
            setattr(self.mixer, name, _Columns(begin, begin + rows))
            begin += rows
        setattr(self.mixer, _OUTPUT, nn.Identity())
        self.mixer.to_empty(device=torch.cuda.current_device()).to(config.params_dtype)
        for name, parameter in self.named_parameters():
            if name == _NORM:
                parameter.register_hook(self._of_all_heads)  # type: ignore[no-untyped-call]
            elif name.startswith("mixer."):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        selective = config.recompute_granularity == "selective"
        self._recomputes = selective and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return outputs of hidden states, both [T, 1, H], and no bias."""
        packing = packed_seq_params.attends
        assert packing is not None

        def mixed(rows: Tensor) -> Tensor:
            return packing.mix(self.number, lambda parts, _: self.mixer(parts), rows)

        rows = self.in_proj(hidden_states)[0].transpose(0, 1)
        recomputes = self._recomputes and self.training
        output = checkpoint(mixed, False, rows) if recomputes else mixed(rows)
        return self.out_proj(output.transpose(0, 1).contiguous())

    def _of_all_heads(self, gradient: Tensor) -> Tensor:
        """Sum the gradient of the norm that all heads share."""
        return reduce_from_tensor_model_parallel_region(gradient.clone(), group=self._group)

    def regions(
        self, name: str, parameter: str, shape: tuple[int, ...], seat: MegatronSlot
    ) -> Iterator[Region]:
        """Yield the checkpoint tensors in the parameter `name` of this module, which is `parameter` in the whole model.

        `shape` is that of the part of `seat`.
        """
        dim = int(name == f"{_OUTPUT}.weight")
        own = self._group.size() // seat.ranks  # parts as large as this rank's
        tensors = {name.removeprefix("mixer."): shape[dim]}
        if name == "in_proj.weight":
            tensors = {f"{each}.weight": rows * own for each, rows in self._inputs.items()}
        rank, ranks = (0, 1) if name == _NORM else seat

        def along(size: int, others: tuple[int, ...]) -> tuple[int, ...]:
            return (*others[:dim], size, *others[dim + 1 :])

        mixer = self.mixer
        zeros = (0,) * len(shape)
        begin = 0
        for tensor, size in tensors.items():
            parts = [size]
            if size == mixer.conv_dim * own:  # Qwen3-Next's matrix is larger: it has them by head
                parts = [mixer.key_dim * own, mixer.key_dim * own, mixer.value_dim * own]
            first = 0
            for part in parts:
                yield Region(
                    f"model.layers.{self.number}.{MIXER}.{tensor}",
                    along(size * ranks, shape),
                    parameter,
                    Box(along(begin, zeros), along(part, shape)),
                    tuple(range(len(shape))),
                    along(first + part * rank, zeros),
                )
                begin += part
                first += part * ranks


class _Columns(nn.Module):
    """Takes a part of what the input projection returned, in the place of a projection."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.columns = slice(start, stop)

    def forward(self, rows: Tensor) -> Tensor:
        """Return columns of rows [n, L, C]."""
        return rows[..., self.columns]
