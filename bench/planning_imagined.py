"""A simulated accelerator for `bench.planning`: counts the memory of a model of full size without having it.

torch lets a program register its own kind of device. Tensors on this one are fake: they have shapes but no
elements. Tensors on the host are real. So the engine uses its code for accelerators (one chunk of
logits, Triton's passes over them, fused norms, attention over variable lengths), FSDP2 gets streams that do
nothing, and torch's memory tracker counts. Values that a program reads back from the device are made up: norms are 1, and every
row has a gradient. Left out: an allocator's rounding, and the workspaces of kernels.

The registration changes the process for good, so nothing else is measured in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import AutoConfig

from bench.planning_cases import MIXED, Case
from burnish.algorithms.fine_tuning import sft_loss
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.factory import make_engine
from burnish.engines.optim.optimizer import local
from burnish.models.flops import ModelFlops
from burnish.models.meta_init import count_flops
from burnish.records import Batch, Example

NAME = "imagined"


def imagined_peak(case: Case, layout: Layout) -> dict[str, int]:
    """Return the peak of a supervised update on the device, in bytes, by torch's memory tracker."""
    config = RunConfig.model_validate(case.settings())
    fresh = dict(config.model.fresh) if isinstance(config.model.fresh, dict) else {}
    hf = AutoConfig.for_model(fresh.pop("model_type"), **fresh)
    tracker = _Tracker()
    with imagined_accelerator() as device:
        engine = make_engine(
            hf,
            config.engine,
            config.optim,
            layout=layout,
            device=device,
            lora=config.model.adapter,
        )
        batch = share_of(case, count_flops(hf))
        tracker.track_external(*(local(s.tensor) for part in Part for s in engine.shards(part)))
        with tracker:
            engine.forward_backward(batch, sft_loss())
            engine.optim_step(1e-5)
        engine.close()
    return {"update": int(tracker.get_tracker_snapshot("peak")[device]["Total"])}


def share_of(case: Case, flops: ModelFlops) -> Batch:
    """Return one share of a step's batch, divided alone. Its sequences fill all tokens; balancing many shares may not achieve that."""
    rng = np.random.default_rng(0)
    config = RunConfig.model_validate(case.settings())
    lengths = [int(case.together * part) for part in MIXED] * case.microbatches
    examples = [Example(rng.integers(3, 2048, n), np.arange(n) > 0) for n in lengths]
    return make_batch(examples, Layout(), config.microbatch_tokens, flops)


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Counts memory without telling gradients apart, because the hooks for that cannot be put on frozen weights."""

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        sizes: tuple[int, int] = super()._track_module_params_and_buffers(
            module, install_grad_hooks=False
        )
        return sizes


@contextmanager
def imagined_accelerator() -> Iterator[torch.device]:
    """Yield the device. In the block it uses the code for CUDA's kernels, which have versions for fake tensors."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Backend())
        # CUDA has one kernel for this. Else torch composes it of operations, which hold their results.
        torch.library.impl("aten::silu_backward", "PrivateUse1", lambda g, x: torch.empty_like(x))
    attention = mock.patch("burnish.models.kernels.attention.has_varlen_kernel", _has_varlen_kernel)
    pages = mock.patch(
        "burnish.rollout.builtin.paged_decoding.has_varlen_kernel", _has_varlen_kernel
    )
    norm = mock.patch("torch.nn.functional.rms_norm", _rms_norm)
    passes = mock.patch("burnish.models.logprobs._kernels", _kernels)
    sums = mock.patch("burnish.models.packing._kernels", _kernels)
    rotation = mock.patch("burnish.models.kernels.fused._kernels", _kernels)
    triton = mock.patch("burnish.models.packing.compiles_triton", _yes)
    triton_too = mock.patch("burnish.models.kernels.fused.compiles_triton", _yes)
    ampere = mock.patch("burnish.models.logprobs.is_sm80_or_newer", _yes)
    with attention, pages, norm, passes, sums, rotation, triton, triton_too, ampere, _Fakes():
        yield torch.device(NAME, 0)


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Return True. (A mock would keep the queries of every call, and their graphs.)"""
    return True


def _yes(device: torch.device) -> bool:
    """Return True."""
    return True


def _kernels(hidden: Tensor | None = None) -> Any:
    """Return the kernels."""
    return _Kernels


def _rms_norm(rows: Tensor, shape: Any, weight: Tensor | None, epsilon: float) -> Tensor:
    """Compute it in one kernel, as CUDA does. For this device torch would compose it of many operations that keep fp32."""
    normed: Tensor = _Norm.apply(rows, weight)  # type: ignore[no-untyped-call]
    return normed


class _Norm(torch.autograd.Function):
    """That kernel's memory, without its numbers: it keeps its input and one fp32 number per row. Its one call fills memory with 0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        return torch.zeros_like(rows), None if weight is None else torch.empty_like(weight)


class _Kernels:
    """Stand-ins for Triton's kernels, of one call each. Those of `burnish.models.kernels.triton_logprobs` overwrite logits."""

    @staticmethod
    def softmax_sums(logits: Tensor, *_: object) -> Tensor:
        return logits.new_zeros((4, len(logits)), dtype=torch.float32)

    @staticmethod
    def write_gradients(logits: Tensor, *_: object) -> None:
        logits.zero_()

    @staticmethod
    def rotate_heads(rows: Tensor, rotation: object, *, backward: bool = False) -> Tensor:
        return torch.zeros_like(rows)

    @staticmethod
    def add_segments(
        values: Tensor, order: Tensor, starts: Tensor, places: Tensor, count: int
    ) -> Tensor:
        return values.new_zeros((count, *values.shape[1:]))


class _Nothing:
    """A stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: object = None) -> _Nothing:
        return self

    def record(self, stream: object = None) -> _Nothing:
        return self


class _Backend(_DummyBackendModule):
    """The functions of `torch.imagined` that are called."""

    Stream = Event = _Nothing

    def current_stream(self, device: object = None) -> _Nothing:
        return _Nothing()

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: object = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class _Fakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes operations on the device fake, and leaves those on the host alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        if func in (torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default):
            return args[0].clone()
        leaves = tree_leaves(given)
        there = any(isinstance(x, torch.device) and x.type == NAME for x in leaves)
        if not there and not any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        with self._fake:
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            args, kwargs = tree_map_only(Tensor, self._faked, given)
            return func(*args, **kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        """Return a fake of `tensor.detach()`: torch remembers it by a weak reference, and could not swap a parameter that has one."""
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor.detach())
