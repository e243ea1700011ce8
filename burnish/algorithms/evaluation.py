"""Score answers to held-out prompts: mean@n, pass@n, maj@n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from burnish.tracking.stats import Mean, Stats


def majority_score(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Return the mean score of the commonest answers (self-consistency, arXiv 2203.11171).

    None is no vote. Without votes the score is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    # Winners have equally many votes, so the mean over them is the mean over their completions.
    won = [score for answer, score in zip(answers, scores, strict=True) if answer in winners]
    return sum(won) / len(won)


def evaluation_stats(
    scores: Sequence[Sequence[float]],
    answers: Sequence[Sequence[Hashable | None]],
    n: int,
    solved: float = 1.0,
) -> Stats:
    """Return `mean@n`, and with n > 1 `pass@n` and `maj@n`: means over prompts with a score.

    `scores` and `answers` are by prompt, then by sample; of `n` samples, those without a score are missing. A score of at least
    `solved` is correct.
    """
    if not scores:
        return Stats()
    scored = [number for number, group in enumerate(scores) if group]
    scores = [scores[i] for i in scored]
    answers = [answers[i] for i in scored]
    prompts = len(scores)
    stats = Stats({f"mean@{n}": Mean(sum(sum(group) / len(group) for group in scores), prompts)})
    if n > 1:
        passes = sum(any(score >= solved for score in group) for group in scores)
        majority = sum(map(majority_score, answers, scores))
        stats[f"pass@{n}"] = Mean(passes, prompts)
        stats[f"maj@{n}"] = Mean(majority, prompts)
    return stats
