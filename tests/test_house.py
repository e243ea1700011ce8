"""What keeps the package readable (docs/decisions/0001-house.md): small files, a core without options, names."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from operator import itemgetter
from pathlib import Path

import pytest
from support.runs.training_files import RL, done, make_files
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
MOST_FUNCTIONS_OF_THE_WHOLE_CONFIGURATION = 16
MOST_DOUBLED_CLASSES = 0
MOST_DOUBLED_MODULES = 0
MOST_LINES_OF_A_FILE = 900
MOST_LOADED_LINES = 38_500
"""Lines of our modules that a plain run may load."""
OPTIONS = (
    "burnish.data.in_memory",
    "burnish.data.streaming",
    "burnish.distributed.failure_watch",
    "burnish.distributed.slurm",
    "burnish.engines.megatron",
    "burnish.engines.offload",
    "burnish.engines.optim.muon",
    "burnish.engines.torch.activation_offload",
    "burnish.engines.torch.compilation",
    "burnish.engines.torch.tensor_parallel",
    "burnish.launch.ray",
    "burnish.models.composite",
    "burnish.models.kernels.liger",
    "burnish.models.kernels.sink_attention",
    "burnish.models.kernels.span_attention",
    "burnish.models.kernels.triton_logprobs",
    "burnish.models.kernels.ulysses",
    "burnish.models.mxfp4",
    "burnish.models.routing",
    "burnish.rollout.client",
    "burnish.rollout.inference_engine",
    "burnish.rollout.openai",
    "burnish.rollout.server",
    "burnish.rollout.sglang",
    "burnish.rollout.vllm",
    "burnish.translate",
    "burnish.view.server",
)
"""Modules that a plain run must not load."""
PLAIN = """
import json, sys
from pathlib import Path
from burnish.cli.main import main
assert main(["rl", "rl.yaml", "name=measured"]) == 0
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
ours = {name: file for name, file in files.items() if file and name.partition(".")[0] == "burnish"}
Path("loaded.json").write_text(json.dumps({
    name: Path(file).read_text().count("\\n") for name, file in ours.items()
}))
"""
"""A run of two steps in a process of its own, which writes the lines of each module that it has loaded."""
OTHER_MEANINGS = {"git", "gemma"}
"""Model types that are also a program's name, and the name of a rounding mode of Liger's norm."""


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax of every module of the package, by its dotted name."""
    found = {}
    for path in sorted((ROOT / "burnish").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


@cache
def lines() -> dict[str, int]:
    """Lines of each module."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "burnish").rglob("*.py")
    }
    return {name: path.read_text().count("\n") for name, path in paths.items()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Lines of the modules that a plain run of reinforcement learning loads: one process, all defaults, a kept proof."""
    root = make_files(tmp_path_factory.mktemp("plain"))
    settings = {key: value for key, value in RL.items() if key not in ("evaluation", "tracking")}
    settings |= {"steps": 2, "data": {"train": ["train.jsonl"]}}
    (root / "rl.yaml").write_text(json.dumps(settings))
    done(root, "rl", "rl.yaml")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PLAIN], cwd=root, env=environ, check=True)
    found: dict[str, int] = json.loads((root / "loaded.json").read_text())
    return found


def test_files_are_small() -> None:
    assert [name for name, count in lines().items() if count > MOST_LINES_OF_A_FILE] == []


def test_a_plain_run_loads_the_core(loaded: dict[str, int]) -> None:
    assert sum(loaded.values()) <= MOST_LOADED_LINES, sorted(loaded.items(), key=itemgetter(1))


def test_a_plain_run_loads_no_option(loaded: dict[str, int]) -> None:
    assert [name for name in sorted(loaded) if name.startswith(OPTIONS)] == []
    assert [name for name in OPTIONS if not any(each.startswith(name) for each in modules())] == []


def test_no_class_name_and_no_module_name_stands_twice() -> None:
    classes, stems = defaultdict(set), defaultdict(set)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(name)
        package, _, stem = name.removeprefix("burnish.").partition(".")
        if stem and stem.rpartition(".")[2] not in ("base", "cli"):
            stems[package, stem.rpartition(".")[2]].add(name)
    doubled = [sorted(found) for found in classes.values() if len(found) > 1]
    assert len(doubled) <= MOST_DOUBLED_CLASSES, doubled
    doubled = [sorted(found) for found in stems.values() if len(found) > 1]
    assert len(doubled) <= MOST_DOUBLED_MODULES, doubled


def test_functions_take_the_settings_that_they_need() -> None:
    """Few functions outside `config` and the methods take the whole configuration."""
    takers = [
        f"{name}.{node.name}"
        for name, tree in modules().items()
        if not name.startswith(("burnish.config", "burnish.method"))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.args, *node.args.kwonlyargs]
        if argument.annotation
        and re.search(r"\b(Run|SFT|RL)Config\b", ast.unparse(argument.annotation))
    ]
    assert len(set(takers)) <= MOST_FUNCTIONS_OF_THE_WHOLE_CONFIGURATION, sorted(set(takers))


def test_only_the_table_of_families_names_model_types() -> None:
    types = set(CONFIG_MAPPING_NAMES) - OTHER_MEANINGS
    found = [
        f"{name}:{node.lineno}: {node.value}"
        for name, tree in modules().items()
        if name != "burnish.families"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in types
    ]
    assert found == []


def test_comments_stand_above_the_code_that_they_explain() -> None:
    below = re.compile(r"^[^\s#].*\n(?:#.*\n)+(?=\n|\Z)", re.MULTILINE)
    files = (file for part in ("burnish", "bench", "tests") for file in (ROOT / part).rglob("*.py"))
    found = {file: below.findall(file.read_text()) for file in files}
    assert {file: each for file, each in found.items() if each} == {}
