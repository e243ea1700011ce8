"""Divergences in chunks and their gradients, against the formula on whole logits and against TRL's function."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.distributed.layout import Layout
from burnish.models.divergence import (
    DivergenceProbe,
    Head,
    HeadProbe,
    StatesProbe,
    TopProbe,
    TopReference,
    UniformReference,
    WholeReference,
)
from burnish.models.logprobs import LogitTransform, LogprobOptions
from burnish.models.parts import VocabularyPart
from burnish.models.scorer import ScoringPlan

WORDS, SIZE = 24, 8
MIXES = (0.0, 0.3, 1.0)
CASES = [*((mix, k) for k in (None, 3) for mix in MIXES), (0.0, 0)]
TRANSFORMS = (LogitTransform(), LogitTransform(0.5, softcap=3.0))


def plan() -> ScoringPlan:
    """Two sequences with a common prompt, of which a few tokens are trained on, and one without such."""
    ids = torch.tensor([1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 9])
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]).bool()
    return ScoringPlan.of(ids, torch.tensor([0, 4, 9, 11], dtype=torch.int32), mask)


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States and head of a student, and of a teacher of another width."""
    generator = torch.Generator().manual_seed(seed)
    count = len(plan().targets)
    shapes = ((count, SIZE), (WORDS, SIZE), (count, SIZE + 4), (WORDS, SIZE + 4))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def whole_logprobs(states: Tensor, weight: Tensor, options: LogprobOptions) -> Tensor:
    z = options.transform.scale * (states.double() @ weight.double().T)
    if (cap := options.transform.softcap) is not None:
        z = cap * torch.tanh(z / cap)
    return torch.log_softmax(z / options.temperature, dim=-1)


def by_formula(logp: Tensor, logq: Tensor, mix: float, k: int | None) -> Tensor:
    """`k` 0 is the uniform distribution in a teacher's place."""
    if k == 0:
        return -logp.mean(-1)
    p = logp.exp()
    q = logq.exp()
    if k is not None:
        top = q.topk(k, dim=-1).indices
        p, q = (
            torch.cat([own, 1 - own.sum(-1, keepdim=True)], -1)
            for own in (p.gather(1, top), q.gather(1, top))
        )
    if mix == 0:
        return (q * (q / p).log()).sum(-1)
    if mix == 1:
        return (p * (p / q).log()).sum(-1)
    m = (1 - mix) * p + mix * q
    return (mix * q * (q / m).log() + (1 - mix) * p * (p / m).log()).sum(-1)


def in_chunks(
    parts: tuple[Tensor, ...], options: LogprobOptions, mix: float, k: int | None, part: Any = None
) -> Tensor:
    """[T] as a teacher's pass and a student's compute it; the last scored token has no teacher."""
    states, weight, of_teacher, head = parts
    own = plan()
    with torch.no_grad():
        if k == 0:
            reference: Any = UniformReference()
        elif k is None:
            (said,) = StatesProbe().read(of_teacher, head, own, options, part)
            copied = HeadProbe().read(of_teacher, head, own, options, part)
            reference = WholeReference(said, copied, mix)
        else:
            reference = TopReference(*TopProbe(k).read(of_teacher, head, own, options, part), mix)
    taught = torch.arange(len(own.scored)) < len(own.scored) - 1
    probe = DivergenceProbe(reference, taught)
    return probe.read(states, weight, own, options, part)


@pytest.mark.parametrize(("mix", "k"), CASES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "softcap"])
def test_it_is_the_formula_with_its_gradient(
    mix: float, k: int | None, transform: LogitTransform
) -> None:
    states, weight, of_teacher, head = drawn(0)
    states.requires_grad_()
    weight.requires_grad_()
    options = LogprobOptions(8, 0.7, transform)  # two rows at a time
    found = in_chunks((states, weight, of_teacher, head), options, mix, k)
    upstream = torch.arange(1.0, len(found) + 1)
    gradients = torch.autograd.grad((found * upstream).sum(), (states, weight))
    own = plan()
    logq = whole_logprobs(of_teacher, head, options)
    wanted_rows = by_formula(whole_logprobs(states, weight, options), logq, mix, k)
    wanted = torch.zeros(len(found), dtype=torch.double)
    places = {token: row for row, token in enumerate(own.predicted.tolist())}
    rows = [places[token] for token in own.results.index.tolist()]
    wanted = wanted.index_put((own.scored[:-1],), wanted_rows[rows[:-1]])
    np.testing.assert_allclose(found.detach(), wanted.detach(), rtol=2e-5, atol=1e-6)
    oracle = torch.autograd.grad((wanted * upstream).sum(), (states, weight))
    for mine, theirs in zip(gradients, oracle, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_all_top_tokens_are_the_whole_vocabulary(mix: float) -> None:
    parts = drawn(1)
    options = LogprobOptions(64)
    np.testing.assert_allclose(
        in_chunks(parts, options, mix, WORDS),
        in_chunks(parts, options, mix, None),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of TRL's own
@pytest.mark.skipif(find_spec("trl") is None, reason="make nightly-environments installs TRL")
@pytest.mark.parametrize("mix", MIXES)
def test_it_is_trls_function(mix: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    states, weight, of_teacher, head = drawn(4)
    states.requires_grad_()
    weight.requires_grad_()
    given = (states, weight, of_teacher, head)
    found = in_chunks(given, LogprobOptions(8, temperature=0.7), mix, None)
    own = plan()
    places = {token: row for row, token in enumerate(own.predicted.tolist())}
    rows = [places[token] for token in own.results.index.tolist()][:-1]
    logits = (states @ weight.T, of_teacher @ head.T)
    wanted = GKDTrainer.generalized_jsd_loss(
        *(each[None, rows] for each in logits), beta=mix, temperature=0.7, reduction="sum"
    )
    np.testing.assert_allclose(found.sum().detach(), wanted.detach(), rtol=1e-5)
    pairs = zip(
        *(torch.autograd.grad(x, (states, weight)) for x in (found.sum(), wanted)), strict=True
    )
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-6)


def divided(layout: Layout) -> list[list[Tensor]]:
    """Each rank with half of the words: values, and the gradients of its states and its part of the head."""
    half = WORDS // 2
    tokens = range(layout.rank * half, (layout.rank + 1) * half)
    part = VocabularyPart(tokens, torch.distributed.group.WORLD)  # type: ignore[arg-type]
    found = []
    for mix, k in CASES:
        states, weight, of_teacher, head = drawn(2)
        states.requires_grad_()
        own = weight[tokens.start : tokens.stop].clone().requires_grad_()
        given = (states, own, of_teacher, head[tokens.start : tokens.stop].clone())
        values = in_chunks(given, LogprobOptions(8), mix, k, part)
        gradients = torch.autograd.grad(values.square().sum(), (states, own))
        torch.distributed.all_reduce(gradients[0])
        found.append([values.detach(), *gradients])
    return found


@pytest.mark.nightly
def test_ranks_divide_the_vocabulary() -> None:
    ranks = run_ranks(divided, 2)
    for number, (mix, k) in enumerate(CASES):
        states, weight, *teacher = drawn(2)
        states.requires_grad_()
        weight.requires_grad_()
        values = in_chunks((states, weight, *teacher), LogprobOptions(8), mix, k)
        of_states, of_weight = torch.autograd.grad(values.square().sum(), (states, weight))
        for rank in ranks:
            np.testing.assert_allclose(rank[number][0], values.detach(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(rank[number][1], of_states, rtol=1e-4, atol=1e-6)
        joined = torch.cat([rank[number][2] for rank in ranks])
        np.testing.assert_allclose(joined, of_weight, rtol=1e-4, atol=1e-6)


def test_a_head_is_a_copy() -> None:
    _, _, states, weight = drawn(3)
    head = HeadProbe().read(states, weight, plan(), LogprobOptions(8), None)
    assert isinstance(head, Head)
    assert head.weight.data_ptr() != weight.data_ptr()
