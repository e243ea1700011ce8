from __future__ import annotations

import pytest
import torch
from support.ranks.processes import run_ranks
from torch import Tensor, nn

from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.models.logprobs import LogitTransform, LogprobOptions, token_logprobs
from burnish.models.parts import ShardRule, VocabularyPart

CPU = torch.device("cpu")
VOCAB, WIDTH, TOKENS, RANKS = 11, 6, 9, 3
OPTIONS = (
    LogprobOptions(chunk=4),
    LogprobOptions(chunk=9, temperature=0.6, transform=LogitTransform(1.5, 2.0)),
)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and what comes back for log-probs and entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = 3 * torch.randn(VOCAB, WIDTH, generator=generator)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    upstream = torch.randn(2, TOKENS, generator=generator)
    upstream[:, 5] = 0
    return hidden, weight, targets, upstream


def part_of(layout: Layout) -> VocabularyPart:
    group = Mesh.of(Layout(layout.rank, layout.world, tensor=layout.world), 1, CPU).tensor
    assert group is not None
    return VocabularyPart(ShardRule.of(VOCAB, 0, layout.rank, layout.world).spans[0], group)


def score(
    options: LogprobOptions, part: VocabularyPart | None = None, learned: Tensor | None = None
) -> list[Tensor]:
    """Log-probs, entropy, and the gradients of hidden states and weight, each of two backward passes."""
    hidden, weight, targets, upstream = inputs()
    if part is not None:
        weight = weight[part.tokens.start : part.tokens.stop]
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    outputs = token_logprobs(hidden, weight, targets, options, part, learned)
    first = torch.autograd.grad(outputs, (hidden, weight), list(upstream), retain_graph=True)
    again = torch.autograd.grad(outputs, (hidden, weight), list(upstream))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other), "a backward pass changed what was saved for it"
    return [output.detach() for output in outputs] + list(first)


def score_rank(layout: Layout) -> list[list[Tensor]]:
    part = part_of(layout)
    learned = torch.tensor([row for row in range(TOKENS) if row != 5])
    return [[*score(options, part), *score(options, part, learned)[2:]] for options in OPTIONS]


def test_log_probs_of_a_shared_vocabulary_are_those_of_a_whole_one() -> None:
    ranks = run_ranks(score_rank, RANKS)
    for number, options in enumerate(OPTIONS):
        logprobs, entropy, of_hidden, of_weight = score(options)
        for rank in ranks:
            torch.testing.assert_close(rank[number][0], logprobs)
            torch.testing.assert_close(rank[number][1], entropy)
        for place in (2, 4):
            torch.testing.assert_close(sum(rank[number][place] for rank in ranks), of_hidden)
            joined = torch.cat([rank[number][place + 1] for rank in ranks])
            torch.testing.assert_close(joined, of_weight)


def embed_rank(layout: Layout) -> tuple[Tensor, Tensor]:
    part = part_of(layout)
    hidden, weight, targets, _ = inputs()
    rows = weight[part.tokens.start : part.tokens.stop].clone()
    embedding = nn.Embedding.from_pretrained(rows, freeze=False)
    embedded = part.embed(embedding, targets)
    own = slice(layout.rank * len(embedded), (layout.rank + 1) * len(embedded))
    embedded.backward(hidden[own])
    assert embedding.weight.grad is not None
    return embedded.detach(), embedding.weight.grad


def test_every_rank_gets_the_embeddings_of_its_tokens() -> None:
    hidden, weight, targets, _ = inputs()
    embedded, gradients = zip(*run_ranks(embed_rank, RANKS), strict=True)
    torch.testing.assert_close(torch.cat(embedded), weight[targets])
    wanted = torch.zeros(VOCAB, WIDTH).index_add(0, targets, hidden)
    torch.testing.assert_close(torch.cat(gradients), wanted)


@pytest.mark.parametrize(("token", "column"), [(3, -1), (4, 0), (7, 3), (8, -1)])
def test_which_row_a_token_is(token: int, column: int) -> None:
    part = VocabularyPart(range(4, 8), group=None)  # type: ignore[arg-type]
    assert part.columns(torch.tensor([token])).tolist() == [column]
