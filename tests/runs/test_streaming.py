"""Runs that read their rows as training goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.runs.training_files import At, burnish, done, metrics, ranks, rollouts, write_rows
from support.services.hdfs import HdfsServer
from support.services.hub import running_hub

from burnish.files.remote import Remote

WORDS = ("data.streaming=1", "steps=4", "evaluation.every=0", "checkpoint.save_every=1")


@pytest.fixture(scope="module")
def streams(work: Path) -> Path:
    """Two directories of rows, of about two windows and of one."""
    for name, sign, count, size in (("sums", "+", 27, 60_000), ("products", "*", 5, 10)):
        (work / name).mkdir()
        rows = [
            {"prompt": f"{n}{sign}0=", "completion": "1", "n": "x" * size} for n in range(count)
        ]
        write_rows(work / name / "even.jsonl", rows[::2])
        write_rows(work / name / "odd.jsonl", rows[1::2])
    return work


def is_the_same_when_killed_and_resumed_on_two_ranks(
    work: Path, kind: str, *more: str, world: int = 1
) -> Path:
    name = f"streamed_{kind}_{len(''.join(more))}_{world}"
    words = [kind, f"{kind}.yaml", f"name={name}", *WORDS, *more]
    again = [*words, f"name={name}_again"]
    whole = done(work, *words, world=world)
    commands = ranks(work, again, world, At("burnish.runs.run:Run.finish", 3, signal.SIGKILL))
    codes = [command.wait() for command in commands]
    assert codes[0] == -signal.SIGKILL, commands[0].output
    assert 0 not in codes
    resumed = done(work, *again, world=2)
    for one, other in zip(metrics(whole), metrics(resumed), strict=True):
        assert other.get("train/loss", 0.0) == pytest.approx(one.get("train/loss", 0.0), 1e-4, 1e-5)
    if kind == "rl":
        asked = [[row["prompt"] for row in rollouts(whole, step)] for step in (1, 2, 3, 4)]
        assert asked == [
            [row["prompt"] for row in rollouts(resumed, step)] for step in (1, 2, 3, 4)
        ]
        for step in asked:
            assert sum("+0=" in prompt for prompt in step[::4]) == 3
    return whole


@pytest.mark.nightly
def test_examples_go_on_with_the_next_row(streams: Path) -> None:
    whole = is_the_same_when_killed_and_resumed_on_two_ranks(
        streams, "sft", f"data.train=['file://{streams}/sums']"
    )
    state = json.loads((whole / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["cursor"][0] == 4 * 8


MIXED = ("data.train=[sums, 'products/*.jsonl']", "data.weights=[3, 1]")


@pytest.mark.nightly
def test_prompts_of_a_mixture_go_on_with_the_next_rows(streams: Path) -> None:
    is_the_same_when_killed_and_resumed_on_two_ranks(streams, "rl", *MIXED)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_rows_that_four_ranks_had_go_on_with_the_next_on_two(streams: Path, kind: str) -> None:
    is_the_same_when_killed_and_resumed_on_two_ranks(streams, kind, *MIXED, world=4)


@pytest.mark.nightly
def test_prompts_that_rank_0_draws_ahead_go_on_with_the_next_rows(streams: Path) -> None:
    is_the_same_when_killed_and_resumed_on_two_ranks(
        streams, "rl", *MIXED, "rollout.place=child", "rollout.ahead=1"
    )


def test_a_dry_run_reads_the_first_rows(streams: Path) -> None:
    given = ["sft", "sft.yaml", f"data.train=['file://{streams}/sums']", *WORDS]
    code, output = burnish(streams, *given, "--dry-run")
    assert code == 0, output
    for wrong in ("data.text_column=gone", "steps=null", "data.overlong=error"):
        code, output = burnish(streams, *given, wrong, "--dry-run")
        assert code in (2, 5), output


@pytest.mark.nightly
def test_two_ranks_stream_from_hdfs(streams: Path, hdfs_server: HdfsServer) -> None:
    """They share what they fetch, and their writers are other processes."""
    folder = Remote(f"{hdfs_server.url}/sums")
    for path in (streams / "sums").iterdir():
        folder.put(path.name, path.read_bytes())
    runs = [
        done(streams, "rl", "rl.yaml", f"data.train=['{where}']", *WORDS, *more, world=2)
        for where, *more in (
            (streams / "sums", "name=here"),
            (folder, "name=hdfs", "checkpoint.background=true"),
        )
    ]
    here, there = ([rollouts(run, step) for step in (1, 2, 3, 4)] for run in runs)
    assert here == there


@pytest.mark.nightly
def test_a_data_set_of_the_hub_is_streamed_and_its_files_stay_there(work: Path) -> None:
    """Two ranks of a machine share what they fetch. A failing hub is asked again, and its commit is pinned."""
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1), "n": "x" * 60_000} for n in range(40)]
    lines = [json.dumps(row) + "\n" for row in rows]
    files = {"data/train-0.jsonl": "".join(lines[:25]), "data/train-1.jsonl": "".join(lines[25:])}
    repository = {name: content.encode() for name, content in files.items()}
    with running_hub({"datasets/some/sums": repository}) as hub:
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(work / "hub"), "HF_HUB_OFFLINE": "0"}
        home["BURNISH_CACHE"] = str(work / "shared")
        words = ["sft", "sft.yaml", "data.train=[some/sums]", *WORDS]
        one = done(work, *words, "name=hub_one", environ=home)
        hub.failures = 3
        two = done(work, *words, "name=hub_two", world=2, environ=home)
    for mine, other in zip(metrics(one), metrics(two), strict=True):
        assert other.get("train/loss", 0.0) == pytest.approx(
            mine.get("train/loss", 0.0), 1e-4, 1e-5
        )
    assert "some/sums@" in (two / "config.yaml").read_text()
    assert not list((work / "hub").rglob("*.jsonl"))
    assert len([each for each in (work / "shared" / "streams").glob("*") if not each.suffix]) <= 3
