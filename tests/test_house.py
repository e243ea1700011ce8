"""What keeps the package readable (docs/decisions/0001-house.md): small files, a core without options, names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
MOST_FUNCTIONS_OF_THE_WHOLE_CONFIGURATION = 15
MOST_DOUBLED_CLASSES = 0
MOST_DOUBLED_MODULES = 0
MOST_LINES_OF_A_FILE = 900
OPTIONAL = (
    "burnish.plan",
    "burnish.check.",
    "burnish.methods.layout_check",
    "burnish.engines.megatron",
    "burnish.data.length_cache",
    "burnish.checkpoint.kept",
    "burnish.checkpoint.tools",
    "burnish.models.composite",
    "burnish.models.lora",
    "burnish.models.kernels.sink_attention",
    "burnish.models.kernels.span_attention",
    "burnish.models.kernels.liger",
    "burnish.models.kernels.triton_logprobs",
    "burnish.models.kernels.ulysses",
    "burnish.models.parts",
    "burnish.models.routing",
    "burnish.models.value_head",
    "burnish.algorithms.advantages",
    "burnish.algorithms.critic",
    "burnish.algorithms.policy_loss",
    "burnish.algorithms.token_selection",
    "burnish.distributed.accelerators",
    "burnish.distributed.failure_watch",
    "burnish.distributed.slurm",
    "burnish.distributed.spinning",
    "burnish.distributed.stall",
    "burnish.distributed.tensor_collectives",
    "burnish.engines.offload",
    "burnish.rollout.builtin.shared_cache",
    "burnish.methods.parts.critic",
    "burnish.engines.optim.muon",
    "burnish.engines.torch.activation_offload",
    "burnish.engines.torch.compilation",
    "burnish.engines.torch.tensor_parallel",
    "burnish.checkpoint.destinations",
    "burnish.files.remote",
    "burnish.files.cache",
    "burnish.files.backends",
    "burnish.tracking.console",
    "burnish.tracking.logs",
    "burnish.tracking.rollouts",
    "burnish.tracking.profiles",
    "burnish.tracking.services",
    "burnish.tracking.traces",
    "burnish.methods.evaluation",
    "burnish.methods.parts.guard",
    "burnish.files.hub",
    "burnish.launch",
    "burnish.runs.hub_revisions",
    "burnish.runs.model_card",
    "burnish.data.splits",
    "burnish.data.in_memory",
    "burnish.data.streaming",
    "burnish.runs.download_inputs",
    "burnish.runs.out_of_memory",
    "burnish.runs.replicas",
    "burnish.runs.stragglers",
    "burnish.methods.parts.judges",
    "burnish.view",
)
"""What `import burnish.methods.rl` must not reach."""
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


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of our modules that a module imports, inside functions and for types as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("burnish"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("burnish"))


def closure(root: str) -> set[str]:
    """The modules that importing `root` can reach."""
    seen: set[str] = set()
    todo = [root]
    while todo:
        name = todo.pop()
        if name in modules() and name not in seen:
            seen.add(name)
            parts = name.split(".")
            todo += [".".join(parts[:count]) for count in range(1, len(parts))]
            todo += imported(modules()[name])
    return seen


def test_files_are_small() -> None:
    assert [name for name, count in lines().items() if count > MOST_LINES_OF_A_FILE] == []


def test_the_training_loop_can_be_read() -> None:
    reached = closure("burnish.methods.rl")
    assert [name for name in sorted(reached) if name.startswith(OPTIONAL)] == []


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
    """Few functions outside `config` take the whole configuration."""
    takers = [
        f"{name}.{node.name}"
        for name, tree in modules().items()
        if not name.startswith("burnish.config")
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
