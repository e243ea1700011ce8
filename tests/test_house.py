"""What keeps the package readable (docs/decisions/0001-house.md): small files, a core without options, names."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path

import pytest
from support.runs.training_files import RL, make_files
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from burnish import extend
from burnish.cli.arguments import _COMMANDS
from burnish.cli.main import function_of
from burnish.extend import Table

ROOT = Path(__file__).parents[1]
MOST_FUNCTIONS_OF_THE_WHOLE_CONFIGURATION = 17
MOST_DOUBLED_CLASSES = 0
MOST_DOUBLED_MODULES = 0
MOST_LINES_OF_A_FILE = 900
MOST_LOADED_LINES = 33_600
"""Lines of our modules that a plain run may load, without comments, which are to be plentiful. The goal is 24,000; docs/decisions/0001-house.md says what is in its way."""
OPTIONS = (
    "burnish.algorithms.critic",
    "burnish.algorithms.token_selection",
    "burnish.check.comparison",
    "burnish.check.family_proof",
    "burnish.check.generation",
    "burnish.data.tool_calls",
    "burnish.data.turn_bridge",
    "burnish.environments",
    "burnish.check.small_model",
    "burnish.checkpoint.background",
    "burnish.checkpoint.destinations",
    "burnish.checkpoint.kept",
    "burnish.checkpoint.load",
    "burnish.checkpoint.tools",
    "burnish.cli.dry_run",
    "burnish.cli.launch",
    "burnish.cli.plan",
    "burnish.data.example_encoder",
    "burnish.data.examples",
    "burnish.data.curriculum",
    "burnish.data.in_memory",
    "burnish.data.prompt_forms",
    "burnish.data.splits",
    "burnish.data.streaming",
    "burnish.distributed.accelerators",
    "burnish.distributed.failure_watch",
    "burnish.distributed.meeting",
    "burnish.distributed.nccl",
    "burnish.distributed.slurm",
    "burnish.engines.megatron",
    "burnish.engines.offload",
    "burnish.engines.optim.muon",
    "burnish.engines.torch.activation_offload",
    "burnish.engines.torch.compilation",
    "burnish.engines.torch.expert_parallel",
    "burnish.engines.torch.tensor_parallel",
    "burnish.files.backends",
    "burnish.files.hub_files",
    "burnish.files.once",
    "burnish.files.quantized",
    "burnish.files.remote",
    "burnish.launch.accelerated",
    "burnish.launch.elastic",
    "burnish.launch.local",
    "burnish.launch.ray",
    "burnish.launch.supervisor",
    "burnish.methods.parts.critic",
    "burnish.methods.parts.judges",
    "burnish.methods.parts.serve",
    "burnish.models.composite",
    "burnish.models.kernels.expert_rows",
    "burnish.models.kernels.liger",
    "burnish.models.kernels.mixers",
    "burnish.models.kernels.sink_attention",
    "burnish.models.kernels.span_attention",
    "burnish.models.kernels.triton_decoding",
    "burnish.models.kernels.triton_draws",
    "burnish.models.kernels.triton_logprobs",
    "burnish.models.kernels.ulysses",
    "burnish.models.lora",
    "burnish.models.mxfp4",
    "burnish.models.parts",
    "burnish.models.routing",
    "burnish.plan",
    "burnish.records.completion_parts",
    "burnish.rewards.builtin",
    "burnish.rollout.client",
    "burnish.rollout.builtin.cuda_graphs",
    "burnish.rollout.builtin.fused_steps",
    "burnish.rollout.builtin.paged_cache",
    "burnish.rollout.builtin.states",
    "burnish.rollout.builtin.paged_decoding",
    "burnish.rollout.builtin.turns",
    "burnish.rollout.following",
    "burnish.rollout.in_flight",
    "burnish.rollout.inference_engine",
    "burnish.rollout.openai",
    "burnish.rollout.server",
    "burnish.rollout.sglang",
    "burnish.rollout.staging",
    "burnish.rollout.vllm",
    "burnish.rollout.weight_group",
    "burnish.runs.dry_run",
    "burnish.runs.hub_push",
    "burnish.runs.out_of_memory",
    "burnish.runs.pending_batches",
    "burnish.runs.remote_inputs",
    "burnish.runs.replicas",
    "burnish.runs.stragglers",
    "burnish.sandbox",
    "burnish.tracking.otlp",
    "burnish.tracking.profiles",
    "burnish.tracking.services",
    "burnish.translate",
    "burnish.view",
)
"""Modules that a plain run must not load."""
PLAIN = """
import json, sys
from pathlib import Path
from burnish.cli.main import main
assert main(["rl", "rl.yaml", sys.argv[1]]) == 0
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
ours = {name: file for name, file in files.items() if file and name.partition(".")[0] == "burnish"}
Path("loaded.json").write_text(json.dumps({
    name: sum(not line.lstrip().startswith("#") for line in Path(file).read_text().splitlines())
    for name, file in ours.items()
}))
"""
"""A run of two steps in a process of its own, which writes the lines of each module that it has loaded."""
MAY_BE_DOUBLED = {"evaluate", "main", "serve", "train"}
"""`main` of programs and `serve` of child processes are found by name; methods and the API train and evaluate."""
TABLES_OF_MODULES = {"burnish.extend"}
"""The only table that names modules by a string."""
CYCLES = [
    {"burnish.methods.evaluation", "burnish.methods.table"},
    {
        "burnish.methods.offline",
        "burnish.methods.parts.offline_training",
        "burnish.methods.parts.validation",
    },
    {"burnish.methods.parts.online_training", "burnish.methods.rl"},
    {"burnish.methods.parts.generators", "burnish.methods.parts.serve"},
]
"""Modules that reach each other, some inside a function. No other may."""
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
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("proved", "measured"):
        argv = [sys.executable, "-c", PLAIN, f"name={name}"]
        subprocess.run(argv, cwd=root, env=environ, check=True)
    found: dict[str, int] = json.loads((root / "loaded.json").read_text())
    return found


def test_files_are_small() -> None:
    assert [name for name, count in lines().items() if count > MOST_LINES_OF_A_FILE] == []


def test_a_plain_run_loads_the_core(loaded: dict[str, int]) -> None:
    assert sum(loaded.values()) <= MOST_LOADED_LINES, sorted(loaded.items(), key=itemgetter(1))


def test_a_plain_run_loads_no_option(loaded: dict[str, int]) -> None:
    assert [name for name in sorted(loaded) if name.startswith(OPTIONS)] == []
    assert [name for name in OPTIONS if not any(each.startswith(name) for each in modules())] == []


def test_our_modules_are_imported_by_statements() -> None:
    """mypy, ruff, import-linter and editors see a statement, and no string."""
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in modules().items()
        if name not in TABLES_OF_MODULES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        and any(text.startswith("burnish") for text in _texts(tree, node.args))
    ]
    assert found == []


def _texts(tree: ast.Module, arguments: list[ast.expr]) -> list[str]:
    """Beginnings of the strings that a call gets, also of f-strings and of the module's constants."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    named = [
        constants.get(each.id, each) if isinstance(each, ast.Name) else each for each in arguments
    ]
    nodes = [inner for each in named for inner in ast.walk(each)]
    parts = [constants.get(each.id, each) if isinstance(each, ast.Name) else each for each in nodes]
    return [
        each.value
        for each in parts
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def test_every_command_has_its_function() -> None:
    for function, *_ in _COMMANDS.values():
        if function:
            function_of(Namespace(function=function))


def test_modules_do_not_import_each_other() -> None:
    """Imports inside functions count; those for types alone do not."""
    imported = {name: set(_imported(tree.body)) - {name} for name, tree in modules().items()}
    reached = {name: _reached(name, imported) for name in imported}
    found = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in reached
        if name in reached[name]
    }
    assert sorted(map(sorted, found)) == sorted(map(sorted, CYCLES))


def _reached(name: str, imported: Mapping[str, set[str]]) -> set[str]:
    """The modules that a module imports, and those that these import."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = imported.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def _imported(body: Iterable[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imported(node.orelse)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("burnish"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("burnish"))
        else:
            yield from _imported(ast.iter_child_nodes(node))


def test_targets_of_the_table_lie_below_those_who_ask_for_them() -> None:
    """The layers hold with the strings of `burnish.extend` followed."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = config["tool"]["importlinter"]["contracts"]
    layers = {
        name.strip(): number
        for number, layer in enumerate(contract["layers"])
        for name in re.split(r"[|:]", layer)
    }
    tables = {name: value for name, value in vars(extend).items() if isinstance(value, Table)}
    assert len(tables) >= 6
    upward = [
        f"{asker} asks for {target}"
        for asker, tree in modules().items()
        if asker not in ("burnish.extend", "burnish.config.constraints")  # which only names them
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "burnish.extend"
        for alias in node.names
        if alias.name in tables
        for target in tables[alias.name].builtins.values()
        if layers[target.split(".")[1].split(":")[0]] < layers[asker.split(".")[1]]
    ]
    assert upward == []


def test_only_methods_name_methods() -> None:
    names = {"sft", "rl"}
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if not name.startswith(("burnish.methods", "burnish.translate"))  # other frameworks' words
        and name != "burnish"  # which exports functions
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []


def test_each_line_of_assignment_binds_one_name() -> None:
    """`a, b = x, y` only where the order matters: in a swap, or where a later value needs an earlier name."""
    doubled = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and all(isinstance(target, ast.Name) for target in node.targets[0].elts)
        and not {target.id for target in node.targets[0].elts if isinstance(target, ast.Name)}
        & {read.id for read in ast.walk(node.value) if isinstance(read, ast.Name)}
    ]
    assert doubled == []


def test_words_without_a_noun_live_for_one_line() -> None:
    """A name such as `found` says nothing where its noun is out of sight."""
    words = {"each", "found", "held", "kept", "made", "mine", "told"}
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp)
    inner += (ast.DictComp, ast.GeneratorExp, ast.ClassDef)
    long = []
    for name, tree in modules().items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            places = defaultdict(list)
            below = list(ast.iter_child_nodes(function))
            while below:
                node = below.pop()
                if isinstance(node, ast.Name) and node.id in words:
                    places[node.id].append(node.lineno)
                if not isinstance(node, inner):
                    below += ast.iter_child_nodes(node)
            long += [
                f"{name}:{lines[0]} {word}"
                for word, lines in places.items()
                if max(lines) - min(lines) > 1
            ]
    assert long == []


def test_no_public_function_name_stands_twice() -> None:
    found = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].append(name)
    doubled = {
        name: places
        for name, places in found.items()
        if len(places) > 1 and not name.startswith("_") and name not in MAY_BE_DOUBLED
    }
    assert doubled == {}


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
