"""Asking a model, compared with plain transformers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from support.runs.training_files import done, make_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.cli.main import main


def answers(model: Path, *conversations: list[str]) -> str:
    """What transformers answers greedily, a line for each question."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)  # fmt: skip
    said = ""
    for questions in conversations:
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)  # fmt: skip
            made = network.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
            text = tokenizer.decode(made, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            said += f"{text}\n"
    return said


def test_a_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_files(tmp_path)
    run = done(work, "sft", "sft.yaml", "steps=2", "evaluation.every=0")
    model = run / "checkpoints/step-00000002/model"
    wanted = answers(model, ["1+1=", "and 2?"], ["3+3="])
    monkeypatch.chdir(work)
    for place in (run, model, model.parent, run / "checkpoints" / "latest"):
        monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\nand 2?\n/reset\n3+3=\n"))
        greedy = ["rollout.temperature=0", "rollout.max_response_length=3", "engine.precision=fp32"]
        assert main(["chat", str(place.relative_to(work)), *greedy]) == 0
        assert capsys.readouterr().out == wanted


def test_no_model(tmp_path: Path) -> None:
    assert main(["chat", "nowhere"]) == 5
    assert main(["chat", str(tmp_path)]) == 5
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 2
    assert main(["chat"]) == 2
