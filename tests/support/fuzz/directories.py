"""Hostile directories of models, tokenizers, adapters and runs for `commands.py`, each with a command that reads them.

Two small runs are made once in a process, one of them of an adapter. Each input has a copy of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from burnish.cli.main import main
from support.faults.bit_flips import reseal
from support.fuzz.mutations import damage, displace
from support.runs.training_files import SFT, make_files

_SETTINGS = [
    "engine.precision=fp32", "batch.tokens_per_device=64", "tracking.progress=false", "data.train=[train.jsonl]", "steps=2",
    "data.validation=[validation.jsonl]",
]  # fmt: skip
_RL = ["batch.prompts=2", "rollout.n=2", "rollout.max_response_length=4", "reward.functions=[exact_match]", "reward.workers=1"]  # fmt: skip
_NEWEST = "checkpoints/step-00000002"


@cache
def _base() -> tempfile.TemporaryDirectory[str]:
    """A directory with model/, tokenizer/, adapter/, runs/run, runs/lora, data and configurations."""
    made = tempfile.TemporaryDirectory(prefix="burnish-fuzz-")
    root = Path(made.name)
    with contextlib.chdir(root), contextlib.redirect_stderr(io.StringIO()):
        make_files(root)
        for name in ("train", "validation"):
            rows = Path(f"{name}.jsonl").read_text().splitlines(keepends=True)
            Path(f"{name}.jsonl").write_text("".join(rows[:8]))
        settings = {**SFT, "steps": 2, "evaluation": {"every": 1}, "checkpoint": {"save_every": 1, "keep_last": 2}}  # fmt: skip
        Path("sft.yaml").unlink()
        Path("rl.yaml").unlink()
        Path("c.yaml").write_text(json.dumps(settings))
        assert main(["sft", "c.yaml"]) == 0
        shutil.copytree(f"runs/run/{_NEWEST}/model", "model")
        words = ["name=lora", "model={path: model, tokenizer: null, fresh: null, lora: {rank: 2}}"]
        assert main(["sft", "c.yaml", *words]) == 0
        shutil.copytree(f"runs/lora/{_NEWEST}/model", "adapter")
        assert main(["ckpt", "pin", "runs/run/checkpoints/step-00000001"]) == 0
    return made


def _copy() -> None:
    """Put the base into the working directory."""
    shutil.copytree(_base().name, ".", dirs_exist_ok=True)


def _asked(words: list[str]) -> list[str]:
    """A command that reads questions from standard input."""
    sys.stdin = io.StringIO("1+1=\n")
    return [*words, "rollout.max_response_length=2", "engine.precision=fp32"]


def model_directory(rng: random.Random) -> list[str]:
    """A model's directory, in which something is missing, broken or not what it says."""
    _copy()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        damage(rng, Path("model"))
    dry = [*_SETTINGS, "--dry-run"]
    return rng.choice(
        [
            ["sft", "model.path=model", *dry],
            ["sft", "model.path=model", *dry],
            ["rl", "model.path=model", *_RL, *dry],
            ["rl", "model.path=adapter/../model", *_RL, *dry],
            ["sft", "model.fresh=model/config.json", "model.tokenizer=model", *dry],
            ["rl", "model.fresh=model/config.json", "model.tokenizer=tokenizer", "critic.path=model", "algorithm.advantage=gae", *_RL, *dry],
            ["sft", "model.path=model", "model.lora.rank=2", *dry],
            ["sft", "name=new", "model.path=model", *_SETTINGS, "steps=1"],
            ["eval", rng.choice(["model", "model.path=model"]), *_SETTINGS],
            ["plan", "model.path=model", "--devices", "1xCPU-8G"],
            ["ckpt", "import", "model", "runs/new"],
            ["ckpt", "diff", "model", "runs/run"],
            ["ckpt", "export", "runs/lora", "out", "--merged"],
            ["init", "sft", "model", "train.jsonl"],
            _asked(["chat", "model"]),
        ]
    )  # fmt: skip


def tokenizer(rng: random.Random) -> list[str]:
    """A tokenizer's or an adapter's directory, likewise."""
    _copy()
    name = rng.choice(["tokenizer", "tokenizer", "adapter"])
    for _ in range(rng.choice([1, 1, 2])):
        damage(rng, Path(name))
    dry = [*_SETTINGS, "--dry-run"]
    if name == "adapter":
        return rng.choice(
            [
                ["sft", "model.path=model", "model.lora.path=adapter", *dry],
                ["eval", "model.path=model", "model.lora.path=adapter", *_SETTINGS],
                ["plan", "model.path=model", "model.lora.path=adapter", "--devices", "1xCPU-8G"],
                ["ckpt", "import", "adapter", "runs/new"],
                ["sft", "model.path=adapter", *dry],
            ]
        )
    return rng.choice(
        [
            ["sft", "model.path=model", "model.tokenizer=tokenizer", *dry],
            ["rl", "model.path=model", "model.tokenizer=tokenizer", *_RL, *dry],
            ["rl", "model.path=model", "model.chat_template=tokenizer/chat_template.jinja", "data.string_prompts=user", *_RL, *dry],
            ["eval", "model.path=model", "model.tokenizer=tokenizer", *_SETTINGS],
        ]
    )  # fmt: skip


def run_directory(rng: random.Random) -> list[str]:
    """A run's directory, or one of its steps, likewise; now and then with hashes that fit what is in it."""
    _copy()
    name = rng.choice(["run", "run", "lora"])
    run = Path("runs", name)
    newest = run / _NEWEST
    for _ in range(rng.choice([1, 1, 1, 2])):
        place = rng.choice([run, newest, newest, newest / "model", run / "checkpoints"])
        damage(rng, place if place.is_dir() else run)
    if rng.random() < 0.05:
        displace(rng, rng.choice([run, run / "checkpoints", newest]))
    if rng.random() < 0.3 and not any(
        path.is_fifo() for path in newest.rglob("*")
    ):  # it would wait
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # where COMMIT is none
            reseal(newest)
    again = ["sft", "c.yaml", f"name={name}"]
    if name == "lora":
        again.append("model={path: model, tokenizer: null, fresh: null, lora: {rank: 2}}")
    dry = [*_SETTINGS, "--dry-run"]
    return rng.choice(
        [
            ["runs"],
            ["runs", "compare", "runs/run", "runs/lora"],
            ["config", "show", str(run)],
            ["config", "check", f"{run}/config.yaml"],
            ["ckpt", "ls", str(run)],
            ["ckpt", "show", str(newest), "--tensors"],
            ["ckpt", "show", str(run), "--json"],
            ["ckpt", "verify", str(run)],
            ["ckpt", "verify", str(newest), "--fast", "--json"],
            ["ckpt", "diff", str(newest), f"{run}/checkpoints/step-00000001"],
            ["ckpt", "diff", str(run), "model"],
            ["ckpt", "export", str(run), "out"],
            ["ckpt", "export", str(newest), "out", "--dtype", "fp32"],
            ["ckpt", "export", "runs/lora", "out", "--merged"],
            ["ckpt", "import", f"{newest}/model", "runs/new"],
            ["ckpt", "pin", str(newest)],
            ["ckpt", "unpin", f"{run}/checkpoints/step-00000001"],
            ["ckpt", "gc", str(run)],
            ["ckpt", "gc", str(run), "--dry-run"],
            ["eval", str(run)],
            ["eval", str(run), "--dry-run"],
            _asked(["chat", str(run)]),
            [*again, "--dry-run"],
            [*again, "steps=3"],
            [*again, "steps=3"],
            ["sft", f"{run}/config.yaml", "steps=3", "--dry-run"],
            ["rl", f"model.path={run}", *_RL, *dry],
            ["sft", f"model.path={newest}", *dry],
            ["plan", f"model.path={run}", "--devices", "1xCPU-8G"],
            ["init", "rl", str(run), "train.jsonl"],
        ]
    )
