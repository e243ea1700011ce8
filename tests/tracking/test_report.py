"""Reports, as their files have them; tests/view/test_page.py looks at them in a browser."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.runs.rollouts import made_rollout, table_of

from burnish.errors import CorruptError
from burnish.records import Rollout
from burnish.tracking import report as module
from burnish.tracking.report import MAX_CURVES, MAX_POINTS, choose_examples, write_report
from burnish.tracking.rollouts import read_rollouts, write_rollouts
from burnish.tracking.rundir import RunDirectory, environment, write_atomically
from burnish.tracking.trackers import JsonlTracker


class Report(HTMLParser):
    """A report as a browser would see it: tags, their attributes, and the answers of the API."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.answers: dict[str, Any] = {}
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"type": "application/json", "id": "frozen"}):
            self.answers = self.answers or json.loads(data)
        elif self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text += data

    def values(self, name: str) -> list[list[Any]]:
        """The steps and values of a metric."""
        (metrics,) = self.answers["metrics"].values()
        return [
            list(pair) for pair in zip(metrics[name]["steps"], metrics[name]["values"], strict=True)
        ]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "demo")


def log(run: RunDirectory, steps: dict[int, dict[str, float]]) -> None:
    tracker = JsonlTracker(run.metrics)
    for step, values in steps.items():
        tracker.log(step, values)
    tracker.close()


def report(run: RunDirectory) -> Report:
    path = write_report(run.root)
    assert path == run.report
    return Report(path.read_text("utf-8"))


def reinforcement_learning(run: RunDirectory) -> None:
    log(
        run,
        {
            0: {"val/mean@1": 0.12, "val/pass@4": 0.3},
            1: {
                "reward/mean": 0.25,
                "actor/skipped": 0.0,
                "timing_s/rollout": 1.0,
                "timing_s/step": 3.0,
            },
            2: {
                "reward/mean": math.nan,
                "reward/errors": 2.0,
                "actor/skipped": 1.0,
                "timing_s/rollout": 2.0,
                "timing_s/step": 3.0,
            },
            3: {"reward/mean": 0.75, "val/mean@1": 0.96, "val/pass@4": 1.0, "custom/thing": 7.0},
        },
    )
    write_atomically(run.config, "name: sums <b>\nsteps: 3\nmodel:\n  path: a/model\n")
    run.write_environment(environment("cpu", 2))
    for step, text in ((1, "I do not know"), (3, "4")):
        rollouts = [
            made_rollout(
                text=text, reward=float(step == 3), error="ValueError: <i>" if step == 1 else None
            )
        ]
        write_rollouts(run.rollouts, step, table_of(rollouts), [0.5])


def test_the_answers_of_a_whole_run(run: RunDirectory) -> None:
    reinforcement_learning(run)
    run.write_status(3, "finished")
    found = report(run)
    (facts,) = found.answers["runs"]["runs"]
    assert (facts["name"], facts["state"], facts["model"]) == ("demo", "finished", "a/model")
    assert (facts["step"], facts["of"]) == (3, 3)
    assert found.values("reward/mean") == [[1, 0.25], [2, "NaN"], [3, 0.75]]
    assert found.values("val/mean@1") == [[0, 0.12], [3, 0.96]]
    assert found.values("actor/skipped") == [[1, 0.0], [2, 1.0]]
    assert found.answers["environment"]["environment"]["processes"] == 2
    assert "steps: 3" in found.answers["config"]["text"]["demo"]
    rows = {row["id"]: row for row in found.answers["rollouts"]["rows"]}
    ((early, late, before, after),) = found.answers["rollouts"]["examples"]["changed"]
    assert (rows[early]["completion"], rows[late]["completion"]) == ("I do not know", "4")
    assert (before, after) == (0.0, 1.0)
    assert rows[early]["reward_error"] == "ValueError: <i>"


def test_nothing_is_fetched_from_anywhere(run: RunDirectory) -> None:
    reinforcement_learning(run)
    for tag, attributes in report(run).tags:
        fetched = {"src", "srcset", "action", "data", "poster"} & attributes.keys()
        assert not fetched, tag
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert (attributes.get("href") or "#").startswith(("#", "data:"))


def test_what_a_model_says_stays_text(run: RunDirectory) -> None:
    attack = '</div></script><!--<script>alert(1)</script><img src=x onerror="alert(2)">\'"&amp;'
    log(run, {1: {"actor/loss": 1.0}})
    usual = [tag for tag, _ in report(run).tags]
    run.metrics.unlink()
    log(run, {1: {f"val/{attack}": 1.0, f"custom/{attack}": 2.0, "actor/loss": 1.0}})
    rollout = made_rollout(text=attack, prompt=attack, error=attack)
    write_rollouts(run.rollouts, 1, table_of([rollout]), [0.0])
    write_rollouts(
        run.rollouts, 2, table_of([made_rollout(text=attack, prompt=attack, reward=0.0)]), [0.0]
    )
    write_atomically(run.config, f"name: '{attack.replace(chr(39), '')}'\n# {attack}\n")
    run.write_environment({"host": attack, "command": [attack]})
    found = report(run)
    assert [tag for tag, _ in found.tags] == usual
    assert attack not in found.text
    assert found.values(f"val/{attack}") == [[1, 1.0]]
    assert {row["completion"] for row in found.answers["rollouts"]["rows"]} == {attack}


def test_half_characters_can_be_read_back(run: RunDirectory) -> None:
    text = "\ud800 <b>\x00\u2028"
    write_rollouts(run.rollouts, 1, table_of([made_rollout(text=text)]), [0.0])
    (row,) = report(run).answers["rollouts"]["rows"]
    assert row["completion"] == text


def test_a_run_without_rollouts_or_files(run: RunDirectory) -> None:
    log(run, {1: {"train/loss": 0.3}})
    assert report(run).answers["rollouts"] == {"rows": []}
    run.metrics.unlink()
    assert report(run).answers["metrics"] == {"demo": {}}


def test_very_many_metrics_leave_out_parts_of_rewards_first(run: RunDirectory) -> None:
    parts = {f"reward/parts/{i}": 1.0 for i in range(MAX_CURVES + 5)}
    log(run, {1: {**parts, "train/loss": 0.5}})
    metrics = report(run).answers["metrics"]["demo"]
    assert (len(metrics), "train/loss" in metrics) == (MAX_CURVES, True)


def test_a_repeated_step_counts_as_it_was_last(run: RunDirectory) -> None:
    log(run, {1: {"actor/loss": 3.0}})
    with run.metrics.open("a") as file:
        file.write('{"step": 1, "actor/loss": 2.0}\n')
    assert report(run).values("actor/loss") == [[1, 2.0]]


def test_a_configuration_that_is_not_yaml_is_shown_as_it_is(run: RunDirectory) -> None:
    write_atomically(run.config, "name: [half")
    assert report(run).answers["config"]["text"] == {"demo": "name: [half"}


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "environment.json", "rollouts/step-00000001.jsonl.gz"]
)
def test_a_broken_file_is_named(run: RunDirectory, name: str) -> None:
    reinforcement_learning(run)
    (run.root / name).write_text("{half\n")
    with pytest.raises(CorruptError, match=Path(name).name):
        write_report(run.root)
    assert not run.report.exists()


def test_ten_thousand_steps_are_thinned_out(run: RunDirectory) -> None:
    rng = random.Random(0)
    names = [f"actor/metric_{index}" for index in range(30)]
    run.root.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"step": step, **{name: rng.random() for name in names}})
        for step in range(10_000)
    ]
    run.metrics.write_text("\n".join(lines) + "\n")
    metrics = report(run).answers["metrics"]["demo"]
    assert len(metrics) == 30
    assert {len(line["values"]) for line in metrics.values()} == {MAX_POINTS}
    assert all(low <= high for line in metrics.values() for low, high in zip(line["low"], line["high"], strict=True))  # fmt: skip
    assert run.report.stat().st_size < 3_000_000


def test_reports_need_neither_torch_nor_a_server() -> None:
    script = "import sys, burnish.tracking.report; assert not {'torch', 'transformers', 'starlette', 'sqlite3'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def write(directory: Path, step: int, rewards: dict[int, list[float]]) -> None:
    """Rollouts with these rewards by prompt; a completion says where it is from."""
    rollouts: list[Rollout] = [
        made_rollout(index, sample, reward=reward, text=f"{step}/{index}/{sample}")
        for index, group in rewards.items()
        for sample, reward in enumerate(group)
    ]
    write_rollouts(directory, step, table_of(rollouts), [0.0] * len(rollouts))


def named(directory: Path, kind: str, count: int = 3) -> Any:
    """The examples of a kind, with rows in place of their names."""
    found = choose_examples(directory, count)
    assert found is not None
    rows = {row["id"]: row for row in found["rows"]}
    return [
        rows[each] if kind != "changed" else (rows[each[0]], rows[each[1]], *each[2:])
        for each in found["examples"][kind]
    ]


def test_best_and_worst_are_of_the_newest_step_one_a_prompt(tmp_path: Path) -> None:
    write(tmp_path, 1, {9: [9.0, -9.0]})
    write(tmp_path, 2, {0: [0.5, 0.1], 1: [0.9, 0.8], 2: [0.3, math.nan], 3: [0.2, 0.2]})
    best, worst = (named(tmp_path, kind, count=2) for kind in ("best", "worst"))
    assert [row["completion"] for row in best] == ["2/1/0", "2/0/0"]
    assert [row["completion"] for row in worst] == ["2/2/1", "2/0/1"]  # NaN is worst


def test_changed_most_compares_the_same_prompt_early_and_late(tmp_path: Path) -> None:
    write(tmp_path, 1, {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.5, 0.5]})
    write(tmp_path, 5, {0: [0.5, 0.5], 3: [1.0, 0.0]})
    write(tmp_path, 9, {0: [1.0, 0.8, 0.0], 1: [0.0, 0.0], 2: [0.5, 0.5]})
    write(tmp_path, 10, {0: [math.nan], 4: [math.nan]})  # what is dropped says nothing
    found = named(tmp_path, "changed")
    assert [(early["completion"], late["completion"]) for early, late, *_ in found] == [
        ("1/1/0", "9/1/0"),
        ("1/0/0", "9/0/1"),  # the sample nearest to the mean
    ]
    assert [tuple(means) for _, _, *means in found] == [
        (1.0, 0.0),
        (0.0, pytest.approx(0.6)),
    ]


def test_of_answers_as_near_to_the_mean_the_one_on_the_side_of_the_change_is_chosen(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, {0: [0.0, 1.0, 0.0, 1.0], 1: [0.0, 0.0]})
    write(tmp_path, 2, {0: [1.0, 1.0], 1: [0.0, 0.0]})
    ((early, late, *_),) = named(tmp_path, "changed")
    assert (early["reward"], late["reward"]) == (0.0, 1.0)


def test_no_rollouts_are_no_examples(tmp_path: Path) -> None:
    assert choose_examples(tmp_path / "rollouts") is None
    write(tmp_path, 1, {})
    assert choose_examples(tmp_path) is None


def test_long_texts_are_shortened_in_the_middle(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, table_of([made_rollout(text="a" * 5000 + "b" * 5000)]), [0.0])
    (row,) = named(tmp_path, "best")
    text = row["completion"]
    assert len(text) < 3100
    assert "7,000 characters left out" in text
    assert text.startswith("aaa")
    assert text.endswith("bbb")


def test_a_long_run_is_read_from_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 11):
        write(tmp_path, step, {step: [1.0]})
    size = (tmp_path / "step-00000001.jsonl.gz").stat().st_size
    monkeypatch.setattr(module, "READ_BYTES", int(4.5 * size))
    read: list[str] = []

    def noted(path: Path) -> Iterator[dict[str, Any]]:
        read.append(path.name[:13])
        return read_rollouts(path)

    monkeypatch.setattr(module, "read_rollouts", noted)
    choose_examples(tmp_path)
    assert read == [f"step-{step:08d}" for step in (10, 1, 9, 2)]
