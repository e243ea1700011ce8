"""A model that also reads images and is trained on text stays that model. The oracle is transformers."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.checkpoints.states import committed
from support.models.composites import KINDS, answers, image_inputs, save_composite
from support.nightly import by_day
from support.runs.training_files import RL, SFT, Command, burnish, done, make_files
from transformers import AutoModelForImageTextToText

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
        [("gemma4", "rl")],
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
    for one, other in ((run, step), (step / "model", whole)):
        assert burnish(tmp_path, "ckpt", "diff", str(one), str(other))[0] == 0
    for before, after in zip(answers(whole, kind), answers(step / "model", kind), strict=True):
        assert torch.equal(before, after)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (step / "model" / name).read_bytes() == (whole / name).read_bytes()
    old, new = (json.loads((at / "config.json").read_text()) for at in (whole, step / "model"))
    assert old["architectures"] == new["architectures"]
    assert old["vision_config"] == new["vision_config"]


@pytest.mark.nightly
def test_a_trained_model_keeps_its_other_tensors_and_resumes_with_those_of_the_step(tmp_path):
    """The language model changes, in bf16; the directory that training began from is damaged in between."""
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, "mistral3", shard="20KB")
    before = raw(whole)
    assert len(list(whole.glob("*.safetensors"))) > 2
    given = {"optim": {"lr": 0.01}, "checkpoint": {"model_dtype": "bf16"}}
    run = done(tmp_path, "sft", settings(tmp_path, SFT, **given))
    first = raw(newest(run) / "model")
    assert first.keys() == before.keys()
    assert rest(newest(run) / "model") == rest(whole)
    assert {dtype for name, (dtype, _) in first.items() if is_language(name)} == {"torch.bfloat16"}
    kept = next(path for path in whole.glob("*.safetensors") if set(rest_of(path)))
    with kept.open(
        "r+b"
    ) as file:  # the source's own last bytes are no longer what training began with
        file.seek(-4, 2)
        file.write(b"\x01\x02\x03\x04")
    assert rest(whole) != rest(newest(run) / "model")
    done(tmp_path, "sft", settings(tmp_path, SFT, **given), "steps=4", world=2)
    again = newest(run)
    assert again.name == "step-00000004"
    assert list(verify(again)) == []
    changed = {name for name, each in raw(again / "model").items() if each != first[name]}
    assert changed
    assert all(map(is_language, changed))


def rest_of(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return [name for name in file.keys() if not is_language(name)]  # noqa: SIM118


@pytest.mark.nightly
def test_a_run_from_a_step_goes_on_without_the_first_directory(tmp_path):
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, "gemma4")
    before, seen = raw(whole), answers(whole, "gemma4")
    run = done(tmp_path, "sft", settings(tmp_path, SFT))
    shutil.rmtree(whole)
    again = done(
        tmp_path,
        "rl",
        settings(tmp_path, RL, model={"path": str(newest(run) / "model")}),
        "name=next",
    )
    assert raw(newest(again) / "model") == before
    for one, other in zip(seen, answers(newest(again) / "model", "gemma4"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.nightly
def test_a_directory_that_vanishes_during_a_run_takes_nothing_from_later_steps(tmp_path):
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, "qwen3_5")
    before = raw(whole)
    base = settings(tmp_path, SFT, checkpoint={"keep_last": 1, "background": True})
    command = Command(tmp_path, ["sft", base, "steps=6"])
    assert command.reached(1)
    shutil.rmtree(whole)
    assert command.wait() == 0, command.output
    assert raw(newest(tmp_path / "runs" / "run") / "model") == before


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4", "mistral3", "llava"])
def test_an_adapter_belongs_to_the_composite(tmp_path, kind):
    """PEFT reads it on the composite's own class, and its merged export is the composite again."""
    peft = pytest.importorskip("peft")
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, kind)
    model = {"path": "whole", "lora": {"rank": 4}}
    run = done(tmp_path, "sft", settings(tmp_path, SFT, model=model, optim={"lr": 0.05}))
    step = newest(run)
    plain = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = peft.PeftModel.from_pretrained(plain, step / "model").eval()
    factors = raw(step / "model")
    of_model = [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    assert {name.replace(".default.", ".") for name in of_model} == factors.keys()
    with torch.no_grad():
        wanted = adapted(**image_inputs(kind)).logits
    assert not torch.equal(wanted, answers(whole, kind)[0])
    merged = tmp_path / "merged"
    command = ["ckpt", "export", str(step), str(merged), "--merged", "--dtype", "fp32"]
    assert burnish(tmp_path, *command)[0] == 0
    assert raw(merged).keys() == raw(whole).keys()
    assert rest(merged) == rest(whole)
    assert torch.allclose(answers(merged, kind)[0], wanted, atol=1e-5)
    again = {"path": "whole", "lora": {"path": str(step / "model")}}
    given = settings(tmp_path, SFT, model=again)
    assert raw(newest(done(tmp_path, "sft", given, "name=next")) / "model") == factors


@pytest.mark.parametrize("dtype", by_day(["bf16", "fp16", "fp32"], ["fp16"]))
def test_an_export_changes_the_dtype_of_the_language_model_alone(tmp_path, dtype):
    make_files(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "out"
    save_composite(whole, "gemma3")
    assert burnish(tmp_path, "ckpt", "import", "whole", "imported")[0] == 0
    step = committed(tmp_path / "imported" / "checkpoints")[-1].path
    assert rest(step / "model") == rest(whole)
    assert burnish(tmp_path, "ckpt", "export", str(step), str(out), "--dtype", dtype)[0] == 0
    assert rest(out) == rest(whole)
    found = {kind for name, (kind, _) in raw(out).items() if is_language(name)}
    assert found == {
        {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[dtype]
    }
    AutoModelForImageTextToText.from_pretrained(out)


@pytest.mark.nightly
def test_a_mirror_holds_the_whole_model_and_a_run_comes_back_from_it(tmp_path):
    make_files(tmp_path)
    whole, far = tmp_path / "whole", f"checkpoint.mirror=file://{tmp_path}/far"
    save_composite(whole, "gemma4")
    given = settings(tmp_path, SFT, optim={"lr": 0.01}, checkpoint={"model_dtype": "bf16"})
    run = done(tmp_path, "sft", given, far)
    before = raw(newest(run) / "model")
    assert raw(tmp_path / "far" / "run" / "checkpoints" / "step-00000002" / "model") == before
    shutil.rmtree(run)
    again = newest(done(tmp_path, "sft", given, far, "steps=3", world=2))
    assert again.name == "step-00000003"
    assert rest(again / "model") == rest(whole)
    assert raw(again / "model") != before
    assert list(verify(tmp_path / "far" / "run" / "checkpoints" / again.name)) == []


@pytest.mark.nightly
def test_a_critic_is_the_language_model_alone_and_another_process_generates(tmp_path):
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, "mistral3")
    given = settings(
        tmp_path,
        RL,
        optim={"lr": 0.01},
        critic={"lr": 0.01},
        algorithm={"advantage": "gae"},
        rollout={**RL["rollout"], "place": "child"},
    )
    run = done(tmp_path, "rl", given)
    assert rest(newest(run) / "model") == rest(whole)
    critic = raw(newest(run) / "critic" / "model")
    assert all(
        name.startswith(("model.layers.", "model.embed", "model.norm", "score.")) for name in critic
    )
    again = newest(done(tmp_path, "rl", given, "steps=3"))
    assert again.name == "step-00000003"
    assert list(verify(again)) == []
    code, _ = burnish(tmp_path, "ckpt", "diff", str(again), str(again))
    assert code == 0


@pytest.mark.nightly
def test_a_changed_copy_of_the_kept_tensors_is_saved_by_no_step(tmp_path):
    make_files(tmp_path)
    whole = tmp_path / "whole"
    save_composite(whole, "llava")
    command = Command(tmp_path, ["sft", settings(tmp_path, SFT), "steps=40"])
    assert command.reached(2)
    kept = tmp_path / "runs" / "run" / "kept" / "tensors.safetensors"
    with kept.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert command.wait() != 0
    for step in committed(tmp_path / "runs" / "run" / "checkpoints"):
        assert rest(step.path / "model") == rest(whole)
    assert done(tmp_path, "sft", settings(tmp_path, SFT), "steps=40")
    assert raw(newest(tmp_path / "runs" / "run") / "model") == raw(whole)
