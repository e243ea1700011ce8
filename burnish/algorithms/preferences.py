"""Losses of preference optimization: of pairs of answers to one prompt, of which one was chosen, and of single answers with a label.

c and l are the chosen and the rejected answer of a pair. r(y) = log π(y) - log π₀(y) is an answer's log-ratio to the reference, summed
over its tokens; with `length_normalized` it is the mean over them. |y| is the number of tokens. Each function returns a loss per pair,
[P], or per answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from burnish.algorithms.aggregation import loss_lengths
from burnish.config.preferences import PairLossSettings, PreferenceSettings
from burnish.extend import ANSWER_LOSSES, PREFERENCE_LOSSES
from burnish.functions import load_function
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswers:
    """P answers: one side of P pairs, or single ones."""

    logprobs: Tensor
    """[P] fp32, log π of the answers."""
    reference: Tensor
    """[P] fp32, log π₀; 0 without a reference."""
    lengths: Tensor
    """[P] tokens that are trained on."""

    @property
    def means(self) -> Tensor:
        """[P] log π per token."""
        return self.logprobs / self.lengths

    def rewards(self, settings: PairLossSettings) -> Tensor:
        """[P] the implicit rewards β r."""
        ratios = self.logprobs - self.reference
        return settings.beta * (ratios / self.lengths if settings.length_normalized else ratios)


@dataclass(frozen=True, slots=True, eq=False)
class Side(ScoredAnswers):
    """One side of P pairs."""

    margins: Tensor = field(default_factory=lambda: torch.zeros(()))
    """[P] by how much the chosen answers should win."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelledAnswers(ScoredAnswers):
    """P single answers."""

    labels: Tensor
    """[P] 1 for a desirable answer, -1 for another, 0 for filler."""


PairLoss = Callable[[Side, Side, PairLossSettings], Tensor]
"""Takes the chosen and the rejected answers; returns the losses, [P]."""


def sigmoid(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """-log σ(β (r_c - r_l) - m) (DPO, arXiv 2305.18290, equation 7), with label smoothing ε as in cDPO. m is the row's margin (2402.10571)."""
    return _smoothed(_margin(chosen, rejected, settings) - chosen.margins, settings)


def ipo(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """(r_c/|c| - r_l/|l| - 1/(2β))² (IPO, arXiv 2310.12036, equation 17, per token as its authors and TRL have it)."""
    ratios = [(each.logprobs - each.reference) / each.lengths for each in (chosen, rejected)]
    return (ratios[0] - ratios[1] - 1 / (2 * settings.beta)) ** 2


def hinge(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """max(0, 1 - β (r_c - r_l) + m) (SLiC, arXiv 2305.10425, as arXiv 2309.06657 normalizes it). m is the row's margin."""
    return relu(1 - _margin(chosen, rejected, settings) + chosen.margins)


def simpo(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """-log σ(β (log π(c)/|c| - log π(l)/|l|) - γ - m) (SimPO, arXiv 2405.14734, equation 6). It takes no reference. m is the row's margin."""
    margin = settings.beta * (chosen.means - rejected.means)
    return _smoothed(margin - settings.simpo_gamma - chosen.margins, settings)


def orpo(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """-log σ(log odds(c) - log odds(l)), odds = p/(1-p), log p = log π/|y| (ORPO, arXiv 2403.07691, equation 7).

    The paper's λ is its weight beside `nll`. It takes no reference.
    """
    odds = [
        means - torch.log1p(-means.exp().clamp(max=1 - 1e-7))
        for means in (chosen.means, rejected.means)
    ]
    return -logsigmoid(odds[0] - odds[1])


def apo_zero(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """1 - σ(β r_c) + σ(β r_l): chosen up, rejected down (APO, arXiv 2408.06266, equation 7)."""
    rewards = [torch.sigmoid(each.rewards(settings)) for each in (chosen, rejected)]
    return 1 - rewards[0] + rewards[1]


def apo_down(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """σ(β r_c) + 1 - σ(β (r_c - r_l)): both down, rejected more (APO, arXiv 2408.06266, equation 8)."""
    margin = _margin(chosen, rejected, settings)
    return torch.sigmoid(chosen.rewards(settings)) + 1 - torch.sigmoid(margin)


def robust(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """[-(1-ε) log σ(x) + ε log σ(-x)] / (1-2ε), x = β (r_c - r_l) - m (rDPO, arXiv 2403.00409, equation 11). m is the row's margin."""
    margin = _margin(chosen, rejected, settings) - chosen.margins
    noise = settings.label_smoothing
    return (-(1 - noise) * logsigmoid(margin) + noise * logsigmoid(-margin)) / (1 - 2 * noise)


def nll(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """-log π(c)/|c|: supervised fine-tuning on the chosen answers, each of the same weight (RPO, arXiv 2404.19733)."""
    return -chosen.means


def kto(answers: LabelledAnswers, kl: float, settings: PreferenceSettings) -> Tensor:
    """w_d (1 - σ(β (r - z))) of a desirable answer, w_u (1 - σ(β (z - r))) of another one (KTO, arXiv 2402.01306, equation 8).

    z = `kl` is the mean r of answers to other prompts, at least 0. w_d and w_u are the weights in the settings.
    """
    signs = answers.labels.sign()
    desirable = settings.desirable_weight * (signs > 0)
    weights = desirable + settings.undesirable_weight * (signs < 0)
    return weights * torch.sigmoid(-signs * (answers.rewards(settings) - settings.beta * kl))


def _margin(chosen: Side, rejected: Side, settings: PairLossSettings) -> Tensor:
    """β (r_c - r_l), [P]."""
    return chosen.rewards(settings) - rejected.rewards(settings)


def _smoothed(margin: Tensor, settings: PairLossSettings) -> Tensor:
    noise = settings.label_smoothing
    return -(1 - noise) * logsigmoid(margin) - noise * logsigmoid(-margin)


def pair_loss(
    settings: PairLossSettings,
) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]:
    """Return the sum of `settings.loss`, each with its weight, over the pairs of the global batch.

    In a micro-batch the sequences 2i and 2i + 1 are the chosen and the rejected answer of a pair. Statistics, besides each loss by its
    name: `accuracy`, the share of pairs whose chosen answer has the higher implicit reward β r; `margin`, by how much;
    `reward/chosen`, `reward/rejected`; and `logprob/chosen`, `logprob/rejected`, those of the whole answers.
    """
    losses = {name: load_function(name, "method.loss", PREFERENCE_LOSSES) for name in settings.loss}

    def preference_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        chosen, rejected = _sides(outputs.logprobs, micro)
        pairs = micro.num_sequences // 2
        count = len(chosen.logprobs)
        loss = torch.zeros((), device=outputs.logprobs.device)
        stats = Stats({})
        for name, weight in settings.loss.items():
            own = losses[name](chosen, rejected, settings).sum()
            loss = loss + weight * own / pairs
            if len(settings.loss) > 1:
                stats[f"{name.rpartition(':')[2]}_loss"] = Mean(own.detach(), count)
        stats |= _judgements(chosen.rewards(settings), rejected.rewards(settings))
        for name, side in {"chosen": chosen, "rejected": rejected}.items():
            stats[f"logprob/{name}"] = Mean(side.logprobs.detach().sum(), count)
        return loss, stats

    return preference_loss


def answer_loss(
    settings: PreferenceSettings,
) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]:
    """Return the sum of `settings.loss`, each with its weight, over the answers of the global batch.

    Statistics: `accuracy`, the share of answers that are on their label's side of the reference point; and those of `pair_loss` of
    desirable (`chosen`) and of other answers (`rejected`).
    """
    losses = {name: load_function(name, "method.loss", ANSWER_LOSSES) for name in settings.loss}

    def labelled_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        answers = LabelledAnswers(*_columns(outputs.logprobs, micro))
        loss = torch.zeros((), device=outputs.logprobs.device)
        for name, weight in settings.loss.items():
            loss = loss + weight * losses[name](answers, micro.kl, settings).sum()
        rewards = answers.rewards(settings).detach()
        is_right = answers.labels * (rewards - settings.beta * micro.kl) > 0
        stats = Stats({"accuracy": Mean(is_right.sum(), (answers.labels != 0).sum())})
        for kind, chosen in {"chosen": answers.labels > 0, "rejected": answers.labels < 0}.items():
            for name, values in {"reward": rewards, "logprob": answers.logprobs.detach()}.items():
                stats[f"{name}/{kind}"] = Mean((values * chosen).sum(), chosen.sum())
        return loss / micro.num_sequences, stats

    return labelled_loss


def reward_loss(center: float) -> Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]:
    """Return -log σ(r_c - r_l - m) + `center` (r_c + r_l)², averaged over the pairs of the global batch.

    The first term is Bradley and Terry's (arXiv 2203.02155, equation 1), with the margin m of Llama 2 (2307.09288, equation 2). r is the
    value at a sequence's last token. Statistics:
    `accuracy`, `margin`, `reward/chosen`, `reward/rejected`.
    """

    def bradley_terry(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        count = (micro.cu_seqlens.numel() - 1) // 2
        last = micro.cu_seqlens[1 : 2 * count + 1].long() - 1
        chosen, rejected = outputs.values[last].view(count, 2).unbind(1)
        margins = 0.0 if micro.labels is None else micro.labels[last[::2]]
        losses = -logsigmoid(chosen - rejected - margins) + center * (chosen + rejected) ** 2
        return losses.sum() / (micro.num_sequences // 2), _judgements(chosen, rejected)

    return bradley_terry


def step_loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Return -log σ(r) of right steps and -log σ(-r) of wrong ones, averaged over the steps of the global batch (arXiv 2305.20050).

    r is the value after a step. Statistics: `accuracy`, the share of steps with r on their label's side of 0; `reward/right` and
    `reward/wrong`.
    """
    labels = torch.where(micro.loss_mask, micro.given("labels"), 0.0)
    values = torch.where(micro.loss_mask, outputs.values, 0.0)
    losses = torch.where(micro.loss_mask, -logsigmoid(labels * values), 0.0)
    seen = values.detach()
    stats = Stats({"accuracy": Mean((labels * seen > 0).sum(), micro.loss_mask.sum())})
    for kind, chosen in {"right": labels > 0, "wrong": labels < 0}.items():
        stats[f"reward/{kind}"] = Mean((seen * chosen).sum(), chosen.sum())
    return losses.sum() / micro.num_tokens, stats


def implicit_rewards(
    settings: PreferenceSettings,
) -> Callable[[TokenOutputs, MicroBatch], Tensor]:
    """Return a function that returns β (r - z) of each sequence of a micro-batch, [S]. KTO's z is 0 for pairs."""

    def rewards(outputs: TokenOutputs, micro: MicroBatch) -> Tensor:
        own = Side(*_columns(outputs.logprobs, micro)).rewards(settings)
        return own - settings.beta * micro.kl

    return rewards


def values_after_texts(outputs: TokenOutputs, micro: MicroBatch) -> Tensor:
    """Return the value at the last token of each sequence, [S]."""
    return outputs.values[micro.cu_seqlens[1:].long() - 1]


def _judgements(chosen: Tensor, rejected: Tensor) -> Stats:
    """Return which rewards [P] are higher, by how much, and what they are."""
    chosen = chosen.detach()
    rejected = rejected.detach()
    values = {
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "reward/chosen": chosen,
        "reward/rejected": rejected,
    }
    return Stats({name: Mean(each.sum(), len(each)) for name, each in values.items()})


def _sides(logprobs: Tensor, micro: MicroBatch) -> tuple[Side, Side]:
    """Return the chosen and the rejected answers of a micro-batch's pairs. Filler has none."""
    columns = _columns(logprobs, micro)
    count = len(columns[0]) // 2
    columns = [each[: 2 * count].view(count, 2) for each in columns]
    chosen, rejected = (Side(*(each[:, side] for each in columns)) for side in (0, 1))
    return chosen, rejected


def _columns(logprobs: Tensor, micro: MicroBatch) -> list[Tensor]:
    """Return what `ScoredAnswers` have, and the margins or labels, of all sequences. Those of filler are 0."""
    reference = torch.zeros_like(logprobs) if micro.ref_logprobs is None else micro.ref_logprobs
    sums = []
    for values in (logprobs, reference):
        masked = torch.where(micro.loss_mask, values.float(), 0.0)
        sums.append(torch.segment_reduce(masked, "sum", offsets=micro.cu_seqlens, unsafe=True))
    last = micro.cu_seqlens[1:].long() - 1
    labels = torch.zeros_like(sums[0]) if micro.labels is None else micro.labels[last]
    return [*sums, loss_lengths(micro), labels]
