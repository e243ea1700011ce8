"""The names of all numbers: each is documented, and none is a directory of another, as MLflow's file store has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from support.runs.fixtures import known_speed, work
from support.runs.training_files import done, write_rows

from burnish.tracking.trackers import read_metrics

__all__ = ["known_speed", "work"]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
PLACES = {
    "NAME": "[^/]+",
    "PHASE": "[a-z]+",
    "PART": "[a-z]+",
    "SOURCE": ".+",
    "n": "[0-9]+",
    "...": ".+",
}
"""What may stand for a word of the page, as patterns."""


def documented() -> list[str]:
    """All names in the first columns of the page; a short `/max` follows its row's first name."""
    names = []
    for cell in re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE):
        first, *others = re.findall(r"`(.+?)`", cell)
        names += [first, *(f"{Path(first).parent}{o}" if o[0] == "/" else o for o in others)]
    return names


def above_others(names: Iterable[str]) -> set[str]:
    """The names that are directories of others."""
    every = {*names}
    return {str(place) for name in every for place in Path(name).parents} & every


def pattern(name: str) -> re.Pattern[str]:
    words = re.split(r"(\.\.\.|\b(?:NAME|PHASE|PART|SOURCE)\b|(?<=@)n)", name)
    return re.compile("".join(PLACES.get(word) or re.escape(word) for word in words))


def test_no_documented_name_is_a_directory_of_another() -> None:
    assert above_others(["perf/memory", "perf/memory/all", "perf/memory_of/all"]) == {"perf/memory"}
    assert len(documented()) > 60
    assert above_others(documented()) == set()


def test_what_runs_log_is_documented_and_no_name_is_a_directory_of_another(work: Path) -> None:
    rows = [json.loads(line) for line in (work / "validation.jsonl").read_text().splitlines()]
    sources = [{**row, "data_source": ("easy", "org/hard")[i % 2]} for i, row in enumerate(rows)]
    write_rows(work / "sources.jsonl", sources)
    rewards = "reward.functions=[{function: 'rewards.py:letters'}, {function: 'rewards.py:same'}]"
    much = [rewards, "data.validation=[sources.jsonl]", "evaluation.n=2", "algorithm.advantage=gae",
            "algorithm.kl.coef=0.1", "algorithm.kl.target=0.1", "algorithm.kl.place=reward",
            "algorithm.mismatch_cap=2", "rollout.ahead=1"]  # fmt: skip
    sft = done(work, "sft", "sft.yaml", "name=sft_names", "steps=2", "evaluation.every=1")
    rl = done(work, "rl", "rl.yaml", "name=rl_names", "steps=2", "evaluation.every=1", *much)
    known = [pattern(name) for name in documented()]
    for run in (sft, rl):
        names = {name for row in read_metrics(run / "metrics.jsonl") for name in row} - {"step"}
        assert above_others(names) == set()
        assert {n for n in names if not any(each.fullmatch(n) for each in known)} == set()
    assert {"val/reward_parts/same", "val/org/hard/mean@2", "perf/max_memory_gb/all"} <= names
