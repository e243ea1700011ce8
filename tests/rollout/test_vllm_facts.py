"""What Burnish relies on in vLLM, held against the files of each allowed version (see scripts/vllm_facts.py). Needs no vLLM."""

from __future__ import annotations

import ast
import json
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from burnish.rollout.inference_engine import import_engine
from burnish.rollout.vllm.vllm_generator import PROCESSORS, set_processor

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "burnish" / "rollout" / "vllm"
FACTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("vllm_facts.json").read_text()
)
# What only newer versions have, or only older ones, and where the source does without it.
SINCE = {"vllm.v1.worker.gpu.sample.logits_processor:": "0.31"}
EITHER = {
    "vllm.model_executor.models.utils:WeightsMapper.get_rename_mapper",
    "vllm.model_executor.models.utils:WeightsMapper.get_unstacked_mapper",
}
RELIED = {
    "vllm:SamplingParams": {
        "n": "1", "top_p": "1.0", "top_k": "0", "min_p": "0.0", "min_tokens": "0", "presence_penalty": "0.0",
        "frequency_penalty": "0.0", "repetition_penalty": "1.0", "prompt_logprobs": "None", "logit_bias": "None",
        "allowed_token_ids": "None", "output_kind": "RequestOutputKind.CUMULATIVE",
    },
    "vllm:EngineArgs": {
        "quantization": "None", "kv_cache_dtype": "'auto'", "speculative_config": "None", "pipeline_parallel_size": "1",
        "data_parallel_size": "1", "disable_sliding_window": "False", "trust_remote_code": "False", "max_logprobs": "20",
    },
    "vllm.v1.engine.llm_engine:LLMEngine.sleep": {"mode": "'abort'"},
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": {"reset_connector": "False"},
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": {"internal": "False"},
}  # fmt: skip
"""Defaults without which a draw, or the weights that draw it, would be others."""


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(SOURCE.glob("*.py")):
        yield path.stem, ast.parse(path.read_text())


def requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [text] = project["optional-dependencies"]["vllm"]
    return Requirement(text)


def test_the_versions_are_those_that_the_extra_allows() -> None:
    allowed, versions = requirement().specifier, [*map(Version, FACTS)]
    assert all(each in allowed for each in versions)
    before, after = versions[0], versions[-1]
    assert Version(f"{before.major}.{before.minor - 1}") not in allowed
    assert Version(f"{after.major}.{after.minor + 1}") not in allowed
    assert [each.minor for each in versions] == [*range(before.minor, after.minor + 1)]


@pytest.mark.parametrize("version", FACTS)
def test_every_name_is_there(version: str) -> None:
    names = FACTS[version]["names"]
    for name, is_there in names.items():
        since = next((value for start, value in SINCE.items() if name.startswith(start)), version)
        if name not in EITHER:
            assert is_there == (Version(version) >= Version(since)), name
    assert any(names[each] for each in EITHER)


def test_the_facts_are_about_every_import_and_method_of_the_source() -> None:
    needed, methods = set[str](), set[str]()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                needed |= {f"{node.module}:{each.name}" for each in node.names}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._engine":
                methods.add(f"vllm.v1.engine.llm_engine:LLMEngine.{node.attr}")
    assert len(needed) > 10
    assert len(methods) > 5
    for version, facts in FACTS.items():
        assert needed | methods <= facts["names"].keys(), version


def keywords(tree: ast.AST, function: str) -> set[str]:
    """The keywords of all calls of a function."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    made = [each for each in calls if ast.unparse(each.func) == function]
    assert made, function
    return {str(keyword.arg) for each in made for keyword in each.keywords}


@pytest.mark.parametrize("version", FACTS)
def test_every_argument_is_taken(version: str) -> None:
    sources, parameters = dict(trees()), FACTS[version]["parameters"]
    engine = "vllm.v1.engine.llm_engine:LLMEngine"
    for source, function, place in (
        ("logits_processor_v1", "SamplingParams", "vllm:SamplingParams"),
        ("vllm_worker", "LoRAModel.from_lora_tensors", "vllm.lora.lora_model:LoRAModel.from_lora_tensors"),
        ("vllm_generator", "vllm.EngineArgs(**options).create_engine_config", "vllm:EngineArgs.create_engine_config"),
        ("vllm_generator", "vllm.LLMEngine.from_vllm_config", f"{engine}.from_vllm_config"),
        *(
            ("vllm_generator", f"self._engine.{name}", f"{engine}.{name}")
            for name in ("add_request", "abort_request", "wake_up", "sleep", "reset_prefix_cache", "collective_rpc")
        ),
    ):  # fmt: skip
        assert keywords(sources[source], function) <= parameters[place].keys(), function
    options = {
        node.value
        for node in ast.walk(sources["vllm_generator"])
        if isinstance(node, ast.Constant) and node.value in parameters["vllm:EngineArgs"]
    }
    assert {"logits_processors", "logprobs_mode", "load_format", "max_lora_rank"} <= options
    for name in engine_options(sources["vllm_generator"]):
        assert name in parameters["vllm:EngineArgs"], name


def engine_options(tree: ast.AST) -> set[str]:
    """The keys of every mapping that is bound to `options`, or added to it, or set in it."""
    found = set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            text = "" if target is None else ast.unparse(target)
            if text == "options" and isinstance(node.value, ast.Dict):
                found |= {str(ast.literal_eval(key)) for key in node.value.keys if key}
            if text.startswith("options["):
                found.add(text[len("options['") : -len("']")])
    assert len(found) > 15
    return found


@pytest.mark.parametrize("version", FACTS)
@pytest.mark.parametrize("place", RELIED)
def test_defaults_are_those_that_we_rely_on(version: str, place: str) -> None:
    found = FACTS[version]["parameters"][place]
    assert {name: found[name] for name in RELIED[place]} == RELIED[place]


@pytest.mark.parametrize("version", FACTS)
def test_steps_on_gpus_have_thousands_of_tokens(version: str) -> None:
    """By `UsageContext.LLM_CLASS`, as the source asks for; else a step has 2,048 tokens."""
    *_, call = [
        each
        for each in ast.walk(dict(trees())["vllm_generator"])
        if isinstance(each, ast.Call) and ast.unparse(each.func).endswith(".create_engine_config")
    ]
    assert [ast.unparse(each.value) for each in call.keywords] == ["UsageContext.LLM_CLASS"]
    assert all(int(tokens) >= 8192 for tokens in FACTS[version]["budgets"][:3])


@pytest.mark.parametrize("version", FACTS)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_processor_is_one_that_the_version_can_load(version: str, on_gpu: bool) -> None:
    """vLLM answers as its files say: before 0.31, runner V2 is not for those who bring a processor."""
    facts, given = FACTS[version], SimpleNamespace(logits_processors=None)

    class Engine:
        model_config = given

        @property
        def use_v2_model_runner(self) -> bool:
            return on_gpu and (facts["v2_takes_processors"] or not given.logits_processors)

    engine = Engine()
    set_processor(engine)
    [chosen] = given.logits_processors
    assert chosen == PROCESSORS[engine.use_v2_model_runner]
    assert chosen == PROCESSORS[on_gpu and Version(version) >= Version("0.31")]
    module = chosen.partition(":")[0].rpartition(".")[2]
    for node in ast.walk(dict(trees())[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            assert all(facts["names"][f"{node.module}:{each.name}"] for each in node.names)
    assert (SOURCE / f"{module}.py").is_file()


@pytest.mark.parametrize(("version", "warns"), [("0.33.1", False), ("0.34.0", True), ("1.0", True)])
def test_a_newer_version_is_used_with_a_warning(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with caplog.at_level(logging.WARNING, "burnish"):
        assert import_engine("vLLM", (0, 28), (0, 34)).__version__ == version
    assert (version in caplog.text) == warns
