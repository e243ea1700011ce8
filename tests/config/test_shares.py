from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from burnish.config.load import read_config
from burnish.config.shares import exact_part, part_of, steps_between
from burnish.errors import UsageError


@given(ratio=st.integers(0, 100), total=st.integers(1, 100_000))
def test_a_share_of_the_steps_is_that_of_transformers(ratio: int, total: int) -> None:
    arguments = TrainingArguments(output_dir="x", warmup_steps=ratio / 100, report_to=[])
    want = arguments.get_warmup_steps(total) if 0 < ratio < 100 else ratio * total // 100
    got = part_of(f"{ratio}%", total)
    # A product of floats such as 0.07 · 100 lies above the whole number that it stands for, and transformers rounds it up.
    assert want - 1 <= got <= want
    assert got == want or exact_part(f"{ratio}%", total) == got


@given(parts=st.integers(1, 12), per_epoch=st.integers(1, 60), epochs=st.integers(1, 4))
def test_parts_of_an_epoch_end_with_it(parts: int, per_epoch: int, epochs: int) -> None:
    between = steps_between(f"1/{parts} epoch", Fraction(per_epoch))
    ends = [
        step for step in range(1, epochs * per_epoch + 1) if step // between > (step - 1) // between
    ]
    assert {per_epoch * epoch for epoch in range(1, epochs + 1)} <= set(ends)
    assert len(ends) == epochs * min(parts, per_epoch)


@given(every=st.integers(1, 9), step=st.integers(1, 99))
def test_a_number_of_steps_divides_the_steps_that_are_due(every: int, step: int) -> None:
    between = steps_between(every, Fraction(7, 2))
    assert (step // between > (step - 1) // between) == (step % every == 0)


@pytest.mark.parametrize(
    "override",
    [
        *(f"optim.warmup_steps={text}" for text in ("10%", "2.5%", "0%", "100%", "7")),
        *(f"evaluation.every={text}" for text in ("1 epoch", "2 epochs", "1/4 epoch", "0.5 epoch")),
        "checkpoint.save_every=1/4 epoch",
        "optim.decay_steps=20%",
    ],
)
def test_shares_that_are_read(override: str) -> None:
    read_config(None, [override])


@pytest.mark.parametrize(
    "override",
    [
        *(f"optim.warmup_steps={text}" for text in ("0.1", "-5%", "101%", "10 %", "1 epoch", "%")),
        *(f"evaluation.every={text}" for text in ("10%", "1/0 epoch", "epoch", "-1 epoch", "0.5")),
        "checkpoint.save_every=10%",
    ],
)
def test_shares_that_mean_nothing(override: str) -> None:
    with pytest.raises(UsageError):
        read_config(None, [override])
