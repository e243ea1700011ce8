"""A vocabulary that several ranks share: each holds some rows of the embedding and of the output layer.

The ranks work on the same tokens. Each looks up the tokens it has, and the sum over ranks is the
embedding, of which every rank keeps the rows of its own part of the tokens. In the output layer
each computes the logits of its own part of the vocabulary, and what a softmax needs of them comes
together as a few numbers per token. Left out: the arithmetic of the softmax
(`burnish.models.logprobs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from burnish.distributed.autograd import gather_rows, join, scatter_sums


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """The tokens whose rows this rank holds."""

    tokens: range
    """Their ids."""
    group: ProcessGroup
    """The ranks that share the vocabulary."""

    def columns(self, token_ids: Tensor) -> Tensor:
        """Which of this rank's rows each token [N] is, -1 where it is another rank's."""
        columns = token_ids - self.tokens.start
        return torch.where((columns >= 0) & (columns < len(self.tokens)), columns, -1)

    def embed(self, embedding: nn.Module, token_ids: Tensor) -> Tensor:
        """Embeddings [C / ranks, H] of this rank's part of tokens [C], where `embedding` has this rank's rows. Collective."""
        columns = self.columns(token_ids)
        rows = embedding(columns.clamp(min=0))
        return scatter_sums(torch.where(columns[:, None] >= 0, rows, 0), self.group)

    def merged(self, sums: Tensor) -> Tensor:
        """m, S, D and z_y - m [4, N] of the whole vocabulary from those of this rank's part (`burnish.models.logprobs`). Collective."""
        ranks = gather_rows(sums[None], self.group)
        top, total, dot, chosen = ranks.unbind(dim=1)
        highest = top.amax(dim=0)
        lift = top - highest
        share = lift.exp()
        return torch.stack(
            (
                highest,
                (share * total).sum(dim=0),
                (share * (dot + total * lift)).sum(dim=0),
                (chosen + lift).amax(dim=0),
            )
        )

    def all_rows(self, rows: Tensor) -> Tensor:
        """The hidden states of all ranks' tokens from those of this rank's; the ranks' gradients add up. Collective."""
        return gather_rows(rows, self.group)

    def all_values(self, values: Tensor) -> Tensor:
        """A number of each of all ranks' tokens from those of this rank's, in which every rank goes on alike. Collective."""
        return join(values, len(values), self.group)
