import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.models.packing import RowMap, select_rows

CPU = torch.device("cpu")


@draws(60)
@given(size=st.integers(1, 12), data=st.data())
def test_taking_rows_equals_indexing(size, data):
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=40)), dtype=np.int64)
    rows = RowMap.of(index, CPU)
    results = []
    for ours in (True, False):
        source = torch.arange(size * 3.0).view(size, 3).requires_grad_()
        taken = rows.take(source) if ours else source[torch.from_numpy(index)]
        (taken * torch.arange(taken.numel()).view(taken.shape)).sum().backward()
        results.append((taken, source.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    for sources, _ in rows.rounds:
        assert len(sources.unique()) == len(sources)
    assert sum(len(sources) for sources, _ in rows.rounds) == len(index)


def test_bf16_gradients_are_summed_in_fp32():
    """256 ones and a one: in bf16, whose grain at 256 is 2, the last would be lost."""
    source = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    count = 258
    RowMap.of(np.zeros(count, dtype=np.int64), CPU).take(source).sum().backward()
    assert source.grad.item() == count


def test_selection_with_zeroed_rows():
    source = torch.randn(4, 2, requires_grad=True)
    kept, others = torch.tensor([2, 0]), torch.tensor([1, 3])
    backward = torch.tensor([1, 0, 0, 1])
    result = select_rows(source, kept, backward, others)
    result.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(result, source[kept])
    assert source.grad.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
