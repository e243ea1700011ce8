from __future__ import annotations

import math

import pytest

from burnish.algorithms.evaluation import evaluation_stats, majority_score


@pytest.mark.parametrize(
    ("answers", "scores", "want"),
    [
        (["4", "4", "5"], [1, 1, 0], 1),
        (["5", "4", "5"], [0, 1, 0], 0),
        (["4", "5"], [1, 0], 0.5),  # a tie is shared, in either order
        (["5", "4"], [0, 1], 0.5),
        ([None, None, "4"], [0, 0, 1], 1),  # no answer is no vote
        ([None, None], [0, 0], 0),
        ([], [], 0),
        (["4", "4"], [1, 0.5], 0.75),  # the same answer, scored differently
    ],
)
def test_majority(answers: list, scores: list, want: float) -> None:
    assert majority_score(answers, scores) == want


def test_stats_of_several_prompts() -> None:
    scores = [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]
    answers = [["a", "b", "a"], ["x", "x", "y"], [None, "q", None]]
    values = evaluation_stats(scores, answers, 3).values_by_name()
    assert values == pytest.approx(
        {"mean@3": (2 / 3 + 1 / 3 + 0.5 / 3) / 3, "pass@3": 2 / 3, "maj@3": 0.5}
    )
    lenient = evaluation_stats(scores, answers, 3, solved=0.5).values_by_name()
    assert lenient["pass@3"] == 1


def test_shares_of_prompts_merge() -> None:
    scores, answers = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [["a", "b"], ["c", "d"], ["e", "e"]]
    whole = evaluation_stats(scores, answers, 2).values_by_name()
    first, rest = (
        evaluation_stats(scores[:1], answers[:1], 2),
        evaluation_stats(scores[1:], answers[1:], 2),
    )
    assert first.merge(rest).values_by_name() == pytest.approx(whole)


def test_one_sample_has_only_a_mean() -> None:
    assert list(evaluation_stats([[1.0], [0.0]], [["a"], ["b"]], 1)) == ["mean@1"]
    assert evaluation_stats([], [], 1) == {}


def test_samples_without_a_score_are_left_out() -> None:
    """As if those had not been sampled, and prompts without any score not been asked."""
    values = evaluation_stats([[1.0], [], [0.0, 1.0]], [["a"], [], ["b", "b"]], 2).values_by_name()
    assert values == {"mean@2": 0.75, "pass@2": 1.0, "maj@2": 0.75}
    nothing = evaluation_stats([[], []], [[], []], 2).values_by_name()
    assert list(nothing) == ["mean@2", "pass@2", "maj@2"]
    assert all(map(math.isnan, nothing.values()))
