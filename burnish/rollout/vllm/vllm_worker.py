"""Functions that run inside vLLM's worker: load weights, read back those that it computes with, record tokens' experts.

vLLM 0.32 returns experts itself from model runner V2, which CPUs lack. Routers store them by slot of vLLM's cache, so a shared
prefix keeps its experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from burnish.files.safetensors import ADAPTER_PREFIX
from burnish.models.routing import index_dtype
from burnish.records import Experts
from burnish.rollout.inference_engine import joined_layer
from burnish.rollout.vllm.vllm_receivers import forget_received, received

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# Families' names of an expert's second and third matrix. vLLM joins the first, gate_proj or w1, and the second.
_SECOND = ("up_proj", "w3")
_DOWN = ("down_proj", "w2")
ADAPTER = LoRARequest("burnish", 1, "memory")
"""The adapter that requests name. vLLM has it in memory, so it reads no file."""
# Rows of the identity matrix that are multiplied at a time.
_ROWS = 256


def begin_load(worker: Any) -> frozenset[str]:
    """Prepare for new weights; return vLLM's names of the parameters to fill."""
    forget_received(worker)
    model = worker.get_model()
    names = _plain(name for name, _ in model.named_parameters())
    for module in model.modules() if current_platform.is_cpu() else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # vLLM packs experts when it makes this
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
    return names


def load_some(worker: Any, tensors: Sequence[tuple[str, Tensor]]) -> frozenset[str]:
    """Hand tensors to the model, which keeps them until their layer is complete; return the parameters filled.

    The elements of those on the meta device have been received here.
    """
    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        return _plain(model.load_weights(received(worker, tensors)))


def _plain(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.replace(".base_layer.", ".") for name in names)


def load_adapter(worker: Any, tensors: Mapping[str, Tensor], peft_config: dict[str, Any]) -> None:
    """Replace an adapter's tensors, named as PEFT does. `peft_config` is PEFT's configuration."""
    manager = worker.model_runner.lora_manager
    model = worker.get_model()
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # vLLM 0.28 has the second.
        renames = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
        mapper = renames()
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER.lora_int_id,
        dict(tensors),
        PEFTHelper.from_dict(peft_config),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper,
    )
    for name in tensors:
        if not hasattr(_adapter_of(model, name)[0], "lora_a_stacked"):
            raise ValueError(f"vLLM has no place for {name}")
    manager.remove_adapter(adapter.id)
    manager._adapter_manager.add_adapter(adapter)
    manager._adapter_manager.activate_adapter(adapter.id)


def read_factor(worker: Any, name: str, scale: float) -> Tensor:
    """Return this rank's part of A, or of B divided by `scale`, as vLLM uses it."""
    module, part = _adapter_of(worker.get_model(), name)
    is_a = ".lora_A." in name
    factor: Tensor = (module.lora_a_stacked if is_a else module.lora_b_stacked)[part][0, 0]
    return factor if is_a else factor / scale


def _adapter_of(model: Any, name: str) -> tuple[Any, int]:
    """Return the wrapper with an adapter's A or B, and its index there."""
    modules = dict(model.named_modules())
    layer = name.removeprefix(ADAPTER_PREFIX)
    layer = layer.partition(".lora_")[0]
    owner, parts = joined_layer(model, modules, layer)
    return modules.get(owner), parts.index(layer) if parts else 0


def end_load(worker: Any) -> None:
    """Convert the new weights into vLLM's form."""
    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.model_config)
        # vLLM keeps the old packed copy of a tied head, which gets no tensor.
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def clear_cache(worker: Any) -> None:
    """Set all keys and values to 0, because 0 times NaN is NaN for a block's next owner."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def read_tensor(
    worker: Any, name: str, shapes: Mapping[str, tuple[int, ...]], head: bool = False
) -> Tensor | None:
    """Return this rank's part of the checkpoint's tensor `name` as vLLM uses it, or None if it cannot be found.

    With `head`, the output layer's copy. `shapes` are the checkpoint's.
    """
    model = worker.get_model()
    ranks = worker.parallel_config.tensor_parallel_size
    # A layer with an adapter gets its wrapper's name. It comes after the wrapper, so it replaces the wrapper here.
    modules = {n.replace(".base_layer", ""): module for n, module in model.named_modules()}
    owner, _, kind = name.rpartition(".")
    before = []
    rows = []
    if head:
        owner = next((n for n, module in modules.items() if isinstance(module, ParallelLMHead)), "")
    elif expert := _EXPERT.fullmatch(name):
        inside = modules[expert[1]].modules() if expert[1] in modules else ()
        experts = next((module for module in inside if hasattr(module, "w13_weight")), None)
        return experts and _expert(experts, int(expert[2]), expert[3], shapes[name], ranks)
    else:
        layer = owner
        owner, parts = joined_layer(model, modules, layer)
        rows = [shapes[f"{part}.{kind}"][0] // ranks for part in parts]
        before = rows[: parts.index(layer)] if parts else []
    module = modules.get(owner)
    if not hasattr(module, kind) or (ranks > 1 and not rows and hasattr(module, "output_sizes")):
        return None  # each rank has a part of every joined tensor
    width = shapes[name][-1]
    dtype = worker.model_config.dtype
    tensor: Tensor = _matrix(module, width, dtype) if kind == "weight" else getattr(module, kind)
    if not rows:
        return tensor
    # not if ranks share key heads
    start = sum(before)
    parted = len(tensor) == sum(rows)
    return tensor[start : start + rows[len(before)]] if parted else None


def join_parts(parts: Sequence[Tensor | None], shape: tuple[int, ...]) -> Tensor | None:
    """Join the parts of vLLM's ranks: rows, columns, or copies."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    result = present[0]
    if len(shape) > 1 and result.shape[-1] < shape[-1]:
        result = torch.cat(present, dim=-1)
    elif len(result) < shape[0]:
        result = torch.cat(present)
    return result[: shape[0]]


def _matrix(module: Any, width: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of a module with `width` inputs; a packed one times the identity."""
    weight: Tensor = module.weight.detach()
    is_head = isinstance(module, ParallelLMHead)
    looks_up = isinstance(module, VocabParallelEmbedding) and not is_head
    if weight.device.type != "cpu" or looks_up or not hasattr(module, "quant_method"):
        return weight
    width = getattr(module, "input_size_per_partition", width)
    rows = torch.eye(width, dtype=dtype).chunk(-(-width // _ROWS))
    return torch.cat([module.quant_method.apply(module, each) for each in rows]).t()


def _expert(
    module: Any, index: int, kind: str, shape: tuple[int, ...], ranks: int
) -> Tensor | None:
    down = kind in _DOWN
    matrix: Tensor = (module.w2_weight if down else module.w13_weight)[index].detach()
    method = module.quant_method
    if matrix.device.type == "cpu":
        isa = getattr(method.moe_kernel.fused_experts, "isa", None)
        if isa is None:
            return None
        matrix = _unpack(matrix, isa)
    elif method.unquantized_backend.name != "TRITON":  # other backends reorder experts' matrices
        return None
    if down:
        return matrix[:, : shape[1] // ranks]
    start = len(matrix) // 2 if kind in _SECOND else 0
    return matrix[start : start + shape[0] // ranks]


def _unpack(packed: Tensor, isa: str) -> Tensor:
    """Undo vLLM's packing of an expert's matrix: packed element indices show the order."""
    pack = import_module("vllm._custom_ops").cpu_prepack_moe_weight
    places = torch.arange(packed.numel(), dtype=torch.int32).view(1, *packed.shape, 1)
    unit = torch.int32 if packed.itemsize == 4 else torch.int16
    digits = [
        pack(digit.contiguous().view(packed.dtype), isa).view(unit)
        for digit in places.view(unit).unbind(-1)
    ]
    order = torch.stack(digits, dim=-1).view(torch.int32).view(-1).long()
    plain = torch.empty_like(packed).view(-1)
    plain[order] = packed.reshape(-1)
    return plain.view(packed.shape)


def begin_recording(worker: Any) -> None:
    """Have a worker's routers record their choices. Raises `ValueError` if they cannot."""
    routers = _routers(worker)
    if not routers:
        raise ValueError("the model's kernels do not report which experts they choose")
    slots = worker.model_runner.kv_cache_config.num_blocks * _block_size(worker)
    dtype = index_dtype(routers[0].global_num_experts)
    room = torch.zeros(slots + 1, len(routers), routers[0].top_k, dtype=dtype)
    for number, router in enumerate(routers):
        router.set_capture_fn(partial(_record, room[:, number]))


def read_experts(worker: Any, counts: Mapping[str, int]) -> list[Experts]:
    """Return experts [count, L, k] of the first tokens of requests in vLLM's last step."""
    columns = [router.capture_fn.args[0] for router in _routers(worker)]
    requests = worker.model_runner.requests
    size = _block_size(worker)
    blocks = {name.partition("-")[0]: each.block_ids[0] for name, each in requests.items()}
    experts = []
    for name, count in counts.items():
        request_blocks = np.array(blocks[name][: -(-count // size)])
        slots = (request_blocks[:, None] * size + np.arange(size)).ravel()[:count]
        if len(slots) < count or not request_blocks.all():
            raise ValueError("vLLM does not keep all tokens of a completion")
        index = torch.from_numpy(slots)
        experts.append(torch.stack([column[index] for column in columns], dim=1).numpy())
    return experts


def _record(room: Tensor, chosen: Tensor) -> None:
    """Store a router's experts [n, k] in their tokens' slots, padding's in the last."""
    mapping: Any = get_forward_context().slot_mapping
    slots = next(iter(mapping.values()), None)
    if slots is not None:
        room[slots[: len(chosen)]] = chosen[: len(slots)].to(room.dtype)


def _block_size(worker: Any) -> int:
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec
    if len(groups) != 1 or getattr(spec, "sliding_window", None):
        raise ValueError("vLLM forgets tokens outside of a window, and with them their experts")
    return int(spec.block_size)


def _routers(worker: Any) -> list[Any]:
    runners = [runner for runner in worker.get_model().modules() if hasattr(runner, "router")]
    routers = [runner.router for runner in runners if hasattr(runner.router, "set_capture_fn")]
    return list(dict.fromkeys(routers))
