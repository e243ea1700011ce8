"""Arrays with one entry per token: what everybody who joins, sends, saves or packs them must know.

Each is declared once, by the annotation of a field of `Completion` or `TrainingArrays`, and found by `columns_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Generic, NamedTuple, TypeVar, get_type_hints

import numpy as np

A = TypeVar("A")
"""Arrays on the host, or tensors."""


class TokenColumn(NamedTuple):
    """What a field with one entry per token holds."""

    dtype: type[np.generic]
    dims: int = 1
    """Dimensions of the array, of which the first is the tokens."""
    covers_prompt: bool = False
    """Of a completion: whether the prompt's tokens have entries too, and the last token none, which no forward pass read."""
    is_optional: bool = False
    """Whether it may be None: the field's default says so."""


@cache
def columns_of(record: type) -> dict[str, TokenColumn]:
    """Return the columns of a record's class, by field."""
    hints = get_type_hints(record, include_extras=True)
    return {
        each.name: kind._replace(is_optional=each.default is None)
        for each in fields(record)
        for kind in getattr(hints[each.name], "__metadata__", ())
    }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingArrays(Generic[A]):
    """What training knows of each token of a sequence: arrays in an `Example`, tensors in a `MicroBatch`.

    Entry t concerns the prediction of token t. None: not needed, or not yet known.
    """

    advantages: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] the advantage, 0 where not trained on."""
    old_logprobs: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] log-prob under the policy that the update is measured against."""
    sampled_logprobs: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] log-prob under the distribution that the generator drew from."""
    ref_logprobs: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] with a KL term: log-prob under the frozen reference model."""
    teacher_logprobs: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] with teachers: log-prob under that of the row; NaN if it has none."""
    returns: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] with a critic: its target, the value of the state before the token."""
    old_values: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] with a critic: its value of that state before the update."""
    labels: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] with preferences: of each token's answer, 1 if it is desirable and -1 if not; in a pair, the margin that is wanted."""
    weights: Annotated[A | None, TokenColumn(np.float32)] = None
    """[T] fine-tuning: a factor of the token's loss; None: 1."""
    experts: Annotated[A | None, TokenColumn(np.int16, dims=3)] = None
    """[T, L, k] the experts that the token goes to in each of L routers; None: the routers choose."""
