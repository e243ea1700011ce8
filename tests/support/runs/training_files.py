"""What a training run of seconds needs: a tokenizer, sums to learn, rewards, two configurations; and running it.

A command runs `burnish` in a process of its own, forked from a server that has torch and the library
imported already: tenths of a second instead of five for `python -m burnish`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from burnish.tracking.rollouts import Kind, read_rollouts, rollout_files
from burnish.tracking.trackers import read_metrics
from support.checkpoints.states import committed
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.ranks.fork_server import TESTS, Forked, with_given_path
from support.ranks.ports import free_port
from support.ranks.processes import PATIENCE_SECONDS
from support.runs.forked_command import run

FRESH = {
    "model_type": "qwen3",
    "vocab_size": len(char_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": char_tokenizer().eos_token_id,
}

MIXTURE = {**FRESH, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BY_SIGMOID = {
    **FRESH,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 2,
    "topk_group": 1,
}
"""A mixture whose routers score by sigmoid."""

STATE = {
    **FRESH,
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A model with a layer that has state."""

REWARDS = """\
import time

def letters(completions, **columns):
    "A reward that completions of a random model differ in."
    return [sum(c.islower() for c in text) / 4 for text in completions]

def raises(completions, **columns):
    raise RuntimeError("no reward today")

def hangs(completions, **columns):
    time.sleep(600)

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def short(completions, **columns):
    return [1.0]

def needs_level(completions, level, **columns):
    return [float(each) for each in level]

def same(completions, **columns):
    return [1.0] * len(completions)
"""

SFT: dict[str, Any] = {
    "name": "run",
    "steps": 6,
    "model": {"tokenizer": "tokenizer", "fresh": FRESH},
    "engine": {"precision": "fp32"},
    "optim": {"lr": 0.01},
    "data": {"train": ["train.jsonl"], "validation": ["validation.jsonl"]},
    "batch": {"examples": 8, "tokens_per_device": 64},
    "evaluation": {"every": 3},
    "tracking": {"rollouts_every": 1},
}

RL: dict[str, Any] = {
    **SFT,
    "batch": {"prompts": 4, "tokens_per_device": 64},
    "rollout": {"n": 4, "max_response_length": 4, "slots": 8},
    "reward": {"functions": [{"function": "rewards.py:letters"}], "workers": 1},
}


def make_files(root: Path) -> Path:
    """Write everything into `root`: tokenizer/, rewards.py, train.jsonl, validation.jsonl, sft.yaml, rl.yaml."""
    save_char_tokenizer(root / "tokenizer")
    (root / "rewards.py").write_text(REWARDS)
    sums = [(a, b) for a in range(6) for b in range(6)]
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in sums
    ]
    write_rows(root / "train.jsonl", rows[::2] + rows[1:24:2])
    write_rows(root / "validation.jsonl", rows[25::2])
    for name, settings in (("sft", SFT), ("rl", RL)):
        # JSON is YAML.
        (root / f"{name}.yaml").write_text(json.dumps(settings, indent=1))
    return root


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclasses.dataclass(frozen=True)
class At:
    """A signal that a process sends itself when it calls something for the nth time, or some seconds later.

    `place` is `module:name` or `module:Class.name`, as the caller looks it up.
    """

    place: str
    nth: int
    number: int
    seconds: float = 0.0


class Command:
    """A running `burnish` command. `audit`: the arguments of `audit.install`."""

    _numbers = itertools.count()

    def __init__(
        self,
        root: Path,
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        at: At | None = None,
        audit: tuple[str, str] | None = None,
    ) -> None:
        self._log = root / f"output-{next(self._numbers)}.txt"
        self._log.write_text("")  # an earlier test run's may be there
        given = dict(environ or {})
        own = {"PYTHONPATH": with_given_path(TESTS.parent), "OMP_NUM_THREADS": "1", **given}
        told = None if at is None else dataclasses.astuple(at)
        self._process = Forked(
            run, list(argv), str(root), str(self._log), given, told, audit, environ=own
        )
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        """What it has written to standard output and error."""
        return self._log.read_text()

    def is_running(self) -> bool:
        """Whether its end has not been told yet."""
        return self._process.is_running()

    def reached(self, step: int) -> bool:
        """Whether it gets to a step: returns once it has told of it or a later one, or has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            ended = not self.is_running()
            if any(int(told) >= step for told in re.findall(r"^step +(\d+)/", self.output, re.M)):
                return True
            if ended:
                return False
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def send(self, number: int) -> None:
        self._process.send(number)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit code, minus the signal's number if one killed it."""
        try:
            return self._process.wait(seconds)
        except TimeoutError:
            self.send(signal.SIGABRT)  # it prints its stacks
            time.sleep(0.5)
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None


def burnish(
    root: Path, *argv: str, at: At | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command to its end; its exit code and output."""
    command = Command(root, argv, environ, at)
    return command.wait(), command.output


def done(root: Path, *argv: str, world: int = 1, environ: Mapping[str, str] | None = None) -> Path:
    """Run a command that has to succeed, in `world` processes; returns the directory of its run."""
    commands = ranks(root, argv, world, environ=environ)
    for command in commands:
        assert command.wait() == 0, "\n".join(each.output for each in commands)
    name = next((a.removeprefix("name=") for a in argv if a.startswith("name=")), "run")
    return root / "runs" / name


def ranks(
    root: Path | Sequence[Path],
    argv: Sequence[str],
    world: int,
    at: At | None = None,
    audit: tuple[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Command]:
    """Start a command in `world` processes that find each other as ranks started by hand do; each in a `root` of its own where so many are given, `at` for the first."""
    roots = [root] * world if isinstance(root, Path) else root
    if world == 1:
        return [Command(roots[0], argv, environ, at=at, audit=audit)]
    shared = {
        **(environ or {}),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    local = {"LOCAL_WORLD_SIZE": str(world)}
    return [
        Command(
            roots[rank],
            argv,
            shared | local | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            at if rank == 0 else None,
            audit,
        )
        for rank in range(world)
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    """Every step's numbers, except how long things took."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))}
        for row in read_metrics(run / "metrics.jsonl")
    ]


def rollouts(run: Path, step: int, kind: Kind = "step") -> list[dict[str, Any]]:
    """A step's rows, those that are kept longest first."""
    files = [path for written, path in rollout_files(run / "rollouts", kind) if written == step]
    return [row for path in files for row in read_rollouts(path)]


# Files that hold an id of the checkpoint, or what was not logged when it was saved.
_OWN = ("COMMIT", "manifest.json", "state.json")


def outcome(run: Path) -> dict[str, Any]:
    """All that an interrupted run has to have in common with an uninterrupted one, bit for bit."""
    newest = committed(run / "checkpoints")[-1].path
    kept = [p for p in newest.rglob("*") if p.is_file() and p.name not in _OWN]
    files = [*kept, *(run / "rollouts").glob("*")]
    state = json.loads((newest / "state.json").read_text())
    for late in ("unlogged", "unvalidated", "measured", "measured_later"):
        del state[late]
    return {
        "metrics": json.dumps(metrics(run), sort_keys=True),  # NaN equals NaN here
        "state": state,
        **{str(path.relative_to(run)): path.read_bytes() for path in sorted(files)},
    }


def weights(run: Path) -> dict[str, Any]:
    """The newest models and optimizers, by file and tensor."""
    newest = committed(run / "checkpoints")[-1].path
    return {
        f"{path.relative_to(newest)}/{name}": tensor
        for path in sorted(newest.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
