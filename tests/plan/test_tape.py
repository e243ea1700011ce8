"""Lifetimes of tensors, against chains counted by hand and against torch's allocator."""

import gc

import numpy as np
import torch
from torch.nn.functional import silu
from torch.profiler import ProfilerActivity, profile

from burnish.plan.tape import Moment, Tape


def two_layers():
    """x → a = x W (keeps x) → b = f(a) (keeps a) → c = b V (keeps b)."""
    tape = Tape()
    tape.add(["x"], {"a": 30.0}, ["x"], weight=300, product=True)
    tape.add(["a"], {"b": 30.0}, ["a"])
    tape.add(["b"], {"c": 10.0}, ["b"], weight=300, product=True)
    return tape.run({"x": 10.0})


def test_what_is_kept():
    passes = two_layers()
    assert passes.kept == 10 + 30 + 30
    assert passes.products == 10 + 30 + 10


def test_forward():
    """With no backward to come a and b are the most that is alive at once."""
    assert two_layers().inference == 60


def test_backward():
    """The last operation holds x, a, b and the gradients of c and b; the first x and those of a and x, with both weights'."""
    passes = two_layers()
    assert passes.backward == (Moment(110.0, 300), Moment(50.0, 600))
    assert passes.peak == 110


def test_a_tensor_that_is_read_twice_has_one_gradient():
    tape = Tape()
    tape.add(["x"], {"y": 10.0})
    tape.add(["x", "y"], {"z": 10.0})
    passes = tape.run({"x": 10.0})
    assert passes.kept == 0
    assert passes.peak == 30


def test_a_gated_mlp_as_torch_allocates_it():
    tokens, hidden, inner = 512, 64, 256
    tape = Tape()
    tape.add(["x"], {"gate": 4.0 * inner}, ["x"], weight=hidden * inner)
    tape.add(["gate"], {"acted": 4.0 * inner}, ["gate"])
    tape.add(["x"], {"up": 4.0 * inner}, ["x"], weight=hidden * inner)
    tape.add(["acted", "up"], {"inner": 4.0 * inner}, ["acted", "up"])
    tape.add(["inner"], {"d": 4.0 * hidden}, ["inner"], weight=hidden * inner)
    passes = tape.run({"x": 4.0 * hidden})
    gate, up, down = (
        torch.randn(*size, requires_grad=True)
        for size in ((inner, hidden),) * 2 + ((hidden, inner),)
    )
    x = torch.randn(tokens, hidden, requires_grad=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        d = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        upstream = torch.ones_like(d)
        d.backward(upstream)
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    # On a tape somebody else has made x, and nobody holds d any more.
    measured = np.cumsum([event.nbytes() for event in events]).max() + x.nbytes - d.nbytes
    planned = max(tokens * m.tokens + 4 * m.weights for m in passes.backward)
    assert abs(planned / measured - 1) < 0.05
