"""The page of `burnish view` in a real Chromium, over the real server and from a report's file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from support.runs.rollouts import RECORD, made_rollout, made_talk, table_of
from view.served import viewer

from bench.view_runs import HOSTILE, make_hostile_run, make_run
from burnish.config.schema import TracesConfig
from burnish.tracking.report import write_report
from burnish.tracking.rollouts import write_rollouts
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.traces import Traces
from burnish.tracking.trackers import json_line, json_numbers
from scripts.chromium import PROGRAM, Pipe, Tab, chromium

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here")

READY = "!document.querySelector('[aria-busy]') && document.querySelector('#view > div')"
VIEWS = ("charts", "rollouts", "prompt/0", "timeline", "checkpoints", "log", "config")
SMALL = "#/run/sweep%2Fsmall"
CHAT = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
LOG = """2026-01-01 23:59:58.000 debug rank 0 step 1 rollout burnish: begins
2026-01-01 23:59:59.000 info rank 0 step - - burnish: steps 1 to 9
2026-01-02 00:00:01.000 info rank 0 step 1 - burnish: reward 0.125  loss 1.5
2026-01-02 00:00:02.000 warning rank 0 step 2 update burnish: slow
2026-01-02 00:00:03.000 critical rank 0 step 2 update burnish: the run ends with an error
    Traceback (most recent call last):
      File "a.py", line 1, in step_one
        write()
      File "b.py", line 2, in write
        raise OSError("no room")
        ^^^^^^^^^^^^^^^^^^^^^^^^
    OSError: no room
a line of a library
"""
NEGATIVE, ZERO, POSITIVE = -1.0, 0.0, 1.0
TEXTS = {
    NEGATIVE: "wrong, and the reward is below zero",
    ZERO: "wrong, and the reward is zero",
    POSITIVE: "right \u05d0\u05d1\u05d2 \u202ereversed " + "x" * 2**20,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one configuration, hostile texts, and a run that a test can go on with."""
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("small", "other")):
        make_run(root / "sweep" / name, steps=60, prompts=4, samples=4, every=20, tokens=30)
        config = root / "sweep" / name / "config.yaml"
        config.write_text(config.read_text() + f"seed: {seed}\n")
    make_hostile_run(root / "hostile")
    growing(root, "own", 2)
    make_failed(root / "failed")
    make_said(root / "said")
    make_talks(root / "talks")
    make_pairs(root / "pairs")
    make_answers(root / "answers")
    return root


def make_pairs(directory: Path) -> None:
    """A run with held-out pairs, of which the first has the largest margin."""
    run = RunDirectory(make_run(directory, steps=1))
    answers = [(2.0, "right"), (-1.0, "wrong"), (0.5, "good"), (1.0, "better")]
    made = [
        replace(
            made_rollout(index, sample, text=text, reward=reward),
            reward_parts={"margin": answers[2 * index][0] - answers[2 * index + 1][0]},
        )
        for index in range(2)
        for sample, (reward, text) in enumerate(answers[2 * index : 2 * index + 2])
    ]
    write_rollouts(run.rollouts, 1, table_of(made), None)


def make_answers(directory: Path) -> None:
    """A run with held-out single answers, of which the second is on the wrong side."""
    run = RunDirectory(make_run(directory, steps=1))
    made = [
        replace(
            made_rollout(index, 0, text="said", reward=reward),
            reward_parts={"margin": label * reward, "label": label},
        )
        for index, (reward, label) in enumerate([(2.0, 1.0), (0.5, -1.0)])
    ]
    write_rollouts(run.rollouts, 1, table_of(made), None)


def make_talks(directory: Path) -> None:
    """A group of conversations: a good one, one that reached a limit, a hostile one a failed one, and one of two branches. Only the first two have a trace."""
    run = RunDirectory(make_run(directory, steps=1))
    wrong = {**RECORD[3], "content": "13", "rewards": {"right": 0.0}}
    call = {"name": HOSTILE[1], "arguments": {HOSTILE[2]: HOSTILE[5]}}
    begun = {
        "role": "assistant",
        "content": HOSTILE[0],
        "calls": [call],
        "problem": HOSTILE[6],
        "rewards": {HOSTILE[0]: 1.0},
    }
    heard = [
        {"role": "tool", "name": HOSTILE[1], "content": each} for each in (*HOSTILE, "x" * 2**20)
    ]
    odd = [None, 3, {"role": "<b>", "content": ["parts", {"<i>": 1}], "unseen": True}]
    talks = [
        made_talk(reward=1.25),
        made_talk(sample=1, record=[*RECORD[:3], wrong], reward=0.25, end="turns"),
        made_talk(sample=2, record=[begun, *heard, *odd], reward=0.0, end="unreadable"),
        made_talk(sample=3, record=RECORD[:2], reward=0.0, end="failed", error="environment: <b>"),
        made_talk(sample=4, reward=1.0),
        replace(made_talk(sample=4, record=RECORD[:3], reward=1.0), branch=1),
    ]  # fmt: skip
    texts = lambda ids: ["I say", " heard", " twelve"][: len(ids)]  # noqa: E731
    write_rollouts(run.rollouts, 1, table_of(talks), [0.0] * 6, texts)
    Traces(run, TracesConfig(), 10**9, 0).take(1, talks, [0.0] * 6, [0, 1])


def make_said(directory: Path) -> None:
    """A chat whose first sample changes over three steps, and another one."""
    run = RunDirectory(make_run(directory, steps=3))
    for step, said in enumerate(("no idea", "2 + 2 is five today", "2 + 2 is four today"), start=1):
        made = [
            made_rollout(index, sample, text="the same" if sample else said, reward=float("four" in said and not sample), prompt=CHAT)
            for index in (5, 8)
            for sample in range(2)
        ]  # fmt: skip
        columns = {"answer": "4", "level": "<b>easy</b>", "tests": ["a", 1]}
        made = [replace(each, prompt=replace(each.prompt, columns=columns)) for each in made]
        write_rollouts(run.rollouts, step, table_of(made), [0.0] * len(made))


def make_failed(directory: Path) -> None:
    """A run that failed in its second step, on the next day."""
    run = RunDirectory(make_run(directory, steps=1))
    run.write_status(9, "failed", {"problem": "no room", "do": "free some", "step": 2})
    run.logs.mkdir()
    (run.logs / "rank-0.log").write_text(LOG)


def growing(root: Path, name: str, steps: int) -> RunDirectory:
    """A run with a skipped step, failed rewards, a metric that is always 0, and rewards below, at and above 0."""
    run = RunDirectory(root / name)
    run.checkpoints.mkdir(parents=True)
    run.config.write_text(f"name: {name}\nsteps: 9\nmodel: {{path: made}}\n")
    run.write_environment({"trainer": "rl", "host": "here", "device": "cpu", "processes": 2})
    run.write_status(9, "running")
    for step in range(1, steps + 1):
        grow(run, step)
    rollouts = [
        made_rollout(0, i, text=text, reward=reward, error="ValueError: <b>" if not i else None)
        for i, (reward, text) in enumerate(TEXTS.items())
    ]
    write_rollouts(run.rollouts, 1, table_of(rollouts), [0.0] * len(rollouts))
    return run


def grow(run: RunDirectory, step: int) -> None:
    values = {
        "reward/mean": step / 8,
        "actor/skipped": float(step == 1),
        "reward/errors": 1.0,
        "actor/loss": math.nan if step == 2 else 1.5,
        "rollout/mismatch_capped": 0.0,
        "timing_s/step": 2.0,
        "timing_s/rollout": 1.0,
    }
    with run.metrics.open("a") as file:
        file.write(json_line({"step": step, **json_numbers(values)}))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipe]:
    with chromium(tmp_path_factory.mktemp("profile")) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with viewer(root) as found:
        yield f"http://127.0.0.1:{found.port}/"


@pytest.fixture
def tab(browser: Pipe) -> Iterator[Tab]:
    """A tab, which must not have asked another machine or said that something is wrong."""
    tab = Tab(browser)
    tab.call("Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => { window.hit = true; };")  # fmt: skip
    yield tab
    assert tab.problems == []
    allowed = ("http://127.0.0.1:", "file://", "data:", "about:")
    assert [url for url in tab.requests if not url.startswith(allowed)] == []
    tab.close()


def show(tab: Tab, address: str) -> None:
    tab.open("about:blank")
    tab.open(address)
    tab.wait(READY)


def text(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def count(tab: Tab, selector: str) -> int:
    return int(tab.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def unhurt(tab: Tab) -> None:
    assert tab.run("window.hit") is None
    assert count(tab, "#view script, #view img, #view iframe, #view [onerror], #view [onload]") == 0
    assert tab.run("[...document.querySelectorAll('#view svg *')].every((e) => e.localName === 'polyline')")  # fmt: skip
    assert tab.run("[...document.querySelectorAll('a')].every((a) => a.getAttribute('href').startsWith('#/'))")  # fmt: skip


def test_runs_charts_and_rollouts_show(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr').length === 9")
    assert "own" in text(tab, "tbody")
    show(tab, f"{address}#/run/own")
    tab.wait("document.querySelectorAll('.uplot canvas').length > 2")
    assert count(tab, ".flat [title='rollout/mismatch_capped']") == 1
    assert count(tab, ".charts [title^='rollout/mismatch_capped']") == 0
    told = text(tab, ".attention")
    assert [each in told for each in ("1 optimizer step ", "2 completions")] == [True, True]
    assert count(tab, ".notice") == 0  # nothing is said twice
    show(tab, f"{address}#/run/own/rollouts")
    tab.wait("document.querySelectorAll('.item').length === 3")
    tab.wait("document.querySelector('.reader .text')")


def test_a_reward_has_the_colour_of_its_sign(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own/rollouts?sort=reward")
    tab.wait("document.querySelectorAll('.item').length === 3")
    red, grey, green = tab.run("[...document.querySelectorAll('.item .reward')].map((e) => getComputedStyle(e).color)")  # fmt: skip
    probe = "(() => { const e = document.body.appendChild(document.createElement('i')); e.style.color = 'var(--{})'; return getComputedStyle(e).color; })()"
    assert red == tab.run(probe.replace("{}", "bad"))
    assert grey == tab.run(probe.replace("{}", "faint"))
    assert green not in (red, grey)


@pytest.mark.nightly
def test_pairs_stand_side_by_side_by_margin(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/pairs/rollouts?kind=validation&sort=margin")
    tab.wait("document.querySelectorAll('.item').length === 4")
    tab.wait("document.querySelectorAll('.column').length === 2")
    shown = tab.run("[...document.querySelectorAll('.item .meta')].map((e) => e.textContent)")
    assert ["chosen" in shown[0], "0.5" in shown[0]] == [True, True]
    said = "[...document.querySelectorAll('.column .text')].map((e) => e.textContent)"
    assert tab.run(said) == ["good", "better"]
    tab.wait("document.querySelector('[name=sort]').value === 'margin'")  # once steps are read
    # The rejected answer shows the same pair, with the chosen one first.
    links = tab.run("[...document.querySelectorAll('.item')].map((e) => e.getAttribute('href'))")
    show(tab, f"{address}{links[3]}")
    tab.wait("document.querySelectorAll('.column').length === 2")
    assert tab.run(said) == ["right", "wrong"]
    unhurt(tab)
    show(tab, f"{address}#/run/answers/rollouts?kind=validation&sort=margin")
    tab.wait("document.querySelectorAll('.item').length === 2")
    shown = tab.run("[...document.querySelectorAll('.item .meta')].map((e) => e.textContent)")
    assert [
        "undesirable, margin −0.5" in shown[0].replace("-", "−"),
        "desirable, margin 2" in shown[1],
    ] == [True, True]
    tab.wait("document.querySelectorAll('.column').length === 1")
    unhurt(tab)
    show(tab, f"{address}#/run/own/rollouts")
    tab.wait("document.querySelectorAll('.item').length")
    assert count(tab, "[name=sort] option[value=margin]") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("view", VIEWS)
def test_hostile_texts_are_shown_and_do_nothing(tab: Tab, address: str, view: str) -> None:
    show(tab, f"{address}#/run/hostile/{view}")
    unhurt(tab)


@pytest.mark.nightly
def test_every_hostile_completion_is_shown_as_text(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/hostile/rollouts")
    tab.wait(f"document.querySelectorAll('.item').length === {len(HOSTILE)}")
    links = tab.run("[...document.querySelectorAll('.item')].map((e) => e.getAttribute('href'))")
    for completion, link in zip(HOSTILE, links, strict=True):
        for colour in ("", "?colour=logprob"):
            show(tab, f"{address}{link}{colour}")
            shown = text(tab, ".column .text")
            unhurt(tab)
            plain = "".join(c for c in completion[:10000] if c.isprintable() or c == "\u200d")
            if not colour:
                hidden = tab.run("[...document.querySelectorAll('.column .hidden')].reduce((t, e) => t.replace(e.textContent, ''), document.querySelector('.column .text').textContent)")  # fmt: skip
                assert plain in hidden, completion[:60]
            elif count(tab, ".tokens"):
                assert HOSTILE[0] in shown


@pytest.mark.nightly
def test_what_cannot_be_seen_is_shown_by_its_code(tab: Tab, address: str) -> None:
    for number, codes in (
        (5, ["U+202E", "U+202C"]),
        (6, ["\\x00 \\x1b", "\\x07"]),
        (7, ["U+D800"]),
    ):
        show(tab, f"{address}#/run/hostile/rollout/{quote(f'step-00000001:0:{number}')}")
        found = "[...document.querySelectorAll('.column .hidden')].map((e) => e.textContent)"
        assert tab.run(found) == codes


@pytest.mark.nightly
def test_a_megabyte_is_cut_and_can_be_had(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/own/rollouts?min_reward=1")
    tab.wait("document.querySelector('.column .text .more')")
    assert len(text(tab, ".column .text")) < 30_000
    tab.run("document.querySelector('.column .text .more').click()")
    tab.wait("document.querySelector('.column .text').textContent.length > 2 ** 20")
    assert "U+202E" in text(tab, ".column .hidden")


@pytest.mark.nightly
def test_filters_are_in_the_link_which_brings_them_back(tab: Tab, address: str) -> None:
    show(tab, f"{address}{SMALL}/rollouts")
    tab.wait("document.querySelectorAll('.item').length === 48")
    tab.run("const least = document.querySelector('[name=min_reward]'); least.value = '0.05'; least.dispatchEvent(new Event('input'));")  # fmt: skip
    tab.run("const order = document.querySelector('[name=sort]'); order.value = 'length'; order.dispatchEvent(new Event('change'));")  # fmt: skip
    tab.wait("location.hash.includes('min_reward=0.05') && location.hash.includes('sort=length')")
    tab.wait("document.querySelectorAll('.item').length < 48")
    rows = "[...document.querySelectorAll('.item')].map((e) => e.dataset.id)"
    shown, link = tab.run(rows), tab.run("location.href")
    rewards = tab.run("[...document.querySelectorAll('.item .reward')].map((e) => Number(e.textContent))")  # fmt: skip
    assert shown
    assert min(rewards) >= 0.05
    tab.run("document.querySelectorAll('.item')[1].click()")
    tab.wait("location.hash.includes('/rollout/') && document.querySelector('.item[aria-current]')")
    assert "min_reward=0.05" in tab.run("location.hash")
    show(tab, link)
    tab.wait(f"document.querySelectorAll('.item').length === {len(shown)}")
    assert tab.run(rows) == shown
    assert tab.run("document.querySelector('[name=min_reward]').value") == "0.05"
    assert tab.run("document.querySelector('[name=sort]').value") == "length"


@pytest.mark.nightly
def test_samples_stand_side_by_side_with_coloured_tokens(tab: Tab, address: str) -> None:
    show(tab, f"{address}{SMALL}/rollouts?colour=advantage")
    tab.wait("document.querySelector('.tokens span')")
    assert count(tab, ".column") == 1
    tab.press("b")
    tab.wait(
        "document.querySelectorAll('.column').length === 2 && location.hash.includes('beside=')"
    )
    first, second = tab.run("[...document.querySelectorAll('.column .text')].map((e) => e.textContent)")  # fmt: skip
    assert first != second
    ground = tab.run("getComputedStyle(document.querySelector('.tokens span')).backgroundColor")
    assert ground != "rgba(0, 0, 0, 0)"
    tab.run("document.querySelector('.tokens span').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")  # fmt: skip
    assert "0.5" in text(tab, ".told output")


@pytest.mark.nightly
def test_keys(tab: Tab, address: str) -> None:
    show(tab, address)
    tab.wait("document.querySelectorAll('tbody tr a').length === 6")
    focused = "document.activeElement.textContent"
    names = tab.run("[...document.querySelectorAll('tbody tr a')].map((e) => e.textContent)")
    tab.press("j")
    tab.press("j")
    assert tab.run(focused) == names[1]
    tab.press("k")
    tab.press("x")
    tab.wait("location.hash.includes('pick=')")
    tab.wait(f"{focused} === {json.dumps(names[0])}")
    tab.press("/")
    assert tab.run("document.activeElement.type") == "search"
    tab.press("Escape")
    tab.press("?")
    assert tab.run("document.getElementById('help').open")
    tab.press("Escape")
    tab.wait("!document.getElementById('help').open")
    show(tab, f"{address}{SMALL}")
    for key, view in (("l", "log"), ("t", "timeline"), ("k", "checkpoints"), ("f", "config"), ("r", "rollouts")):  # fmt: skip
        tab.press("g")
        tab.press(key)
        tab.wait(f"location.hash.endsWith('/{view}') && {READY}")
    tab.wait("document.querySelectorAll('.item').length")
    tab.press("j")
    tab.wait("location.hash.includes('/rollout/')")
    at = tab.run("location.hash")
    tab.press("j")
    tab.wait(f"location.hash !== {json.dumps(at)}")
    tab.press("u")
    tab.wait("location.hash.includes('/rollouts')")


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["sweep%2Fsmall", "hostile", "own"])
def test_narrow_pages_do_not_scroll_sideways(tab: Tab, address: str, run: str) -> None:
    tab.resize(390, 844, mobile=True)
    for view in ("runs", *(f"run/{run}/{view}" for view in VIEWS)):
        show(tab, f"{address}#/{view}")
        assert tab.run("document.documentElement.scrollWidth") <= 390, view
    show(tab, f"{address}#/run/{run}/rollouts")
    tab.wait("document.querySelectorAll('.item').length")
    for number in range(min(count(tab, ".item"), 12)):
        show(tab, f"{address}#/run/{run}/rollouts")
        tab.wait("document.querySelectorAll('.item').length")
        tab.run(f"document.querySelectorAll('.item')[{number}].click()")
        tab.wait("document.querySelector('.column')")
        assert tab.run("document.documentElement.scrollWidth") <= 390, number


@pytest.mark.nightly
def test_a_prompt_through_time_has_its_changes_marked(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/said/rollouts?prompt=5")
    tab.wait("document.querySelector('.reader .through-time')")
    tab.press("t")
    tab.wait("document.querySelectorAll('.by-step section').length === 3")
    assert "sample=0" in tab.run("location.hash")
    marked = "[...document.querySelectorAll('.by-step .text')].map((e) => [...e.childNodes].map((n) => [n.localName ?? '', n.textContent]).filter(([, t]) => t))"
    assert tab.run(marked) == [
        [["", "2 + 2 is "], ["del", "five "], ["ins", "four "], ["", "today"]],
        [["del", "no idea"], ["ins", "2 + 2 is five today"]],
        [["", "no idea"]],
    ]
    means = tab.run("[...document.querySelectorAll('.by-step h2 span')].map((e) => e.textContent)")
    assert means == ["mean 0.5", "mean 0", "mean 0"]
    tab.press("ArrowRight")
    tab.wait("location.hash.includes('sample=1')")
    tab.wait("!document.querySelector('.by-step del')")  # this sample said the same each time
    link = tab.run("location.href")
    show(tab, f"{link.replace('sample=1', 'sample=best')}&plain=1")
    assert count(tab, ".by-step ins, .by-step del") == 0
    assert text(tab, ".by-step .text") == "2 + 2 is four today"
    show(tab, link)
    assert tab.run("document.querySelector('.toolbar select').value") == "1"
    tab.press("m")
    tab.wait("document.querySelector('.prompt-shown > .text')")
    assert "<|im_start|>" in text(tab, ".prompt-shown > .text")
    tab.resize(390, 844, mobile=True)
    assert tab.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.nightly
def test_a_conversation_is_shown_turn_by_turn(tab: Tab, address: str) -> None:
    place = f"{address}#/run/talks/rollout/{quote('step-00000001:0:0')}"
    beside = quote("step-00000001:0:1")
    show(tab, place)
    turns = "[...document.querySelectorAll('.turn')].map((e) => [...e.children].map((c) => c.innerText.replace(/\\s+/g, ' ').trim()))"
    assert tab.run(turns) == [
        [
            "Turn 1 5 tokens model 1 s environment 500 ms called 0.250",
            "<call>",
            "multiply(a: 3)",
            "tool multiply · 125 ms · failed Error: no b",
        ],
        ["Turn 2 2 tokens model 1 s environment 250 ms right 1", "12"],
    ]
    assert text(tab, ".conversation > .reply .bubble") == "Begin."
    assert text(tab, ".conversation .end") == "Ended by the environment"
    assert tab.run("[...document.querySelectorAll('.parts dt')].map((e) => e.textContent)") == ["exact", "luck"]  # fmt: skip
    meta = tab.run("[...document.querySelectorAll('.item .meta')].map((e) => e.textContent)")
    assert [("2 turns" in each, "limit" in each) for each in meta[:2]] == [(True, False), (True, True)]  # fmt: skip
    show(tab, f"{place}?beside={beside}")
    same = "[...document.querySelectorAll('.turn')].map((e) => e.classList.contains('same'))"
    assert tab.run(same) == [True, False] * 2
    assert tab.run("document.querySelectorAll('.end')[1].className") == "end warn"
    show(tab, f"{place}?colour=logprobs")
    kinds = "[...document.querySelectorAll('.text.tokens > span')].map((e) => [e.className, e.textContent])"
    assert tab.run(kinds) == [
        ["mark", "turn 1"], ["size", "I say"], ["mark", "environment"], ["heard", " heard"],
        ["mark", "turn 2"], ["size", " twelve"],
    ]  # fmt: skip
    assert "by model" not in text(tab, ".head select")
    tab.run("document.querySelector('.text .heard').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")  # fmt: skip
    assert "not trained on" in text(tab, ".told output")
    tab.run("document.querySelectorAll('.item')[3].click()")
    tab.wait("document.querySelector('.column .notice strong')")
    assert text(tab, ".column .notice strong") == "The environment failed"
    for width in (400, 1440):
        tab.resize(width, 900, mobile=width == 400)
        show(tab, place)
        assert tab.run("document.documentElement.scrollWidth") <= width


@pytest.mark.nightly
def test_branches_of_a_conversation_are_told_apart(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/talks/rollouts")
    tab.run("document.querySelectorAll('.item')[5].click()")
    tab.wait("document.querySelector('.column .facts')?.innerText.includes('branch 1')")
    titles = tab.run("[...document.querySelectorAll('.samples a')].map((e) => e.title)")
    assert [title.partition(":")[0] for title in titles[-2:]] == ["sample 4", "sample 4, branch 1"]
    assert "sample=3" not in tab.run("document.querySelector('.beside').href")
    show(tab, f"{address}#/run/talks/prompt/0")
    assert count(tab, ".samples a") == 5


@pytest.mark.nightly
def test_what_tools_say_does_nothing(tab: Tab, address: str, root: Path) -> None:
    show(tab, f"{address}#/run/talks/rollout/{quote('step-00000001:0:2')}")
    unhurt(tab)
    bubbles = (
        "[...document.querySelectorAll('.conversation .reply .bubble')].map((e) => e.textContent)"
    )
    shown = tab.run(bubbles)
    assert {HOSTILE[0], HOSTILE[1], "U+202Eright to leftU+202C"} <= {*shown}
    assert '["parts",{"<i>":1}]' in shown
    assert max(map(len, shown)) < 5000
    assert text(tab, ".call") == f'{HOSTILE[1]}({HOSTILE[2]}: "U+202Eright to leftU+202C")'
    more = "[...document.querySelectorAll('.reply .more')]"
    tab.run(f"{more}.at(-1).click()")
    tab.wait(f"{bubbles}.some((text) => text.length === 2 ** 20)")
    report = write_report(root / "talks")
    assert report.stat().st_size < 2_000_000
    show(tab, f"{report.as_uri()}#/run/talks/rollouts")
    tab.wait("document.querySelectorAll('.conversation .turn').length === 2")
    for number in range(count(tab, ".item")):
        tab.run(f"document.querySelectorAll('.item')[{number}].click()")
        tab.wait(f"{READY} && document.querySelector('.column')")
        unhurt(tab)
    report.unlink()


@pytest.mark.nightly
def test_words_that_changed(tab: Tab, address: str) -> None:
    show(tab, address)
    changes = "import('/static/changes.js').then((m) => m.changesOf({}, {}))"
    rng = random.Random(0)
    for _ in range(60):
        earlier, later = ("".join(rng.choice(["a ", "b", "c\n", ", ", "漢", "é "]) for _ in range(rng.randrange(14))) for _ in range(2))  # fmt: skip
        parts = tab.run(changes.format(json.dumps(earlier), json.dumps(later)))
        assert "".join(part for kind, part in parts if kind != "del") == later
        kept = "".join(part for kind, part in parts if kind != "ins")
        assert kept.split() == earlier.split() or "".join(kept.split()) == "".join(earlier.split())
        assert all(one[0] != other[0] for one, other in pairwise(parts))
    long = " ".join(map(str, range(3000)))
    assert tab.run(changes.format(json.dumps(long), json.dumps(f"{long} more")))[-1] == ["ins", "more"]  # fmt: skip


@pytest.mark.nightly
def test_a_chat_is_shown_as_messages_or_raw(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/said/rollouts?prompt=5")
    tab.wait("document.querySelector('.reader .messages')")
    messages = "[...document.querySelectorAll('.message')].map((e) => [e.dataset.role, e.querySelector('.bubble').textContent])"
    assert tab.run(messages) == [["system", "Be short."], ["user", "2 + 2?"]]
    tab.press("m")
    tab.wait("location.hash.includes('raw=1') && document.querySelector('.prompt-shown > .text')")
    assert text(tab, ".prompt-shown > .text") == CHAT
    tab.press("m")
    tab.wait("document.querySelector('.reader .messages') && !location.hash.includes('raw')")
    rewards = tab.run("[...document.querySelectorAll('.item .reward')].map((e) => e.textContent)")
    assert set(rewards) == {"0", "1"}


@pytest.mark.nightly
def test_templates_of_chats(tab: Tab, address: str) -> None:
    show(tab, address)
    system, user = {"role": "system", "text": "A"}, {"role": "user", "text": "B"}
    written = {
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n": [system, user],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nB<|eot_id|>": [system, user],
        "<bos><start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n": [user],
        "<|system|>\nA<|end|>\n<|user|>\nB<|end|>\n<|assistant|>\n": [system, user],
        "<｜begin▁of▁sentence｜>A<｜User｜>B<｜Assistant｜>": [system, user],
        "2+2=": [],
    }  # fmt: skip
    for prompt, messages in written.items():
        found = tab.run(f"import('/static/messages.js').then((m) => m.messagesOf({json.dumps(prompt)}))")  # fmt: skip
        assert found == messages


@pytest.mark.nightly
def test_other_columns_of_the_row_are_shown(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/said/rollouts")
    tab.wait("document.querySelector('.reader .row-columns')")
    shown = "[...document.querySelectorAll('.row-columns div')].map((e) => [...e.children].map((c) => c.textContent))"
    assert tab.run(shown) == [["level", "<b>easy</b>"], ["tests", '["a", 1]']]
    assert text(tab, ".reader .answer") == "Answer 4"
    unhurt(tab)


@pytest.mark.nightly
def test_keys_go_through_the_samples_and_the_groups(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/said/rollouts")
    current = "(() => { const e = document.querySelector('.item[aria-current]'); return e && [...document.querySelectorAll('.item')].indexOf(e); })()"
    tab.wait(f"{current} === 0 && document.querySelectorAll('.column .samples a').length === 2")
    for key, place in (("J", 2), ("J", 4), ("ArrowRight", 5), ("ArrowRight", 5), ("K", 2), ("j", 3), ("ArrowLeft", 2), ("K", 0), ("K", 0)):  # fmt: skip
        tab.press(key)
        tab.wait(f"{current} === {place} && {READY}")
        tab.wait("document.querySelector('.column .samples [aria-current]')?.getAttribute('href').includes(encodeURIComponent(document.querySelector('.item[aria-current]').dataset.id))")  # fmt: skip
    tab.press("?")
    assert {"J", "t", "m"} <= set(tab.run("[...document.querySelectorAll('#help kbd')].map((e) => e.textContent)"))  # fmt: skip


@pytest.mark.nightly
def test_a_link_to_a_rollout_can_be_copied(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/said/rollouts?prompt=5")
    tab.wait("document.querySelectorAll('.column .copy').length === 2")
    tab.run("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text; }}})")  # fmt: skip
    for number, expected in ((0, "2 + 2 is four today"), (1, None)):
        tab.run(f"document.querySelectorAll('.column .copy')[{number}].click()")
        tab.wait("window.copied")
        copied = tab.run("(() => { const text = window.copied; window.copied = null; return text; })()")  # fmt: skip
        assert expected in (None, copied)
    show(tab, copied)
    tab.wait("document.querySelector('.column .text')")
    assert text(tab, ".column .text") == "2 + 2 is four today"


@pytest.mark.nightly
def test_steps_without_rollouts_are_named(tab: Tab, address: str) -> None:
    show(tab, f"{address}{SMALL}/rollouts")  # each 20th step of 60
    tab.wait("document.querySelector('.notes .faint')?.textContent.includes('3 of 60')")


@pytest.mark.nightly
def test_filters_follow_what_the_server_has_read(tab: Tab, address: str) -> None:
    slow = """window.seen = []; const ask = window.fetch; window.shares = [0, 0.4, 1];
    window.fetch = async (url, options) => {
      const response = await ask(url, options);
      if (!String(url).includes('api/facets')) return response;
      const facets = {...await response.json(), indexed: shares.shift() ?? 1};
      seen.push(document.querySelector('.notes').textContent);
      return new Response(JSON.stringify(shares.length ? {...facets, sources: []} : facets));
    };"""
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=slow)
    show(tab, f"{address}{SMALL}/rollouts")
    sources = "document.querySelectorAll('[name=source] option').length"
    assert tab.run(sources) == 1
    tab.wait("document.querySelector('.notes').textContent.includes('40 %')")
    tab.wait("!document.querySelector('.notes').textContent.includes('%')")
    assert tab.run(sources) > 2
    assert not any("%" in each for each in tab.run("seen")[:2])  # none in the first second
    assert tab.run("document.querySelector('[name=source]').offsetParent !== null")


@pytest.mark.nightly
def test_the_log_says_first_why_a_run_failed(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/failed/log")
    tab.wait("document.querySelectorAll('.entry').length === 6")
    notice, toolbar = tab.run("['.notice', '.toolbar'].map((s) => document.querySelector(s).getBoundingClientRect().top)")  # fmt: skip
    assert notice < toolbar
    assert "no room" in text(tab, ".notice strong")
    assert "free some" in text(tab, ".notice")
    assert tab.run("[...document.querySelectorAll('.notice details, .entry')].some((e) => e.open)") is False  # fmt: skip
    tab.run("document.querySelector('.notice summary').click()")
    assert "in step_one" in text(tab, ".notice .traceback")
    colours = "[...document.querySelectorAll('.entry .said')].map((e) => getComputedStyle(e).color)"
    debug, info, _, warning, critical, library = tab.run(colours)
    assert len({debug, info, warning, critical}) == 4
    assert info == library
    assert critical == tab.run("getComputedStyle(document.querySelector('.notice strong')).color")
    assert "reward 0.125" in tab.run("document.querySelectorAll('.entry')[2].textContent")
    assert text(tab, ".last") == "OSError: no room"
    assert count(tab, ".day") == 2  # the run went on after midnight
    tab.resize(390, 844, mobile=True)
    assert tab.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.nightly
def test_the_log_is_filtered_by_level_and_text(tab: Tab, address: str) -> None:
    show(tab, f"{address}#/run/failed/log")
    for level, number in (("info", 5), ("warning", 2), ("error", 1)):
        tab.run(f"(() => {{ const e = document.querySelector('[name=level]'); e.value = '{level}'; e.dispatchEvent(new Event('change')); }})()")  # fmt: skip
        tab.wait(f"document.querySelectorAll('.entry').length === {number}")
        assert f"level={level}" in tab.run("location.hash")
    show(tab, f"{address}#/run/failed/log?q=REWARD")
    tab.wait("document.querySelectorAll('.entry').length === 1")
    assert tab.run("document.querySelector('input[type=search]').value") == "REWARD"
    show(tab, f"{address}#/run/failed/log?q=nowhere")
    assert count(tab, ".entry") == 0
    assert count(tab, ".log .none") == 1


@pytest.mark.nightly
def test_dark_by_the_system_and_by_hand(tab: Tab, address: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    show(tab, address)
    light = tab.run(ground)
    tab.dark(True)
    tab.wait(f"{ground} !== {json.dumps(light)}")
    tab.press("d")
    tab.wait(f"{ground} === {json.dumps(light)}")
    show(tab, address)
    assert tab.run(ground) == light  # what was chosen stays
    tab.run("localStorage.clear()")


@pytest.mark.nightly
def test_a_run_that_goes_on_updates_its_page(tab: Tab, address: str, root: Path) -> None:
    run = growing(root, "live", 3)
    show(tab, f"{address}#/run/live")
    tab.wait("document.getElementById('live').className === 'on'")
    tab.wait("document.querySelector('.now b')?.textContent === '0.375'")
    grow(run, 4)
    tab.wait("document.querySelector('.now b').textContent === '0.5'")
    show(tab, f"{address}#/run/live/rollouts")
    tab.wait("document.querySelectorAll('.item').length === 3")
    write_rollouts(run.rollouts, 5, table_of([made_rollout(0, 0), made_rollout(1, 0)]), [0.0, 0.0])
    grow(run, 5)
    tab.wait("document.querySelector('.count .chip')")
    assert count(tab, ".item") == 3  # what one reads does not move
    tab.run("document.querySelector('.count .chip').click()")
    tab.wait("document.querySelectorAll('.item').length === 5")


def test_numbers_and_averages(tab: Tab, address: str) -> None:
    show(tab, address)
    said = {0.12345: "0.123", 12345.6: "12,346", 1e-6: "1e−6", -1.0: "−1", 2.5e6: "2.50M"}
    for value, shown in said.items():
        assert tab.run(f"import('/static/dom.js').then((m) => m.short({value}))") == shown
    assert tab.run("import('/static/dom.js').then((m) => m.short('-Infinity'))") == "−inf"
    rng = random.Random(0)
    values = [math.nan if rng.random() < 0.2 else rng.gauss(0, 1) for _ in range(90)]
    given = json.dumps([None if math.isnan(value) else value for value in values])
    averages = tab.run(f"import('/static/plot.js').then((m) => m.smooth({given}.map((v) => v ?? NaN)))")  # fmt: skip
    beta = 1 - 2 / (len(values) / 15 + 1)
    for t, average in enumerate(averages):
        weights = [beta ** abs(t - i) * math.isfinite(v) for i, v in enumerate(values)]
        total = sum(w * v for w, v in zip(weights, values, strict=True) if w)
        assert average == pytest.approx(total / sum(weights))


def test_spans_stand_where_their_time_is(tab: Tab, address: str) -> None:
    show(tab, address)
    spans = [
        {"name": "rollout", "start": 2, "seconds": 4, "depth": 0},
        {"name": "rollout/generate", "start": 3, "seconds": 2, "depth": 1, "error": "<b>"},
    ]
    ranks = json.dumps([{"rank": rank, "spans": spans} for rank in range(2)])
    found = "[...m.lanes({}).querySelectorAll('.span')].map((e) => [e.style.left, e.style.width, e.style.top, e.textContent, e.className])"
    bars = tab.run(f"import('/static/timeline.js').then((m) => {found.replace('{}', ranks)})")
    assert bars == 2 * [
        ["0%", "100%", "0px", "rollout", "span"],
        ["25%", "50%", "22px", "generate", "span bad"],
    ]


@pytest.mark.nightly
def test_seeds_are_one_line_with_a_band(tab: Tab, address: str) -> None:
    link = f"{address}{SMALL}/charts?with=sweep%2Fother&with=own"
    series = "document.querySelector('.plot').plot?.series.length"
    show(tab, link)
    tab.wait(f"{series} === 5")  # steps, low, high and mean of two seeds, and the other run
    assert count(tab, ".runs-legend .key") == 2
    show(tab, f"{link}&group=0")
    tab.wait(f"{series} === 4")
    assert count(tab, ".runs-legend .key") == 3
    show(tab, f"{address}{SMALL}/config?with=own")
    tab.wait("document.querySelectorAll('.different').length")
    assert "steps" in text(tab, "tbody")
    assert "optim.lr" not in text(tab, "tbody")
    show(tab, f"{address}{SMALL}/config?with=own&all=1")
    assert "optim.lr" in text(tab, "tbody")


@pytest.mark.nightly
def test_a_problem_is_told(tab: Tab, address: str) -> None:
    show_nothing = f"{address}#/run/nowhere/charts"
    tab.open(show_nothing)
    tab.wait("document.querySelector('.notice[role=alert]')")
    assert "nowhere" in text(tab, ".notice")
    refused = [each for each in tab.problems if "404" in each]
    assert refused == tab.problems
    tab.forget()


@pytest.mark.nightly
def test_a_report_shows_the_same_numbers_without_a_server(
    tab: Tab, address: str, root: Path
) -> None:
    facts = """[...document.querySelectorAll('.tile .value, .notice, details td, .now b, .legend b')].map((e) => e.textContent)"""
    shown = []
    for run in ("sweep/small", "own"):
        report = write_report(root / run).as_uri()
        name = run.rpartition("/")[2]
        for place in (f"{address}#/run/{quote(run, safe='')}/charts", report):
            show(tab, place)
            tab.wait("[...document.querySelectorAll('.plot')].filter((e) => e.plot).length > 2")
            shown.append(tab.run(facts))
        assert shown[-1] == shown[-2]
        assert len(shown[-1]) > 8
        show(tab, f"{report}#/run/{name}/rollouts")
        assert count(tab, ".item") >= 2
        tab.press("j")
        tab.wait("document.querySelector('.column .text')")
        show(tab, f"{report}#/run/{name}/config")
        assert "path" in text(tab, "#view")
        assert tab.run("[...document.querySelectorAll('#tabs a')].map((e) => e.textContent).length") == 3  # fmt: skip


@pytest.mark.nightly
def test_a_report_of_hostile_texts_does_nothing(tab: Tab, root: Path) -> None:
    report = write_report(root / "hostile").as_uri()
    for view in ("charts", "rollouts", "config"):
        show(tab, f"{report}#/run/hostile/{view}")
        unhurt(tab)
    assert [url for url in tab.requests if url.startswith("http")] == []
    tab.run("(() => { const s = document.createElement('script'); s.textContent = 'window.hit = true'; document.body.append(s); })()")  # fmt: skip
    assert tab.run("window.hit") is None  # the policy of the file refuses what is not its own
    assert any("Content Security Policy" in each for each in tab.problems)
    tab.forget()
