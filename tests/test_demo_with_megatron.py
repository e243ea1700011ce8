"""The demo's configuration with the four lines and with the command of the guide to Megatron.

It learns as the torch engine does, from the same seeds: the suite looks at two steps, `make contract` at thirty.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks.ports import free_port
from support.runs.same_runs import assert_same
from support.runs.training_files import done, metrics, ranks

from burnish.config.load import read_config

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guides/megatron.md").read_text()
(LINES,) = re.findall(r"```yaml\n(engine:\n  kind: megatron.*?)```", GUIDE, re.S)
"""What is added to a configuration."""
(COMMAND,) = re.findall(r"^torchrun .*engine\.kind=megatron.*$", GUIDE, re.M)
"""What does the same to the demo's."""
CONFIG = "examples/demo/rl.yaml"
FEW = [
    "steps=2",
    "batch.prompts=8",
    "rollout.n=2",
    "optim.warmup_steps=1",
    "engine.precision=fp32",
]
THIRTY = [
    "steps=30",
    "optim.lr=2.5e-4",  # enough for thirty steps to show
    "optim.schedule=wsd",
    "optim.decay_steps=10",
    "evaluation.every=10",
    "engine.precision=fp32",
]
LAYOUTS = {"TP 2": "engine.tensor_parallel=2", "PP 2": "engine.pipeline_parallel=2"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like the repository's, with the demo's tokenizer and digits."""
    root = tmp_path_factory.mktemp("demo")
    (root / "examples").symlink_to(ROOT / "examples")
    task = runpy.run_path(str(ROOT / "examples/demo/task.py"))
    (root / "runs/demo").mkdir(parents=True)
    task["write_tokenizer"](root / "runs/demo/tokenizer")
    task["write_data"](root / "runs/demo")
    return root


@pytest.fixture(scope="module")
def begun(demo: Path) -> str:
    """Where reinforcement learning begins: a model of a few steps."""
    steps = ["steps=2", "batch.examples=16", "optim.warmup_steps=1"]
    done(demo, "sft", "examples/demo/sft.yaml", *steps, "name=begun")
    return "model.path=runs/demo/begun/checkpoints/step-00000002/model"


def arguments() -> list[str]:
    """Of the guide's command, behind `burnish`."""
    words = shlex.split(COMMAND)
    return words[words.index("burnish") + 1 :]


def test_the_guides_four_lines_are_what_its_command_says(demo: Path) -> None:
    assert len(LINES.splitlines()) == 4
    (demo / "rl.yaml").write_text((demo / CONFIG).read_text() + LINES)
    by_lines = read_config(demo / "rl.yaml")
    _, config, *overrides = arguments()
    by_command = read_config(demo / config, overrides)
    assert by_lines.engine == by_command.engine
    assert by_lines.engine != read_config(demo / CONFIG).engine


@pytest.mark.nightly
def test_the_guides_command_does_what_the_torch_engine_does(demo: Path, begun: str) -> None:
    done(demo, *arguments(), *FEW, begun, world=4)
    done(demo, "rl", CONFIG, "name=torch", *FEW, begun)
    assert_same(demo / "runs/demo/megatron", demo / "runs/demo/torch")


@pytest.mark.contract
def test_the_guides_command_runs_as_it_is_written(demo: Path, begun: str) -> None:
    """But for fewer steps, and a port of its own."""
    port = f"--master-port={free_port()}"
    command = shlex.split(COMMAND.replace("torchrun", f"torchrun {port}"))
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environ = os.environ | {"PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command += [*FEW, begun, "name=as_written"]
    ended = subprocess.run(command, cwd=demo, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    done(demo, "rl", CONFIG, "name=torch_again", *FEW, begun)
    assert_same(demo / "runs/demo/as_written", demo / "runs/demo/torch_again")


def learned(demo: Path, name: str, *argv: str, world: int = 1) -> dict[str, list[float]]:
    """The curves of thirty steps of reinforcement learning, as a run of this name."""
    run_to_its_end(demo, "rl", CONFIG, f"name={name}", *THIRTY, *argv, world=world)
    rows = metrics(demo / "runs/demo" / name)
    return {
        "reward": [row["reward/mean"] for row in rows if "reward/mean" in row],
        "entropy": [row["actor/entropy"] for row in rows if "actor/entropy" in row],
        "validation": [row["val/mean@1"] for row in rows if "val/mean@1" in row],
    }


def run_to_its_end(demo: Path, *argv: str, world: int = 1) -> None:
    commands = ranks(demo, argv, world)
    assert [each.wait(900) for each in commands] == [0] * world, commands[0].output


@pytest.fixture(scope="module")
def of_torch(demo: Path) -> dict[str, list[float]]:
    """Of the torch engine, after the demo's fine-tuning."""
    run_to_its_end(demo, "sft", "examples/demo/sft.yaml")
    return learned(demo, "of_torch")


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_as_with_the_torch_engine(
    demo: Path, of_torch: dict[str, list[float]], layout: str
) -> None:
    """The same answers, until rounding makes another one of 2048; from there on the same curve."""
    name = layout.replace(" ", "")
    found = learned(demo, name, "engine.kind=megatron", LAYOUTS[layout], world=2)
    first, last = (sum(found["reward"][part]) / 5 for part in (slice(5), slice(-5, None)))
    assert last > first + 0.04
    assert found["validation"][-1] > found["validation"][0] + 0.08
    for name, tolerance in {"reward": 0.02, "entropy": 0.02, "validation": 0.05}.items():
        assert found[name] == pytest.approx(of_torch[name], abs=tolerance), name
    assert found["reward"][:10] == of_torch["reward"][:10]
