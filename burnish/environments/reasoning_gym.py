"""Data sets of the package reasoning-gym: it makes the questions and scores the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from burnish.environments.base import Action, Environment, Message, Observation
from burnish.errors import MissingError, UsageError
from burnish.functions import did_you_mean, failure


class ReasoningGym(Environment):
    """One question and one answer. The answer stands between `<answer>` and `</answer>`, or is the whole text."""

    def __init__(
        self,
        reasoning_gym: str,
        size: int = 500,
        seed: int = 0,
        system: str = "direct",
        **settings: Any,
    ) -> None:
        """`system` names one of the package's system prompts, and `settings` are the data set's own."""
        self._arguments = reasoning_gym, size, seed, json.dumps(settings, sort_keys=True)
        self._index = 0

    @classmethod
    def rows(
        cls,
        reasoning_gym: str = "",
        size: int = 500,
        seed: int = 0,
        system: str = "direct",
        **settings: Any,
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the questions. A row has only the question's number: the data set makes the rest again."""
        questions = _dataset(reasoning_gym, size, seed, json.dumps(settings, sort_keys=True))
        from reasoning_gym.utils import SYSTEM_PROMPTS

        if system not in SYSTEM_PROMPTS:
            raise UsageError(
                f"reasoning-gym has no system prompt {system}",
                have=f"rollout.environment.kwargs.system: {system}",
                want=", ".join(SYSTEM_PROMPTS),
                do=did_you_mean(system, SYSTEM_PROMPTS) or "correct it",
            )
        opening = {"role": "system", "content": SYSTEM_PROMPTS[system]}
        for index in range(size):
            entry = questions[index]
            asked = {"role": "user", "content": entry["question"]}
            yield {
                "prompt": [opening, asked],
                "answer": str(entry["answer"]),
                "data_source": reasoning_gym,
                "index": index,
            }

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """See `Environment.begin`."""
        self._index = int(row["index"])
        return ()

    def step(self, action: Action) -> Observation:
        """Score the answer."""
        from reasoning_gym.utils import extract_answer

        questions = _dataset(*self._arguments)
        answer = extract_answer(action.text)
        said = action.content.strip() if answer is None else answer
        try:
            score = float(questions.score_answer(said, questions[self._index]))
        except Exception:  # noqa: BLE001 - some data sets raise for an answer of another form, which is wrong then
            return Observation(rewards={"score": 0.0}, done=True, metrics={"unreadable": 1})
        return Observation(rewards={"score": score}, done=True)


@lru_cache(maxsize=4)
def _dataset(name: str, size: int, seed: int, settings: str) -> Any:
    """Return a data set. Raises `UsageError` for an unknown one, or settings that it refuses."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingError(
            "reasoning-gym is not installed",
            have="rollout.environment.reasoning_gym",
            do="pip install 'burnish[gym]'",
        ) from error
    if name not in DATASETS:
        raise UsageError(
            f"reasoning-gym has no data set {name}",
            want=f"one of its {len(DATASETS)} names",
            do=did_you_mean(name, DATASETS) or "see reasoning_gym.factory.DATASETS",
        )
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"reasoning-gym's {name} refuses rollout.environment.kwargs",
            have=failure(error),
            do="correct them",
        ) from error
