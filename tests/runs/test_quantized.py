"""Quantized models are named by config.json and headers, before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny import save_base
from support.runs.training_files import burnish, done

from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError
from burnish.files.quantized import gguf_problem, require_plain_weights
from burnish.models.loading import read_model_config
from burnish.runs.preflight import require_model, require_unquantized

BYTES = torch.zeros(4, 8, dtype=torch.uint8)
NUMBERS = torch.zeros(4, 8, dtype=torch.int32)
METHODS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "awq": ({"bits": 4}, {"q_proj.qweight": NUMBERS, "q_proj.scales": torch.zeros(4)}),
    "gptq": ({"bits": 8}, {"q_proj.qweight": NUMBERS, "q_proj.g_idx": torch.zeros(4).int()}),
    "bitsandbytes": ({"load_in_4bit": True}, {"q_proj.weight": BYTES}),
    "fp8": ({}, {"q_proj.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}),
    "compressed-tensors": ({}, {"q_proj.weight_packed": NUMBERS}),
    "mxfp4": ({}, {"q_proj.qweight": BYTES}),
}


def save_quantized(
    path: Path, method: str, tensors: Mapping[str, torch.Tensor] | None, **fields: Any
) -> Path:
    """A model whose config.json names a method; None: without weights."""
    save_base(path, seed=0, dtype="bfloat16")
    described = json.loads((path / "config.json").read_text()) | fields
    described["quantization_config"] = {"quant_method": method, **METHODS[method][0]}
    (path / "config.json").write_text(json.dumps(described))
    if tensors is None:
        (path / "model.safetensors").unlink()
    elif tensors:
        save_file(dict(tensors), path / "model.safetensors")
    return path


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_named(tmp_path: Path, method: str) -> None:
    path = save_quantized(tmp_path / "m", method, METHODS[method][1])
    with pytest.raises(IncompatibleError) as caught:
        require_model(str(path), "model.path")
    assert method in caught.value.problem
    assert "model.path" in str(caught.value.do)
    with pytest.raises(IncompatibleError):
        read_model_config(ModelConfig(path=str(path)))
    assert ("dequantize" in str(caught.value.do)) == (method not in ("awq", "gptq"))


@pytest.mark.parametrize("method", METHODS)
def test_the_key_alone_is_left_out_with_a_remark(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_quantized(tmp_path / "m", method, {})
    require_model(str(path), "model.path")
    remark = require_unquantized(str(path), "model.path")
    assert (method in remark) == (method != "mxfp4")
    read_model_config(ModelConfig(path=str(path)))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (method != "mxfp4")


def test_without_weights_the_key_decides(tmp_path: Path) -> None:
    path = save_quantized(tmp_path / "m", "awq", None)
    with pytest.raises(IncompatibleError):
        require_unquantized(str(path), "critic.path")


def test_the_model_that_it_was_made_from_is_named_if_its_files_say_it(tmp_path: Path) -> None:
    def advice(path: Path) -> str:
        with pytest.raises(IncompatibleError) as caught:
            require_unquantized(str(path), "model.path")
        return str(caught.value.do)

    stated = save_quantized(tmp_path / "a", "awq", None, _name_or_path="me/whole")
    assert "me/whole" in advice(stated)
    local = save_quantized(tmp_path / "b", "awq", None, _name_or_path="/home/somebody/whole")
    assert "somebody" not in advice(local)
    for number, line in enumerate(("base_model: me/card", "base_model:\n- me/card")):
        carded = save_quantized(tmp_path / f"c{number}", "gptq", None)
        (carded / "README.md").write_text(f"---\nlicense: mit\n{line}\n---\n")
        assert "me/card" in advice(carded)


def test_what_has_no_such_key_is_not_looked_at(tmp_path: Path) -> None:
    def small_file(place: str, name: str) -> bytes:
        raise AssertionError(place, name)

    for fields in ({}, {"quantization_config": None}):
        assert require_plain_weights(str(tmp_path), "model.path", fields, small_file) == ""


@pytest.mark.parametrize(
    ("place", "names", "is_refused"),
    [
        ("m.gguf", (), True),
        ("folder", ("m.gguf", "README.md"), True),
        ("folder", ("m.gguf", "model.safetensors"), False),
        ("folder", ("config.json",), False),
        ("me/m-GGUF", ("m-q4.gguf", "m-q8.gguf"), True),
    ],
)
def test_weights_for_llama_cpp(place: str, names: tuple[str, ...], is_refused: bool) -> None:
    problem = gguf_problem(place, "model.path", names)
    assert (problem is not None) == is_refused
    assert problem is None or "burnish ckpt import" in str(problem.do)


COMMANDS = {
    "run": ["sft", "sft.yaml", "name=q", "model.fresh=null", "model.path=PLACE"],
    "dry run": ["sft", "sft.yaml", "model.fresh=null", "model.path=PLACE", "--dry-run"],
    "eval": ["eval", "PLACE", "data.validation=validation.jsonl"],
    "chat": ["chat", "PLACE"],
    "init": ["init", "sft", "PLACE"],
}


@pytest.mark.parametrize(
    "name", [n if n == "dry run" else pytest.param(n, marks=pytest.mark.nightly) for n in COMMANDS]
)
def test_commands_say_it_before_torch_is_loaded(work: Path, name: str) -> None:
    place = save_quantized(work / f"q-{name}".replace(" ", ""), "awq", METHODS["awq"][1])
    file = work / "m.gguf"
    file.write_bytes(b"GGUF")
    for given, said in ((str(place), "awq"), (str(file), f"ckpt import {file} ")):
        argv = [word.replace("PLACE", given) for word in COMMANDS[name]]
        code, output = burnish(work, *argv)
        assert (code, said in output, "Traceback" in output) == (4, True, False), output
        assert "loading torch" not in output
    assert not (work / "runs/q").exists()


@pytest.mark.nightly
def test_a_left_over_key_is_said_once_and_not_written(work: Path) -> None:
    save_quantized(work / "left", "gptq", {})
    argv = ["sft", "sft.yaml", "name=left", "steps=1", "model.fresh=null", "model.path=left"]
    code, output = burnish(work, *argv)
    assert code == 0, output
    assert output.count("quantization_config") == 1
    written = json.loads(
        (work / "runs/left/checkpoints/step-00000001/model/config.json").read_text()
    )
    assert "quantization_config" not in written
    done(work, *argv[:2], "name=again", "steps=1", "model.fresh=null", "model.path=runs/left")


@pytest.mark.nightly
def test_the_plan_notes_it(work: Path) -> None:
    place = save_quantized(work / "planned", "awq", None)
    argv = [f"model.path={place}", "data.train=[train.jsonl]", "--devices", "8xH100"]
    code, output = burnish(work, "plan", *argv)
    assert (code, "awq" in output) == (0, True), output
