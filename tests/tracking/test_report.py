import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracking.made_rollouts import made_rollout

from burnish.errors import CorruptError
from burnish.records import Rollout
from burnish.tracking import report as module
from burnish.tracking.report import (
    MAX_POINTS,
    choose_examples,
    short,
    smooth,
    thinned,
    write_report,
)
from burnish.tracking.rollouts import read_rollouts, write_rollouts
from burnish.tracking.rundir import RunDirectory, environment, write_atomically
from burnish.tracking.trackers import JsonlTracker

VOID = {"meta", "link", "img", "br", "hr", "input", "base", "source"}


class Page(HTMLParser):
    """The page as a browser would see it: balanced tags, attributes, text, data of the plots."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.plots: list[dict[str, object]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.tags[-1][1].get("type") == "application/json":
                self.plots.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.text += data

    def points(self, label: str) -> list[list[float]]:
        """What the plot with a line of this label shows."""
        lines = [line for plot in self.plots for line in plot["lines"]]  # type: ignore[attr-defined]
        (found,) = [line["points"] for line in lines if line["label"] == label]
        return found


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "demo")


def log(run: RunDirectory, steps: dict[int, dict[str, float]]) -> None:
    tracker = JsonlTracker(run.metrics)
    for step, values in steps.items():
        tracker.log(step, values)
    tracker.close()


def report(run: RunDirectory, **options: object) -> Page:
    path = write_report(run.root, **options)  # type: ignore[arg-type]
    assert path == run.report
    return Page(path.read_text("utf-8"))


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
        write_rollouts(run.rollouts, step, rollouts, [0.5])


def test_the_page_of_a_whole_run(run: RunDirectory) -> None:
    reinforcement_learning(run)
    page = report(run, state="finished")
    assert "sums <b>" in page.text
    assert "finished" in page.text
    assert "a/model" in page.text
    assert "2 × cpu" in page.text
    assert "gradient norm that was not finite: 1" in page.text
    assert "a reward function failed: 2" in page.text
    assert page.points("mean") == [[1, 0.25], [2, None], [3, 0.75]]
    assert page.points("mean@1") == [[0, 0.12], [3, 0.96]]
    assert page.points("thing") == [[3, 7.0]]
    assert page.points("rollout") == [[1, 1.0], [2, 2.0]]
    assert page.points("other") == [[1, 2.0], [2, 1.0]]
    for shown in (
        "0.12",
        "0.96",
        "+0.84",
        "I do not know",
        "ValueError: <i>",
        "Changed most",
        "steps: 3",
    ):
        assert shown in page.text, shown


def test_nothing_is_fetched_from_anywhere(run: RunDirectory) -> None:
    reinforcement_learning(run)
    page = report(run)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & attributes.keys(), tag
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
    html = run.report.read_text("utf-8")
    assert "://" not in html
    assert "@import" not in html
    assert "url(" not in html


def test_what_a_model_says_stays_text(run: RunDirectory) -> None:
    attack = '</div></script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&amp;'
    log(run, {1: {f"val/{attack}": 1.0, f"custom/{attack}": 2.0, "actor/loss": 1.0}})
    rollout = made_rollout(text=attack, prompt=attack, error=attack)
    write_rollouts(run.rollouts, 1, [rollout], [0.0])
    write_rollouts(run.rollouts, 2, [made_rollout(text=attack, prompt=attack, reward=0.0)], [0.0])
    write_atomically(run.config, f"name: '{attack.replace(chr(39), '')}'\n# {attack}\n")
    run.write_environment({"host": attack, "command": [attack]})
    page = report(run)
    plots = len(page.plots)
    assert [tag for tag, _ in page.tags].count("script") == plots + 1  # those of the page itself
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    assert page.text.count(attack) >= 8


def test_supervised_fine_tuning_has_no_rollouts(run: RunDirectory) -> None:
    log(
        run,
        {step: {"train/loss": 0.3 / step, "val/loss": round(0.2 / step, 3)} for step in (1, 2, 3)},
    )
    page = report(run)
    assert "Rollouts" not in page.text
    assert "Changed most" not in page.text
    shown = [line["points"] for plot in page.plots for line in plot["lines"]]  # type: ignore[attr-defined]
    assert shown == [[[1, 0.2], [2, 0.1], [3, 0.067]], [[1, 0.3], [2, 0.15], [3, 0.1]]]
    assert "Validation: loss" in page.text
    assert "Training loss" in page.text
    assert "demo" in page.text  # the directory's name, where no configuration has one


def test_a_critic_beside_the_policy(run: RunDirectory) -> None:
    step = {"actor/lr": 1e-3, "critic/lr": 1e-5, "critic/skipped": 1.0}
    log(run, {1: {"critic/lr": 1e-5}, 2: step, 3: step})
    run.write_environment({"host": "here", "git_commit": None})
    page = report(run)
    assert page.points("actor/lr") == [[2, 1e-3], [3, 1e-3]]
    assert page.points("critic/lr") == [[1, 1e-5], [2, 1e-5], [3, 1e-5]]
    assert "gradient norm that was not finite: 2" in page.text
    assert "here" in page.text
    assert "git_commit" not in page.text


def test_one_step(run: RunDirectory) -> None:
    log(run, {1: {"actor/loss": 3.0, "timing_s/step": 1.0}})
    write_rollouts(run.rollouts, 1, [made_rollout()], [0.0])
    page = report(run, state="running")
    assert page.points("loss") == [[1, 3.0]]
    assert "Best, step 1" in page.text
    assert "Changed most" not in page.text


def test_an_empty_directory(run: RunDirectory) -> None:
    run.root.mkdir(parents=True, exist_ok=True)
    page = report(run)
    assert "No metrics have been written yet." in page.text
    assert page.plots == []


def test_values_that_are_never_finite(run: RunDirectory) -> None:
    log(run, {1: {"actor/loss": math.nan, "val/loss": math.inf, "perf/tokens_per_s": math.nan}})
    page = report(run)
    assert "nan" in page.text
    assert page.plots == []


def test_a_repeated_step_counts_as_it_was_last(run: RunDirectory) -> None:
    log(run, {1: {"actor/loss": 3.0}})
    with run.metrics.open("a") as file:
        file.write('{"step": 1, "actor/loss": 2.0}\n')
    assert report(run).points("loss") == [[1, 2.0]]


def test_the_whole_of_a_validation_comes_before_its_sources(run: RunDirectory) -> None:
    log(run, {1: {"val/a/mean@1": 0.25, "val/mean@1": 0.5, "val/response_length/mean": 9.0}})
    text = report(run).text
    assert text.index("Validation mean@1") < text.index("a/mean@1")


def test_a_configuration_that_is_not_yaml_is_shown_as_it_is(run: RunDirectory) -> None:
    write_atomically(run.config, "name: [half")
    assert "name: [half" in report(run).text


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
    page = report(run)
    assert len(page.plots) == 30
    lines = [line for plot in page.plots for line in plot["lines"]]  # type: ignore[attr-defined]
    assert all(100 < len(line["points"]) <= MAX_POINTS for line in lines)
    assert run.report.stat().st_size < 3_000_000


any_numbers = st.lists(st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf]), max_size=80)


@given(any_numbers)
def test_smoothing_is_the_weighted_mean_of_its_formula(values: list[float]) -> None:
    beta = 1 - 2 / (max(1.0, len(values) / 15) + 1)
    for t, average in enumerate(smooth(np.array(values))) if values else ():
        weights = [beta ** abs(t - i) if math.isfinite(v) else 0.0 for i, v in enumerate(values)]
        total = sum(w * v for w, v in zip(weights, values, strict=True) if w)
        if sum(weights) > 0.5:
            worst = max(abs(v) for v in values if math.isfinite(v))
            assert average == pytest.approx(total / sum(weights), rel=1e-6, abs=1e-3 * (1 + worst))


@given(st.lists(st.floats(), max_size=300), st.integers(10, 100))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    kept = thinned(np.array(values), most).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    if values:
        assert {0, len(values) - 1} <= set(kept)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[index] for index in kept if math.isfinite(values[index])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_noise_is_smoothed_and_a_schedule_is_not(run: RunDirectory) -> None:
    rng = random.Random(0)
    log(run, {i: {"actor/lr": min(1.0, i / 50), "actor/loss": rng.random()} for i in range(200)})
    smoothed = {
        line["label"]: line["smooth"] for plot in report(run).plots for line in plot["lines"]
    }  # type: ignore[attr-defined]
    assert len(smoothed["loss"]) == 200
    assert smoothed["lr"] == []


# A page with one figure, of which a script asks and to which it adds elements; printed are those that it added.
DOCUMENT = """
class Node {
  constructor(kind) { this.kind = kind; this.attributes = {}; this.children = []; this.style = {}; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  appendChild(child) { this.children.push(child); return child; }
  querySelector(kind) { return this.found[kind]; }
  addEventListener() {}
}
const svg = new Node("svg"), now = new Node("span"), figure = new Node("figure");
figure.found = {script: {textContent: process.argv[1]}, svg, ".tip": new Node("div"), ".now": now};
globalThis.document = {querySelectorAll: () => [figure], createElementNS: (_, kind) => new Node(kind)};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_the_script_draws_what_is_there(run: RunDirectory) -> None:
    run.root.mkdir(parents=True, exist_ok=True)
    loss, seconds = {"actor/loss": 4.0}, {"timing_s/rollout": 1.0, "timing_s/step": 4.0}
    broken = {0: loss, 5: {"actor/loss": math.nan}, 10: {"actor/loss": 1.0}}
    drawn = []
    for steps in (broken, {1: seconds, 2: seconds}):
        run.metrics.unlink(missing_ok=True)
        log(run, steps)
        (plot,) = report(run).plots
        script = run.report.read_text("utf-8").rpartition("<script>")[2].partition("</script>")[0]
        printed = "process.stdout.write(JSON.stringify([svg, now.textContent]));"
        argv = ["node", "-e", DOCUMENT + script + printed, json.dumps(plot)]
        drawn.append(json.loads(subprocess.run(argv, capture_output=True, check=True).stdout))
    (svg, now), (stack, _) = drawn
    assert now == "1"
    (line,) = [child for child in svg["children"] if child["kind"] == "g"]
    shapes = [child["attributes"] for child in line["children"]]
    assert shapes[0]["d"] == "M50.0 18.9M410.0 130.7"  # broken where the value is not finite
    assert [(dot["cx"], dot["cy"][:5]) for dot in shapes[1:]] == [("50", "18.94"), ("410", "130.7")]
    ticks = [child["textContent"] for child in svg["children"] if child["kind"] == "text"]
    assert ticks == ["0", "1", "2", "3", "4", "0", "2", "4", "6", "8", "10"]
    areas = [g["children"][0]["attributes"]["d"] for g in stack["children"] if g["kind"] == "g"]
    below, above = ([float(y) for y in re.findall(r" ([\d.]+)", area)] for area in areas)
    assert above[2:] == below[:2][::-1]  # the second area stands on the first
    assert (168 - above[0]) / (168 - below[0]) == pytest.approx(4, abs=0.02)


def test_reports_need_no_torch() -> None:
    script = "import sys, burnish.tracking.report; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (12345.6, "12,346"), (1e-6, "1e-06"), (math.nan, "nan"), (-1.0, "-1")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def write(directory: Path, step: int, rewards: dict[int, list[float]]) -> None:
    """Rollouts with these rewards by prompt; a completion says where it is from."""
    rollouts: list[Rollout] = [
        made_rollout(index, sample, reward=reward, text=f"{step}/{index}/{sample}")
        for index, group in rewards.items()
        for sample, reward in enumerate(group)
    ]
    write_rollouts(directory, step, rollouts, [0.0] * len(rollouts))


def test_best_and_worst_are_of_the_newest_step_one_a_prompt(tmp_path: Path) -> None:
    write(tmp_path, 1, {9: [9.0, -9.0]})
    write(tmp_path, 2, {0: [0.5, 0.1], 1: [0.9, 0.8], 2: [0.3, math.nan], 3: [0.2, 0.2]})
    found = choose_examples(tmp_path, count=2)
    assert found is not None
    assert found["step"] == 2
    assert [row["completion"] for row in found["best"]] == ["2/1/0", "2/0/0"]
    assert [row["completion"] for row in found["worst"]] == ["2/2/1", "2/0/1"]  # NaN is worst


def test_changed_most_compares_the_same_prompt_early_and_late(tmp_path: Path) -> None:
    write(tmp_path, 1, {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.5, 0.5]})
    write(tmp_path, 5, {0: [0.5, 0.5], 3: [1.0, 0.0]})
    write(tmp_path, 9, {0: [1.0, 0.8, 0.0], 1: [0.0, 0.0], 2: [0.5, 0.5]})
    found = choose_examples(tmp_path)
    assert found is not None
    assert [(early["completion"], late["completion"]) for early, late, *_ in found["changed"]] == [
        ("1/1/0", "9/1/0"),
        ("1/0/0", "9/0/1"),  # the sample nearest to the mean
    ]
    assert [tuple(means) for _, _, *means in found["changed"]] == [
        (1.0, 0.0),
        (0.0, pytest.approx(0.6)),
    ]


@pytest.mark.parametrize(("late", "shown"), [(1.0, ("low", "high")), (0.0, ("high", "low"))])
def test_a_reward_has_the_colour_of_its_own_value(
    run: RunDirectory, late: float, shown: tuple[str, str]
) -> None:
    """Of answers as near to the mean, the one on the side of the change is shown."""
    log(run, {1: {"reward/mean": 0.5}})
    write(run.rollouts, 1, {0: [0.0, 1.0, 0.0, 1.0], 1: [0.0, 0.0]})
    write(run.rollouts, 2, {0: [late, late], 1: [0.0, 0.0]})
    page = write_report(run.root).read_text("utf-8")
    pair = page.partition('<div class="pair">')[2].partition("</article>")[0]
    found = re.findall(r'<span class="reward (high|low)">([^<]*)<', pair)
    assert found == [(each, "1" if each == "high" else "0") for each in shown]
    assert '<span class="reward high">0<' not in page


def test_no_rollouts_are_no_examples(tmp_path: Path) -> None:
    assert choose_examples(tmp_path / "rollouts") is None
    write(tmp_path, 1, {})
    assert choose_examples(tmp_path) is None


def test_long_texts_are_shortened_in_the_middle(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [made_rollout(text="a" * 5000 + "b" * 5000)], [0.0])
    found = choose_examples(tmp_path)
    assert found is not None
    text = found["best"][0]["completion"]
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
