"""Let Megatron-Core 0.16 and 0.19 run on a CPU with gloo, without CUDA.

Megatron names CUDA for new tensors, the current device, tensor types, streams and random states. No substitution changes a result.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextmanager
def megatron_called() -> Iterator[None]:
    """Surround every call of Megatron; blocks may be nested."""
    with warnings.catch_warnings(), _without_advice(), on_host():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep back the warnings that Megatron logs: they advise who calls it, not who trains."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def on_host() -> AbstractContextManager[None]:
    """Allow calls of Megatron without CUDA inside the block."""
    return nullcontext() if torch.cuda.is_available() else _cuda_is_cpu()


@contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    with ExitStack() as stack:
        for place, name, value in _substitutions():
            stack.enter_context(mock.patch.object(place, name, value))
        # megatron/core/jit.py compiles small functions. On a CPU that would start a C++ compiler.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaTensorsAreHostTensors())
        yield


def _substitutions() -> list[tuple[ModuleType | type, str, Any]]:
    cuda = torch.cuda
    return [
        # `device=torch.cuda.current_device()`: tensor_parallel/layers.py, distributed/param_and_grad_buffer.py,
        # optimizer/distrib_optimizer.py, pipeline_parallel/p2p_communication.py
        (cuda, "current_device", lambda: CPU),
        # pipeline_parallel/p2p_communication.py `_communicate`, after each exchange
        (cuda, "synchronize", _nothing),
        # transformer/moe/token_dispatcher.py `MoEAlltoAllTokenDispatcher`: it copies split sizes on a stream of its own
        (cuda, "Stream", _Stream),
        (cuda, "stream", lambda stream: nullcontext()),
        (cuda, "current_stream", _Stream),
        # tensor_parallel/random.py `model_parallel_cuda_manual_seed` and the tracker, which transformer_block.py
        # forks under sequence parallelism. Without dropout nothing is drawn, so the state may be empty.
        (cuda, "manual_seed", _nothing),
        (cuda, "get_rng_state", _no_state),
        (megatron_random, "_get_cuda_rng_state", _no_state),
        (megatron_random, "_set_cuda_rng_state", _nothing),
        # transformer/moe/token_dispatcher.py `token_dispatch`: split sizes stay tensors if nothing copies them from a device
        (token_dispatcher, "all_to_all", _with_plain_sizes(token_dispatcher.all_to_all)),
        # tensor_parallel/mappings.py passes tensors of different sizes to all_gather and reduce_scatter, if several
        # ranks share an expert's matrices; NCCL accepts that, gloo does not
        (
            mappings,
            "_gather_along_first_dim",
            _unless_equal(mappings._gather_along_first_dim, _gathered),
        ),
        (
            mappings,
            "_reduce_scatter_along_first_dim",
            _unless_equal(mappings._reduce_scatter_along_first_dim, _scattered),
        ),
    ]


class _CudaTensorsAreHostTensors(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # `device="cuda"`: optimizer/clip_grads.py, optimizer/optimizer.py, pipeline_parallel/schedules.py
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        # `.cuda()`: models/common/language_module/language_module.py `setup_embeddings_and_output_layer`
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        # `param.type() == 'torch.cuda.FloatTensor'`: optimizer/distrib_optimizer.py, optimizer/clip_grads.py
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream:
    def record_event(self) -> _Stream:
        return self

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _with_plain_sizes(all_to_all: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def exchanged(group: Any, tokens: Tensor, *splits: Any, **options: Any) -> Tensor:
        plain = [None if sizes is None else [int(size) for size in sizes] for sizes in splits]
        return all_to_all(group, tokens, *plain, **options)

    return exchanged


def _unless_equal(
    equal: Callable[..., Tensor], own: Callable[[Tensor, Any, list[int]], Tensor]
) -> Callable[..., Tensor]:
    """Exchange rows by `own` if ranks' sizes differ, else as Megatron does."""

    def exchanged(
        rows: Tensor,
        group: Any,
        sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return equal(rows, group, sizes, use_global_buffer)
        return own(rows, group, list(sizes))

    return exchanged


def _gathered(rows: Tensor, group: Any, sizes: list[int]) -> Tensor:
    whole = rows.new_zeros(sum(sizes), *rows.shape[1:])
    torch.split(whole, sizes)[group.rank()].copy_(rows)
    dist.all_reduce(whole, group=group)
    return whole


def _scattered(rows: Tensor, group: Any, sizes: list[int]) -> Tensor:
    whole = rows.clone()
    dist.all_reduce(whole, group=group)
    own: Tensor = torch.split(whole, sizes)[group.rank()]
    return own.clone()
