"""Write tests/rollout/vllm_facts.json: names and defaults of vLLM that Burnish relies on, as each allowed version's files have them.

Download the wheels, and give their directory:

    for v in 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0; do pip download --no-deps --only-binary :all: -d wheels vllm==$v; done
    python scripts/vllm_facts.py wheels

It imports nothing of vLLM: it reads the source inside the wheels.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "rollout" / "vllm_facts.json"
SOURCE = ROOT / "burnish" / "rollout" / "vllm"
MEMBERS: Mapping[str, Sequence[str]] = {
    "vllm:EngineArgs": ["create_engine_config"],
    "vllm:LLMEngine": [],
    "vllm.v1.engine.llm_engine:LLMEngine": [
        "from_vllm_config", "add_request", "step", "abort_request", "wake_up", "sleep", "reset_prefix_cache", "collective_rpc",
        "engine_core", "output_processor",
    ],
    "vllm:ModelRegistry": [],
    "vllm:__version__": [],
    "vllm.config:VllmConfig": ["use_v2_model_runner"],
    "vllm.distributed:cleanup_dist_env_and_memory": [],
    "vllm.lora.lora_model:LoRAModel": ["from_lora_tensors"],
    "vllm.lora.peft_helper:PEFTHelper": ["from_dict"],
    "vllm.model_executor.models.registry:_ModelRegistry": ["get_supported_archs"],
    "vllm.model_executor.models.utils:WeightsMapper": ["get_rename_mapper", "get_unstacked_mapper"],
    "vllm.platforms.interface:Platform": ["device_type", "is_cpu"],
    "vllm.usage.usage_lib:UsageContext": ["LLM_CLASS"],
    "vllm.v1.engine.output_processor:OutputProcessor": ["external_req_ids", "request_states"],
    "vllm.v1.engine.output_processor:RequestState": ["routed_experts_chunks"],
    "vllm.v1.sample.logits_processor:LogitsProcessor": ["is_argmax_invariant", "update_state", "apply"],
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": ["np"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsContext": ["idx_mapping_np", "pos"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor": ["add_request", "apply"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcRequestState": ["max_num_reqs", "prompt_len"],
}  # fmt: skip
"""Names and members that the source uses beside its import statements."""
DEFAULTS: Mapping[str, Sequence[str]] = {
    "vllm:SamplingParams": [
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k", "min_p", "min_tokens", "output_kind",
        "prompt_logprobs", "logit_bias", "allowed_token_ids",
    ],
    "vllm:EngineArgs": [
        "seed", "quantization", "kv_cache_dtype", "speculative_config", "pipeline_parallel_size", "data_parallel_size", "max_logprobs",
        "disable_sliding_window", "trust_remote_code", "logits_processors",
    ],
}  # fmt: skip
"""Arguments that the source leaves out, and whose defaults it relies on."""


class Wheel:
    """The source of one version."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = frozenset(self._zip.namelist())
        metadata = next(name for name in self._names if name.endswith(".dist-info/METADATA"))
        lines = self._zip.read(metadata).decode().splitlines()
        self.version = next(line for line in lines if line.startswith("Version: "))[9:]
        torch = next(line for line in lines if re.match(r"Requires-Dist: torch\b", line))
        self.torch = torch.partition("torch")[2].strip()
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in self._names:
                return ast.parse(self._zip.read(name))
        return None

    def _is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self._names

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name, and the definition; None if it is not there."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                origin = self._absolute(module, node)
                for alias in node.names:
                    if alias.name == "*" and (inside := self.find(origin, name)):
                        return inside
                    if (alias.asname or alias.name) == name:
                        return self.find(origin, alias.name) or self.find(f"{origin}.{name}", name)
            if (place := _lazy_place(node, name)) is not None:
                origin, _, inner = place.partition(":")
                return self.find(f"{module}{origin}", inner)
            is_lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            if is_lazy and any(getattr(each, "value", None) == name for each in ast.walk(node)):
                return module, node
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        kept = len(parts) - node.level + self._is_package(module)
        return ".".join([*parts[:kept], *filter(None, [node.module])])

    def member(self, module: str, owner: str, name: str) -> ast.AST | None:
        """Return a class's method, field or attribute, its bases' included."""
        home, node = self.find(module, owner) or (module, None)
        if not isinstance(node, ast.ClassDef):
            return None
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == name:
                return each
            if name in _targets(each):
                return each
        for inner in ast.walk(node):
            if f"self.{name}" in _targets(inner):
                return inner
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != owner:
                inherited = self.member(home, base.id, name)
                if inherited is not None:
                    return inherited
        return None

    def parameters(self, module: str, name: str, owner: str | None = None) -> dict[str, str] | None:
        """Return parameters and their defaults' source: of a function, a method or a class; "" for none."""
        if owner is not None:
            node: Any = self.member(module, owner, name)
        else:
            found = self.find(module, name)
            node = found and found[1]
        if isinstance(node, ast.ClassDef):
            made = self.member(module, name, "__init__")
            if not isinstance(made, ast.FunctionDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                return {ast.unparse(f.target): self._default(f.value) for f in fields}
            node = made
        if not isinstance(node, ast.FunctionDef):
            return None
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args]
        given: list[ast.expr | None] = [None] * (len(every) - len(arguments.defaults))
        pairs = [*zip(every, [*given, *arguments.defaults], strict=True)]
        pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        return {each.arg: self._default(value) for each, value in pairs}

    def _default(self, value: ast.expr | None) -> str:
        text = "" if value is None else ast.unparse(value)
        match = re.fullmatch(r"(\w+Config)\.(\w+)", text)
        field = match and self.member("vllm.config", match[1], match[2])
        if isinstance(field, ast.AnnAssign) and field.value is not None:
            text = ast.unparse(field.value)
            inside = re.match(r"Field\((?:default=)?([^,)]+)", text)
            return inside[1] if inside else text
        return text

    def budgets(self) -> list[str]:
        """Return the tokens in a step of `LLM`: on three sizes of GPUs, then on other devices."""
        found = self.member("vllm", "EngineArgs", "get_batch_defaults")
        made = [each for each in ast.walk(found) if isinstance(each, ast.Assign)] if found else []
        return [
            ast.unparse(value)
            for node in sorted(made, key=lambda each: each.lineno)
            if _targets(node) == ["default_max_num_batched_tokens"]
            and isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True)
            if key is not None and ast.unparse(key) == "UsageContext.LLM_CLASS"
        ]

    def v2_takes_processors(self) -> bool:
        """Return whether model runner V2 accepts a logits processor of others."""
        found = self.member(
            "vllm.config", "VllmConfig", "_get_v2_model_runner_unsupported_features"
        )
        return found is not None and "logits_processors" not in ast.unparse(found)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those inside `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _lazy_place(node: ast.stmt, name: str) -> str | None:
    """Return the value of a name in a table such as that of vllm/__init__.py: `.module:name`."""
    table = getattr(node, "value", None)
    if not isinstance(table, ast.Dict):
        return None
    for key, value in zip(table.keys, table.values, strict=True):
        is_it = isinstance(key, ast.Constant) and key.value == name
        if is_it and isinstance(value, ast.Constant) and ":" in str(value.value):
            return str(value.value)
    return None


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [ast.unparse(each) for each in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def imported() -> dict[str, list[str]]:
    """Return `module:name` of every import of vLLM in the source, each with the files that need it."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    found.setdefault(f"{node.module}:{alias.name}", []).append(path.stem)
    return found


def engine_options() -> list[str]:
    """Return the arguments that the source gives to vLLM's engine."""
    tree = ast.parse((SOURCE / "vllm_generator.py").read_text())
    found: list[str] = []
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        names = {ast.unparse(each) for each in targets if each is not None}
        value = getattr(node, "value", None)
        if "options" in names and isinstance(value, ast.Dict):
            found += [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
        found += [m[1] for name in names if (m := re.fullmatch(r"options\['(\w+)'\]", name))]
    return sorted(set(found))


def facts_of(wheel: Wheel) -> dict[str, Any]:
    """Return what a version has of the names, parameters and defaults that the source needs."""
    names = {each: wheel.find(*each.split(":")) is not None for each in sorted(imported())}
    parameters: dict[str, dict[str, str] | None] = {}
    for place, members in MEMBERS.items():
        module, owner = place.split(":")
        names[place] = wheel.find(module, owner) is not None
        for member in members:
            names[f"{place}.{member}"] = wheel.member(module, owner, member) is not None
            signature = wheel.parameters(module, member, owner)
            if signature is not None:
                parameters[f"{place}.{member}"] = signature
    for place in imported():
        module, name = place.split(":")
        if place not in DEFAULTS and name[0].islower():
            parameters[place] = wheel.parameters(module, name)
    parameters = {place: each for place, each in parameters.items() if each is not None}
    for place, relied in DEFAULTS.items():
        every = wheel.parameters(*place.split(":")) or {}
        given = engine_options() if place.endswith("EngineArgs") else _sampling_arguments()
        parameters[place] = {name: every[name] for name in sorted({*relied, *given} & every.keys())}
    return {
        "torch": wheel.torch,
        "v2_takes_processors": wheel.v2_takes_processors(),
        "budgets": wheel.budgets(),
        "names": dict(sorted(names.items())),
        "parameters": dict(sorted(parameters.items())),
    }


def _sampling_arguments() -> list[str]:
    tree = ast.parse((SOURCE / "logits_processor_v1.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    made = next(each for each in calls if ast.unparse(each.func) == "SamplingParams")
    return [str(each.arg) for each in made.keywords]


def main(directory: str) -> None:
    """Read all wheels of a directory, and write the facts."""
    wheels = [Wheel(path) for path in Path(directory).rglob("vllm-*.whl")]
    facts = {wheel.version: facts_of(wheel) for wheel in wheels}
    ordered = dict(sorted(facts.items(), key=lambda item: [*map(int, item[0].split("."))]))
    FACTS.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
