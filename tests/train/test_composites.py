"""A model that also reads images and is trained on text stays that model. The oracle is transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints_for_tests import committed
from composites_for_tests import KINDS, answers, save_composite
from nights import by_day
from safetensors import safe_open
from training_files import RL, SFT, done, make_files

from burnish.checkpoint.steps import verify


def raw(directory: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor's dtype and bytes, by name."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                assert name not in found
                found[name] = (str(tensor.dtype), data)
    return found


def is_language(name: str) -> bool:
    return "language_model." in name or name == "lm_head.weight"


def rest(directory: Path) -> dict[str, tuple[str, bytes]]:
    return {name: each for name, each in raw(directory).items() if not is_language(name)}


def settings(root: Path, base: dict[str, Any], **changes: Any) -> str:
    given = {
        **base,
        "steps": 2,
        "model": {"path": "whole"},
        "optim": {"lr": 0.0},
        "checkpoint": {"model_dtype": "fp32", "save_every": 1, **changes.pop("checkpoint", {})},
        "evaluation": {"every": 0},
        **changes,
    }
    (root / "settings.yaml").write_text(json.dumps(given))
    return "settings.yaml"


def newest(run: Path) -> Path:
    return committed(run / "checkpoints")[-1].path


@pytest.mark.parametrize(
    ("kind", "trainer"),
    by_day(
        [(kind, trainer) for kind in KINDS for trainer in ("sft", "rl")],
        [("qwen3_5", "sft"), ("gemma4", "rl"), ("mistral3", "sft")],
    ),
)
def test_images_have_the_same_answer_before_and_after(tmp_path, kind, trainer):
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, kind)
    run = done(tmp_path, trainer, settings(tmp_path, RL if trainer == "rl" else SFT))
    step = newest(run)
    assert list(verify(step)) == []
    assert raw(step / "model") == raw(whole)
    for before, after in zip(answers(whole, kind), answers(step / "model", kind), strict=True):
        assert torch.equal(before, after)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (step / "model" / name).read_bytes() == (whole / name).read_bytes()
    old, new = (json.loads((at / "config.json").read_text()) for at in (whole, step / "model"))
    assert old["architectures"] == new["architectures"]
    assert old["vision_config"] == new["vision_config"]
