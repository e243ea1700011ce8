"""What a person gets wrong is said, with an exit code of its own, through the real command."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints.states import committed
from support.nightly import by_day
from support.runs.training_files import At, burnish, done, make_files, metrics, rollouts, write_rows

from burnish.config.schema import DataConfig
from burnish.runs.setup import make_loader


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    root = make_files(tmp_path_factory.mktemp("bad"))
    model = committed(done(root, "sft", "sft.yaml", "steps=1") / "checkpoints")[-1].path / "model"
    weights = load_file(model / "model.safetensors")
    for name in ("no_weights", "shard_missing", "wrong_shape"):
        shutil.copytree(model, root / name, ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(weights)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    (root / "shard_missing/model.safetensors.index.json").write_text(json.dumps(index))
    save_file(
        {name: weights[name] for name in names[1:]},
        root / "shard_missing/model-00001-of-00002.safetensors",
    )
    save_file(
        {**weights, names[-1]: weights[names[-1]][:-1].clone()},
        root / "wrong_shape/model.safetensors",
    )
    (root / "empty.jsonl").write_text("")
    (root / "broken.jsonl").write_text('{"prompt": "1", "completion": "1"}\n{"prompt": \n')
    write_rows(root / "columns.jsonl", [{"wort": "1", "reply": "2"}])
    write_rows(root / "mixed.jsonl", [{"prompt": "1" * n, "answer": "1"} for n in (2, 3, 9, 12)])
    rows = [{"prompt": "1", "answer": "1", "level": 1}] * 4
    write_rows(root / "level.jsonl", rows)
    write_rows(root / "no_level.jsonl", [{"prompt": "1", "answer": "1"}] * 4)
    return root


LEVEL = "reward.functions=[{function: 'rewards.py:needs_level'}]"


MISTAKES: list[tuple[str, list[str], int, list[str]]] = [
    ("rl", ["batch.minibatches=3"], 2, ["batch.prompts 4", "batch.minibatches 3"]),
    ("sft", ["name=run", "optim.lr=0.5"], 4, ["runs/run", "optim.lr"]),
    ("rl", ["reward.functions=[{function: 'rewards.py:leters'}]"], 2, ["leters", "letters"]),
    ("sft", ["model.fresh=null", "model.path=no_weights"], 5, ["no_weights"]),
    ("sft", ["model.fresh=null", "model.path=shard_missing"], 5, ["model-00002-of-00002"]),
    ("sft", ["model.fresh=null", "model.path=wrong_shape"], 4, ["shape"]),
    ("sft", ["data.train=[empty.jsonl]"], 2, ["empty.jsonl"]),
    ("sft", ["data.train=[broken.jsonl]"], 2, ["broken.jsonl, line 2"]),
    ("sft", ["data.train=[columns.jsonl]"], 5, ["wort", "reply"]),
    ("rl", ["data.train=[columns.jsonl]"], 5, ["wort", "reply"]),
    ("rl", [LEVEL, "data.train=[no_level.jsonl]", "data.validation=[level.jsonl]"], 5, ["needs_level", "data.train lacks", "level"]),
    ("rl", ["data.train=[mixed.jsonl]", "data.max_prompt_length=8", "data.overlong=error"], 2, ["9 tokens", "data.max_prompt_length"]),
    ("sft", ["checkpoint.reserve_gb=1e9"], 1, ["checkpoint.reserve_gb"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides", "code", "facts"), by_day(MISTAKES, MISTAKES[::2]))
def test_mistakes_end_the_run(work, command, overrides, code, facts):
    name = [] if any(each.startswith("name=") for each in overrides) else ["name=mistake"]
    shutil.rmtree(work / "runs/mistake", ignore_errors=True)
    ended, output = burnish(
        work, command, "sft.yaml" if command == "sft" else "rl.yaml", "steps=1", *name, *overrides
    )
    assert ended == code, output
    said = output.partition("error: ")[2]
    for fact in facts:
        assert fact in said, output
    assert "Traceback" not in output
    assert not list((work / "runs/mistake").glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("command", "module"), [("rl", "methods.parts.online_training"), ("eval", "runs.setup")]
)
def test_held_out_data_without_a_column_are_refused_before_the_model_is_loaded(
    work, command, module
):
    code, output = burnish(
        work, command, "rl.yaml", "name=lacks", LEVEL, "data.train=[level.jsonl]", "data.validation=[no_level.jsonl]",
        at=At(f"burnish.{module}:make_run_engine", 1, signal.SIGKILL),
    )  # fmt: skip
    assert code == 5, output
    assert "needs_level" in output
    assert "data.validation lacks" in output


def test_a_full_disk_leaves_the_step_before(work):
    argv = ["sft", "sft.yaml", "name=full"]
    run = done(work, *argv, "steps=2")
    code, output = burnish(work, *argv, "steps=4", "checkpoint.reserve_gb=1e9")
    assert code == 1, output
    assert [step.step for step in committed(run / "checkpoints")] == [2]
    assert [path.name for path in (run / "checkpoints").glob(".inflight*")] == []
    done(work, *argv, "steps=4")
    assert metrics(run)[-1]["step"] == 4


def test_overlong_prompts_are_dropped_and_counted(work):
    code, output = burnish(
        work, "rl", "rl.yaml", "name=drop", "steps=1", "data.train=[mixed.jsonl]", "data.max_prompt_length=8",
    )  # fmt: skip
    assert code == 0, output
    assert {len(row["prompt"]) for row in rollouts(work / "runs/drop", 1)} == {2, 3}
    assert "2 of 4" in output


TEMPERS = """\
import time

def of(kind, solution_str, ground_truth, extra_info):
    if solution_str == ground_truth or extra_info["prompt"][0] in "135":
        return 1.0
    if kind == "raises":
        raise RuntimeError("no reward today")
    time.sleep(600 if kind == "hangs" else 0)
    return float("nan")
"""


@pytest.mark.parametrize(
    "kind", ["raises", pytest.param("hangs", marks=pytest.mark.nightly), "nan"]
)
def test_errors_of_rewards_are_recorded_and_counted(work, kind):
    (work / "tempers.py").write_text(TEMPERS)
    function = f"{{function: 'tempers.py:of', kwargs: {{kind: {kind}}}}}"
    run = done(
        work, "rl", "rl.yaml", f"name=reward_{kind}", f"steps={1 if kind == 'hangs' else 2}", "evaluation.every=0", "evaluation.before=false",
        "reward.timeout_seconds=1", "batch.prompts=8", f"reward.functions=[{function}]", "reward.max_failed_share=1",
    )  # fmt: skip
    found = metrics(run)
    assert all(0 < row["reward/errors"] < 32 for row in found)
    assert all(row["reward/dropped"] == row["reward/errors"] for row in found)
    assert all(row["reward/mean"] == 1 for row in found)
    failed = [row for row in rollouts(run, 1) if row["reward_error"]]
    assert {(row["reward"], row["advantage"]) for row in failed} == {("NaN", 0.0)}


@pytest.mark.nightly
def test_rewards_that_fail_for_all_end_the_run_which_goes_on_when_they_are_mended(work):
    argv = ["rl", "rl.yaml", "name=all_fail", "evaluation.every=0", "evaluation.before=false", "checkpoint.save_every=1",
        "reward.functions=[{function: 'mended.py:score'}]"]  # fmt: skip
    function = work / "mended.py"
    head = "def score(data_source, solution_str, ground_truth):\n    "
    for body, expected in (
        ("return answer", 2),
        ("return solution_str == ground_truth or answer", 2),
    ):
        function.write_text(f"{head}{body}\n")
        code, output = burnish(work, *argv, "steps=3")
        assert code == expected, output
        assert "NameError" in output
        assert "Traceback" not in output
        assert committed(work / "runs/all_fail/checkpoints") == []
    function.write_text(f"{head}return 1.0\n")
    run = done(work, *argv, "steps=3")
    assert [row["reward/errors"] for row in metrics(run)] == [0, 0, 0]


class Rows(list[int]):
    """Rows without an order of their own."""

    def difficulty(self) -> None:
        return None


@pytest.mark.parametrize(
    ("size", "by_epoch", "is_named"), [(3, False, False), (4, False, True), (4, True, False)]
)
def test_a_step_that_draws_rows_several_times_is_named(
    size: int, by_epoch: bool, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(Rows(range(3)), DataConfig(), 0, size, by_epoch=by_epoch)
    assert len(set(loader.take(size))) == 3
    assert bool(caplog.records) == is_named
