"""A dry run refuses what the run refuses, with the same words, and lets pass what the run does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.tiny import save_tiny
from support.models.tokenizers import save_char_tokenizer
from support.nightly import by_day
from support.runs.training_files import FRESH, burnish, make_files, write_rows

from burnish.config.load import read_config
from burnish.errors import UsageError
from burnish.methods.table import METHODS
from burnish.runs.dry_run import set_up

OWN = """
def wrong_shape(rollouts): return [1.0]
def fails(logprobs, micro, algorithm): raise ValueError("no loss today")
def needs_level(completions, level): return [0.0] * len(completions)
def picky(completions, answer): return [float(text == a) for text, a in zip(completions, answer)]
class Tracker:
    def __init__(self, directory): raise RuntimeError("only a run makes one")
    def log(self, step, values): pass
    def sync(self): pass
    def close(self): pass
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training needs, models with weights of the same vocabulary, and what is wrong."""
    root = make_files(tmp_path_factory.mktemp("work"))
    save_tiny(root / "model", vocab_size=FRESH["vocab_size"])
    save_char_tokenizer(root / "model")
    save_tiny(root / "mixture", "mixtral", vocab_size=FRESH["vocab_size"])
    save_tiny(root / "other", vocab_size=FRESH["vocab_size"], intermediate_size=96)
    (root / "other/config.json").write_text((root / "model/config.json").read_text())
    (root / "own.py").write_text(OWN)
    write_rows(root / "broken.jsonl", [{"prompt": "1", "answer": "1"}])
    with (root / "broken.jsonl").open("a") as file:
        file.write("{\n")
    write_rows(root / "renamed.jsonl", [{"qestion": "1", "reply": "1"}])
    write_rows(root / "long.jsonl", [{"prompt": "1" * 90, "completion": "1", "answer": "1"}])
    return root


def own(name: str) -> str:
    return f"reward.functions=[{{function: '{name}'}}]"


REFUSED: list[tuple[str, int, list[str]]] = [
    ("sft", 5, ["data.train=[renamed.jsonl]"]),
    ("rl", 2, ["data.train=[broken.jsonl]"]),
    ("sft", 2, ["data.train=[long.jsonl]"]),
    ("rl", 2, ["data.train=[long.jsonl]", "data.overlong=error"]),
    ("sft", 4, ["model.fresh.vocab_size=3"]),
    ("sft", 4, ["model.path=other", "model.fresh=null"]),
    ("sft", 4, ["model.path=model", "model.fresh=null", "model.lora={rank: 2, targets: [query]}"]),
    (
        "rl",
        4,
        [
            *("model.path=mixture", "model.fresh=null", "rollout.engine=vllm"),
            *("rollout.place=servers", "model.lora={rank: 2, targets: [q_proj], publish: adapter}"),
        ],
    ),
    ("rl", 2, [own("own.py:gone")]),
    ("rl", 5, [own("own.py:needs_level"), "evaluation.every=0", "data.validation=[]"]),
    ("rl", 2, ["algorithm.advantage=own.py:wrong_shape"]),
    ("rl", 2, ["algorithm.policy_loss=own.py:fails"]),
    ("rl", 4, ["reward.models=[{path: model}]"]),
    ("rl", 2, ["rollout.stop_token_ids=[100000]"]),
    ("eval", 5, ["data.validation=[renamed.jsonl]", "reward.functions=[]"]),
]


@pytest.mark.parametrize(("command", "code", "overrides"), by_day(REFUSED, REFUSED[::3]))
def test_both_refuse_the_same(work: Path, command: str, code: int, overrides: list[str]) -> None:
    argv = [command, "rl.yaml" if command == "rl" else "sft.yaml", *overrides]
    dry_code, dry = burnish(work, *argv, "--dry-run")
    run_code, run = burnish(work, *argv, f"name=refused-{abs(hash(str(argv)))}", "steps=1")
    assert (dry_code, run_code) == (code, code), dry + run
    (said,) = [line for line in dry.splitlines() if line.startswith("error: ")]
    assert said in run.splitlines()


@pytest.mark.parametrize(
    "argv",
    [
        ["rl", "rl.yaml", own("own.py:picky"), "tracking.trackers=['own.py:Tracker']"],
        ["rl", "rl.yaml", "model.path=model", "model.fresh=null", "algorithm.advantage=gae"],
        ["sft", "sft.yaml", "model.path=model", "model.fresh=null", "model.lora.rank=2"],
        ["eval", "rl.yaml", "model.path=model", "model.fresh=null"],
    ],
)
def test_a_run_that_can_begin_passes(work: Path, argv: list[str]) -> None:
    before = set(work.iterdir())
    code, output = burnish(work, *argv, "--dry-run")
    assert code == 0, output
    python = work / "__pycache__"  # Python's own, of own.py
    assert set(work.iterdir()) - before - {python} == set(work.glob("output-*.txt")) - before


def test_a_reward_is_called_on_the_first_row(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    with pytest.raises(UsageError):
        set_up(read_config("rl.yaml", [own("rewards.py:raises")]), METHODS["rl"])
    with pytest.raises(UsageError):
        set_up(read_config("rl.yaml", [own("rewards.py:short")]), METHODS["rl"])


def test_several_faults_are_told_together(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    wrong = [own("own.py:gone"), "data.train=[renamed.jsonl]", "tracking.trackers=['own.py:No']"]
    with pytest.raises(UsageError) as caught:
        set_up(read_config("rl.yaml", wrong), METHODS["rl"])
    assert str(caught.value).startswith("3 problems")


def test_rows_that_only_come_later_are_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first rows are all left out, the whole data set decides, as in the run."""
    monkeypatch.chdir(work)
    long = {"prompt": "1" * 90, "completion": "1"}
    write_rows(work / "later.jsonl", [long] * 600 + [{"prompt": "1", "completion": "1"}])
    set_up(read_config("sft.yaml", ["data.train=[later.jsonl]"]), METHODS["sft"])
