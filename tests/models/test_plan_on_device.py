"""`burnish.records.plan_on_device`: a plan's tensors in one copy, on a device that has no elements, and its bytes on the host."""

from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish import records
from burnish.records import batches

CUDA = torch.device("cuda", 0)
DTYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Inner:
    pair: tuple[torch.Tensor, ...]
    number: int = 3


@dataclass(frozen=True)
class Outer:
    inner: Inner
    alone: torch.Tensor
    nothing: torch.Tensor | None = None
    words: tuple[str, ...] = ("a",)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1
    )
)
def test_every_tensor_keeps_its_type_shape_and_bytes(kinds):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    value = Outer(Inner(tuple(tensors[1:])), tensors[0].T if tensors[0].dim() == 2 else tensors[0])
    copies = []

    def copy(tensor, device):
        copies.append(device)
        return tensor.clone()

    with mock.patch.object(batches, "to_device", copy):
        found = records.plan_on_device(value, CUDA)
    assert copies == [CUDA]
    assert (found.inner.number, found.nothing, found.words) == (3, None, ("a",))
    for ours, theirs in zip(
        (found.alone, *found.inner.pair), (value.alone, *value.inner.pair), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() % 16 == 0 or not ours.numel()


def test_on_the_host_nothing_is_copied():
    value = Outer(Inner(()), torch.ones(3))
    assert records.plan_on_device(value, torch.device("cpu")) is value
