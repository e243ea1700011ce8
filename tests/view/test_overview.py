"""The list of runs, a run's first page, its charts, comparisons and timeline, on the screen and on paper, in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from tracking.test_metric_names import documented
from view.served import viewer
from view.test_page import browser, count, show, tab, text

from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import json_line
from scripts.chromium import PROGRAM, Tab

__all__ = ["browser", "tab"]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here"),
]

STEPS = 40
LR = 2.5e-06
REASON = {"problem": "no room", "have": "0 bytes", "want": "1 GB", "do": "free some", "step": 3}
Numbers = Mapping[str, float]


def numbers(step: int) -> dict[str, float]:
    """A step of a run whose completions are cut off, with one reward function and without a divergence."""
    reward = 0.1 + 0.00001 * step
    loss = 0.5 / step
    found = {
        "reward/mean": reward,
        "reward/parts/only": reward,
        "actor/loss": loss,
        "actor/pg_loss": loss,
        "actor/lr": LR,
        "actor/entropy": 1.0,
        "response_length/clip_ratio": 0.75,
        "perf/tokens_per_s": 100.0,
        "perf/max_memory_gb/all": 2.0,
        "timing_s/step": 10.0,
        "timing_s/rollout": 6.0,
        "timing_s/rollout/generate": 5.0,
        "timing_s/update": 3.0 + step % 2,
    }
    return found | (validated(step) if step % 10 == 0 else {})


def validated(step: int) -> dict[str, float]:
    """A validation that was best in the middle."""
    accuracy = 0.008 - abs(step - 20) / 10_000
    return {
        "val/mean@1": accuracy,
        "val/reward": accuracy,
        "val/maths/mean@1": accuracy,
        "val/response_length/clip_ratio": 0.6,
    }


def made(directory: Path, values: Callable[[int], Numbers], steps: int = STEPS, kind: str = "rl", lr: float = LR) -> RunDirectory:  # fmt: skip
    """Write a run that has finished."""
    run = RunDirectory(directory)
    directory.mkdir(parents=True)
    settings = {
        "name": directory.name,
        "steps": steps,
        "model": {"path": "made"},
        "optim": {"lr": lr},
        "rollout": {"max_response_length": 24},
    }
    run.config.write_text(json.dumps(settings))
    run.write_environment({"trainer": kind, "started": "2026-11-25T12:00:00+00:00"})
    run.write_status(steps, "finished")
    lines = (json_line({"step": step, **values(step)}) for step in range(1, steps + 1))
    run.metrics.write_text("".join(lines))
    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation, one with another rate, one of another kind, and one that failed."""
    root = tmp_path_factory.mktemp("runs")
    made(root / "own", numbers)
    measured = RunDirectory(root / "own" / "evaluations" / "1")
    made(measured.root, validated, 1, "eval")
    measured.metrics.write_text(json_line({"step": STEPS, "val/mean@1": 0.321, "val/reward": 0.3}))
    made(root / "other", numbers, 20, lr=1e-05)
    made(root / "examples", lambda step: {"train/loss": 1 / step, "train/lr": LR}, 20, "sft")
    failed = made(root / "failed", numbers, 2)
    failed.write_status(9, "failed", REASON)
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with viewer(root) as found:
        yield f"http://127.0.0.1:{found.port}/"


def texts(tab: Tab, selector: str) -> list[str]:
    return list(tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"))  # fmt: skip


def colour(tab: Tab, selector: str) -> str:
    return str(tab.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).color"))


def charts(tab: Tab) -> dict[str, Any]:
    """By title, the ticks of each chart's axes and the last value of each line."""
    tab.wait("document.querySelectorAll('.plot').length && [...document.querySelectorAll('.plot')].every((e) => e.plot || !e.near)")  # fmt: skip
    tab.run("for (const plot of document.querySelectorAll('.plot')) plot.paint()")
    return dict(
        tab.run("""Object.fromEntries([...document.querySelectorAll('.chart')].map((e) => {
        const {plot} = e.querySelector('.plot'), [x, y] = plot.axes.map((axis) => axis._values ?? []);
        return [e.querySelector('.caption').textContent, {
          x, y, room: plot.axes[1]._size, lines: e.querySelector('.plot').lines.map(({steps, values}) => [steps.at(-1), values.at(-1)]),
          names: [...e.querySelectorAll('.name-of-line')].map((each) => each.textContent.trim())}];
      }))""")
    )


def test_evaluations_stand_below_their_run_with_a_score_and_no_bar(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr').length === 5")
    rows = tab.run("[...document.querySelectorAll('tbody tr')].map((e) => e.dataset.run)")
    assert rows[rows.index("own") + 1] == "own/evaluations/1"
    child = "tr[data-run='own/evaluations/1']"
    assert "0.321" in text(tab, child)
    assert "mean@1" in text(tab, child)
    assert count(tab, f"{child} .progress") == 0
    assert count(tab, "tr[data-run=own] .progress") == 1
    show(tab, f"{address}#/run/own%2Fevaluations%2F1")
    assert "0.321" in text(tab, ".tiles")
    assert "0.3" in text(tab, "details[open]")
    assert count(tab, ".chart") == 0


def test_the_list_says_last_and_best(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr').length === 5")
    heads = texts(tab, "thead th")
    cells = texts(tab, "tr[data-run=own] td")
    last = cells[heads.index("validation, last")]
    best = cells[heads.index("best")]
    assert last.startswith("0.006")
    assert best.startswith("0.008")
    assert best.endswith("step 20")
    show(tab, f"{address}#/run/own")
    assert "last; best 0.008 at step 20" in text(tab, ".tiles")


def test_a_failed_run_is_red_with_its_reason(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelector('.failure')")
    red = tab.run("(() => { const e = document.body.appendChild(document.createElement('i')); e.style.color = 'var(--bad)'; return getComputedStyle(e).color; })()")  # fmt: skip
    row = "tr[data-run=failed]"
    assert colour(tab, f"{row} .state") == red
    assert colour(tab, f"{row} .failure") == red
    assert text(tab, f"{row} .failure") == "no room"
    title = tab.run(f"document.querySelector({json.dumps(f'{row} .failure')}).title")
    assert "free some" in title
    show(tab, f"{address}#/run/failed")
    tab.wait("document.querySelector('.notice')")
    said = text(tab, ".notice")
    assert all(str(REASON[part]) in said for part in ("problem", "have", "want", "do", "step"))


def test_favourites_come_first_and_stay(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr').length === 5")
    first = "document.querySelector('tbody tr').dataset.run"
    last = tab.run("[...document.querySelectorAll('tbody tr:not(.child)')].at(-1).dataset.run")
    assert tab.run(first) != last
    tab.run(f"document.querySelector('tr[data-run={last}] .pin').click()")
    tab.wait(f"{first} === {json.dumps(last)}")
    show(tab, address)
    tab.wait(f"document.querySelector('tbody tr') && {first} === {json.dumps(last)}")
    tab.run(f"document.querySelector('tr[data-run={last}] .pin').click()")
    tab.wait(f"{first} !== {json.dumps(last)}")
    tab.run("localStorage.clear()")


def test_a_small_screen_shows_validations_and_that_there_are_more_tabs(
    tab: Tab, address: str
) -> None:
    tab.resize(400, 844, mobile=True)
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr').length === 5")
    right = "Math.ceil(document.querySelector('{}').getBoundingClientRect().right)"
    row = "tr[data-run=own] td:nth-child(7)"
    assert text(tab, row).startswith("0.006")
    assert 0 < tab.run(right.replace("{}", row)) <= 400
    show(tab, f"{address}#/run/own/charts?with=other")
    tab.wait("document.querySelector('.differences td')")
    mask = "getComputedStyle(document.getElementById('tabs')).maskImage"
    assert "270deg" in tab.run(mask)
    tab.run("document.getElementById('tabs').scrollLeft = 1000")
    tab.wait(f"{mask}.includes('90deg') && !{mask}.includes('270deg')")
    tab.run("scrollTo(0, 1500)")
    tab.wait("document.querySelector('.runs-legend').getBoundingClientRect().top < 100")
    top = tab.run("document.querySelector('.runs-legend').getBoundingClientRect().top")
    assert top >= tab.run("document.getElementById('bar').getBoundingClientRect().bottom") - 1
    cells = tab.run("[...document.querySelectorAll('.differences th, .differences td')].map((e) => e.getBoundingClientRect().left)")  # fmt: skip
    assert cells[:3] == cells[3:6]  # each value is below its run
    for place in ("", "#/run/own", "#/run/failed", "#/run/own/timeline", "#/run/own/config?with=other"):  # fmt: skip
        show(tab, address + place)
        assert tab.run("document.documentElement.scrollWidth") <= 400, place


def test_what_needs_attention_has_a_setting_to_copy_and_its_chart(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelector('tr[data-run=own] .heed')")
    show(tab, f"{address}#/run/own")
    setting = "rollout.max_response_length=48"
    assert setting in texts(tab, ".attention code")
    at = texts(tab, ".attention code").index(setting)
    row = f".attention li:nth-child({at + 1})"
    tab.run("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text; }}})")  # fmt: skip
    tab.run(f"document.querySelector('{row} .copy').click()")
    tab.wait(f"window.copied === {json.dumps(setting)}")
    tab.wait(f"document.querySelector('{row} .copy').textContent === 'Copied'")
    tab.run(f"document.querySelector('{row} .link').click()")
    tab.wait("document.querySelector('.chart.open .plot')?.plot")
    top, bottom = tab.run("(({top, bottom}) => [top, bottom])(document.querySelector('.chart.open').getBoundingClientRect())")  # fmt: skip
    assert top >= 0
    assert bottom < 901
    assert "clip_ratio" in tab.run("document.querySelector('.chart.open .caption').title")


def test_no_chart_is_shown_twice_and_accuracy_has_its_own_axis(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own")
    found = charts(tab)
    drawn = tab.run("[...document.querySelectorAll('.chart .caption')].flatMap((e) => e.title.split(':')[0].split(', '))")  # fmt: skip
    assert {"reward/mean", "actor/loss", "val/mean@1"} <= {*drawn}
    assert not {"reward/parts/only", "actor/pg_loss", "val/reward", "val/maths/mean@1"} & {*drawn}
    assert max(map(float, found["Validation mean@1"]["y"])) < 0.01
    assert "Validation: truncated responses, share" in found


def test_ticks_are_whole_and_do_not_meet(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own")
    found = charts(tab)
    assert found["Learning rate"]["y"] == ["2.5e−6"]
    assert found["Entropy, nats"]["y"] == ["1"]
    width = "(() => { const c = document.createElement('canvas').getContext('2d'); c.font = '11px system-ui, sans-serif'; return c.measureText('{}').width; })()"
    for title, chart in found.items():
        assert chart["x"] in (["10", "20", "30", "40"], ["20", "40"]), title
        assert len({*chart["y"]}) == len(chart["y"]), title
        longest = max(map(str, chart["y"]), key=len)
        assert tab.run(width.replace("{}", longest)) <= chart["room"], title


def test_axes_by_step_time_and_tokens(tab: Tab, address: str) -> None:
    ends = {"": STEPS, "time": STEPS * 10.0, "tokens": sum(100 * numbers(n)["timing_s/update"] for n in range(1, STEPS + 1))}  # fmt: skip
    for axis, end in ends.items():
        show(tab, f"{address}#/run/own/charts?x={axis}")
        tab.wait(f"document.querySelector('[aria-label=\"Horizontal axis\"]').value === '{axis}'")
        ((last, _),) = charts(tab)["Reward"]["lines"]
        assert last == pytest.approx(end)
    show(tab, f"{address}#/run/own/charts?x=time&with=examples")
    assert "examples" in text(tab, "#view > div > div > p.soft")
    found = charts(tab)
    assert found["Reward"]["names"] == ["own"]
    assert "Loss" not in found


def test_compared_runs_are_named_everywhere(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own/charts?with=other&with=examples")
    assert "optim.lr" in texts(tab, ".differences td:first-child")
    order = tab.run("['.differences', '.runs-legend', '.chart'].map((s) => document.querySelector(s).getBoundingClientRect().top)")  # fmt: skip
    assert order == sorted(order)
    found = charts(tab)
    assert found["Reward"]["names"] == ["own", "other"]
    assert found["Loss"]["names"] == ["examples"]  # also where only one run has a line
    assert not [title for title in found if "/" in title or "_" in title]
    tab.run("scrollTo(0, document.documentElement.scrollHeight)")
    legend = tab.run("(({top, bottom}) => [top, bottom])(document.querySelector('.runs-legend').getBoundingClientRect())")  # fmt: skip
    assert 40 <= legend[0] < legend[1] < 120
    for tab_number in range(count(tab, "#tabs a")):
        tab.run(f"document.querySelectorAll('#tabs a')[{tab_number}].click()")
        tab.wait("location.hash.includes('with=other&with=examples') && !document.querySelector('[aria-busy]')")  # fmt: skip
    show(tab, f"{address}#/run/own/timeline?with=other")
    tab.press("ArrowLeft")
    tab.wait(f"location.hash.includes('/{STEPS - 1}') && location.hash.includes('with=other')")


def test_names_of_runs_are_shown_without_their_common_words(tab: Tab, address: str) -> None:
    show(tab, address)
    for names, brief in (
        (["sweep/small-lr1e-6", "sweep/small-lr2e-6"], ["lr1e-6", "lr2e-6"]),
        (["own", "other"], ["own", "other"]),
        (["a-b", "a-b-c"], ["b", "b-c"]),
        (["only/one"], ["only/one"]),
    ):
        given = json.dumps(names)
        assert tab.run(f"import('/static/compare.js').then((m) => m.distinct({given}))") == brief


def test_every_metric_has_a_title_in_words(tab: Tab, address: str) -> None:
    show(tab, address)
    known = [name.replace("moe/...", "moe/aux_loss").replace("...", "mean@4") for name in documented()]  # fmt: skip
    titles = tab.run(f"import('/static/titles.js').then((m) => {json.dumps(known)}.map(m.metricTitle))")  # fmt: skip
    assert len(titles) > 60
    assert not [title for title in titles if "/" in title or "_" in title or "›" in title]
    measures = {
        "val/mean@4": "Validation mean@4",
        "val/org/data/mean@4": "Validation of org/data: mean@4",
        "val/data/response_length/mean": "Validation of data: response length, tokens",
        "val/reward_parts/format": "Validation reward of format",
    }
    assert tab.run(f"import('/static/titles.js').then((m) => {json.dumps([*measures])}.map(m.metricTitle))") == [*measures.values()]  # fmt: skip


def test_the_last_steps_are_stacked_bars_that_open_their_step(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own/timeline?with=other")
    tab.wait("document.querySelectorAll('.bar').length === 20")
    assert texts(tab, ".bar .step") == [str(step) for step in range(STEPS - 19, STEPS + 1)]
    heights = tab.run("[...document.querySelectorAll('.bar')].slice(-2).map((e) => [...e.querySelectorAll('i')].map((i) => i.getBoundingClientRect().height))")  # fmt: skip
    (rollout, odd), (_, even) = heights
    assert len(heights[0]) == 2
    assert rollout / odd == pytest.approx(6 / 4, rel=0.01)
    assert rollout / even == pytest.approx(6 / 3, rel=0.01)
    shown = "[...document.querySelectorAll('.lanes .span')].map((e) => e.textContent)"
    assert tab.run(shown) == ["rollout", "update", "generate"]
    tab.run("document.querySelectorAll('.bar')[4].click()")
    tab.wait(f"document.querySelector('h1').textContent === 'Step {STEPS - 15}'")
    assert text(tab, ".bar[aria-current] .step") == str(STEPS - 15)
    assert "with=other" in tab.run("location.hash")


def test_an_unknown_address_says_so(tab: Tab, address: str) -> None:
    for place in ("#/nowhere", "#/run/own/nowhere", "#/run/own/runs"):
        show(tab, address + place)
        assert text(tab, "h1") == "Not found", place
        assert count(tab, "#view tbody") == 0
    show(tab, f"{address}#/run/own")
    tab.run("location.hash = '#/run/gone'")
    tab.wait("document.querySelector('h1')?.textContent === 'Not found'")
    assert count(tab, "#tabs a") == 0
    assert all("404" in each for each in tab.problems)
    tab.forget()


@pytest.mark.parametrize("place", ["charts", "charts?with=other", "timeline"])
def test_paper_has_every_chart(tab: Tab, address: str, place: str) -> None:
    tab.dark(True)
    show(tab, f"{address}#/run/own/{place}")
    tab.wait("document.querySelector('.plot, .bar')")
    tab.run("""addEventListener('afterprint', () => { window.printed = true; });
      addEventListener('beforeprint', () => {
        const canvases = [...document.querySelectorAll('.plot canvas')];
        window.inked = canvases.map((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v));
        window.plots = document.querySelectorAll('.plot').length;
        window.widest = Math.max(...[...document.querySelectorAll('#view *')].map((e) => e.getBoundingClientRect().right)) - document.getElementById('view').getBoundingClientRect().left;
        window.ink = getComputedStyle(document.body).color;
      })""")  # fmt: skip
    paper = tab.printed()
    seen = tab.run("({inked, plots, widest, ink, printed})")
    assert seen["printed"]
    assert len(seen["inked"]) == seen["plots"]
    assert all(seen["inked"])
    assert seen["plots"] > 6 or place == "timeline"
    assert seen["widest"] <= 720  # of the 739 pixels of a sheet
    assert max(map(int, seen["ink"].removeprefix("rgb(").removesuffix(")").split(","))) < 100
    assert paper.startswith(b"%PDF")
