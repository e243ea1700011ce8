from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import cut, loss, make_examples, train
from support.models.engines import CPU, make_engine
from support.models.tiny import VOCAB, save_tiny
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.torch.activation_offload import ActivationOffload

WIDTH = 24


class Keep(torch.autograd.Function):
    """The identity; saves several views of its input, and `seen` gets them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[list[Tensor]]) -> Tensor:
        ctx.save_for_backward(x, x.t(), x[1:3], x[:, ::2], x.view(torch.int32), x.new_ones(3))
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(list(ctx.saved_tensors))
        return gradients[0], None


class Mixing(nn.Module):
    """A layer that saves its input and its transpose for products with each other, and a tensor twice."""

    def __init__(self, seen: list[list[Tensor]], fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.seen, self.fails = seen, fails

    def forward(self, x: Tensor) -> Tensor:
        x = Keep.apply(x, self.seen)
        square = (x @ self.weight.t()).tanh()
        if self.fails:
            raise InterruptedError
        return square @ (square.t() @ square) / WIDTH + x * square


def plainly(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def again(call: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False)


def make_layers(count: int = 5) -> tuple[list[Mixing], list[list[Tensor]]]:
    torch.manual_seed(0)
    seen: list[list[Tensor]] = []
    return [Mixing(seen) for _ in range(count)], seen


def gradients_of(layers: list[Mixing], run: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(1)
    first = torch.randn(16, WIDTH, requires_grad=True)
    x = first
    for layer in layers:
        x = run(layer.__call__, x)
    x.square().sum().backward()
    leaves = [first, *(layer.weight for layer in layers)]
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.fixture
def arena() -> Arena:
    return Arena(CPU, 1 << 16)


@pytest.mark.parametrize("run", [plainly, again])
def test_gradients_are_the_same_and_the_host_memory_is_kept(
    arena: Arena, run: Callable[..., Any]
) -> None:
    layers, _ = make_layers()
    wanted = gradients_of(layers, run)
    offload = ActivationOffload(arena, CPU)
    held = []
    for _ in range(4):
        with offload.forward_and_backward():
            found = gradients_of(layers, offload.around(run))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
        assert len(found) == len(wanted) == 6
        held.append(arena.held)
        assert arena.used == 0
    assert held[0] > 0
    assert len(set(held[1:])) == 1
    assert len(arena._regions) == 1


def test_views_come_back_as_the_views_they_were(arena: Arena) -> None:
    layers, seen = make_layers()
    offload = ActivationOffload(arena, CPU)
    with offload.forward_and_backward():
        gradients_of(layers, offload.around(plainly))
    assert len(seen) == len(layers)
    for x, transposed, rows, columns, words, ones in seen:
        same = x.untyped_storage().data_ptr()
        for view in (transposed, rows, columns, words):
            assert view.untyped_storage().data_ptr() == same
        for view, wanted in ((transposed, x.t()), (rows, x[1:3]), (columns, x[:, ::2])):
            assert view.stride() == wanted.stride()
            assert view.storage_offset() == wanted.storage_offset()
            assert torch.equal(view, wanted)
        assert torch.equal(words, x.view(torch.int32))
        assert ones.tolist() == [1.0] * 3


class Watch(torch.autograd.Function):
    """x², which notes the storages that it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[StorageWeakRef]) -> Tensor:
        own = x.clone()
        ctx.save_for_backward(own)
        noted.append(StorageWeakRef(own.untyped_storage()))
        return x * x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.saved_tensors[0] * gradients[0], None


class Watched(nn.Module):
    def forward(self, x: Tensor, noted: list[StorageWeakRef]) -> Tensor:
        return Watch.apply(x, noted)


def test_all_but_the_last_layers_leave_the_device(arena: Arena) -> None:
    offload, noted = ActivationOffload(arena, CPU), list[StorageWeakRef]()
    run, layer = offload.around(plainly), Watched()
    x = first = torch.full((40, 40), 0.99, requires_grad=True)
    with offload.forward_and_backward():
        for _ in range(6):
            x = run(layer.__call__, x, noted)
        assert [reference.expired() for reference in noted] == [True] * 5 + [False]
        assert arena.used == 5 * -(-first.nbytes // 512) * 512
        x.sum().backward()
        assert arena.used == 0


def test_what_raises_in_a_layer_leaves_neither_hooks_nor_memory(arena: Arena) -> None:
    layers, _ = make_layers()
    wanted = gradients_of(layers, plainly)
    offload = ActivationOffload(arena, CPU)
    layers[3].fails = True

    def fail() -> None:
        with pytest.raises(InterruptedError), offload.forward_and_backward():
            gradients_of(layers, offload.around(plainly))

    fail()
    gc.collect()
    assert arena.used == 0
    layers[3].fails = False
    assert saved_by_hand() == "plain"
    with offload.forward_and_backward():
        found = gradients_of(layers, offload.around(plainly))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def saved_by_hand() -> str:
    """Whether autograd saves a tensor as it is."""
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 2
    product = y * y
    return "plain" if product.grad_fn._saved_self.data_ptr() == y.data_ptr() else "moved"


def test_outside_of_a_pass_nothing_is_moved(arena: Arena) -> None:
    layers, _ = make_layers(3)
    offload = ActivationOffload(arena, CPU)
    wanted = gradients_of(layers, plainly)
    found = gradients_of(layers, offload.around(plainly))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert arena.held == 0


class Spoiling(nn.Module):
    """Writes into what has been saved, at once."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y * y
        y.detach().add_(1)
        return z


def test_what_is_changed_after_it_was_saved_is_refused(arena: Arena) -> None:
    offload, layer = ActivationOffload(arena, CPU), Spoiling()
    run = offload.around(plainly)
    x = torch.randn(64, 64, requires_grad=True)
    with offload.forward_and_backward():
        for _ in range(3):
            x = run(layer.__call__, x)
        with pytest.raises(RuntimeError, match="changed since"):
            x.sum().backward()


def test_a_tensor_that_was_changed_and_saved_again_is_saved_as_it_is_then(arena: Arena) -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            return x * count

    offload, layer = ActivationOffload(arena, CPU), Counting()
    run = offload.around(plainly)
    count, x = torch.zeros(64, 64), (first := torch.ones(64, 64, requires_grad=True))
    with offload.forward_and_backward():
        for _ in range(3):
            count = count + 1
            x = run(layer.__call__, x, count.data)
        x.sum().backward()
    assert first.grad is not None
    assert first.grad.unique().tolist() == [6.0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {f: save_tiny(root / f, f, torch.float32) for f in ("qwen3", "gemma3_text", "qwen3_moe")}


@pytest.fixture
def alone() -> Iterator[Layout]:
    with process_group(CPU, 60.0) as layout:
        yield layout


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        ("qwen3", "bf16", "none"),
        ("qwen3", "bf16", "full"),
        ("gemma3_text", "fp32", "full"),
        ("qwen3_moe", "fp32", "none"),
    ],
)
def test_an_engine_computes_the_same_bit_for_bit(
    models: dict[str, Path], alone: Layout, family: str, precision: str, checkpointing: str
) -> None:
    settings = {"precision": precision, "activation_checkpointing": checkpointing}
    plain = make_engine(alone, models[family], **settings)
    moving = make_engine(alone, models[family], activation_offload=True, **settings)
    wanted, found = (train(engine, make_examples(VOCAB), 3) for engine in (plain, moving))
    assert found["losses"] == wanted["losses"]
    assert found["norms"] == wanted["norms"]
    for mine, theirs in zip(found["weights"], wanted["weights"], strict=True):
        assert torch.equal(mine[2], theirs[2]), mine[0]
    assert plain.mesh.arena.held == 0
    assert moving.mesh.arena.held > 0
    assert moving.mesh.arena.used == 0


def test_an_exception_in_the_loss_leaves_an_engine_as_it_was(
    models: dict[str, Path], alone: Layout
) -> None:
    engine, other = (
        make_engine(alone, models["qwen3"], activation_offload=moves) for moves in (True, False)
    )
    batch = cut(make_examples(VOCAB), alone, 3)

    def failing(outputs: Any, micro: Any) -> Any:
        raise InterruptedError

    def fail() -> None:
        with pytest.raises(InterruptedError):
            engine.forward_backward(batch, failing)

    fail()
    gc.collect()
    assert engine.mesh.arena.used == 0
    values = [each.forward_backward(batch, loss).values_by_name() for each in (engine, other)]
    assert values[0] == values[1]
