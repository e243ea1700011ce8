"""Steps that hold an adapter: what they are on disk, and exported, alone and merged into its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.checkpoints.states import bits, contents_of, shards_of, written_by
from support.models.adapters import EXPERTS, LORA, adapter_tensor, plain_adapted
from support.models.tiny import save_tiny, tiny_config, tiny_model
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import CommittedStep, newest, open_step, verify
from burnish.checkpoint.tools.export import MergedModel, StepModel, adapter_of, export
from burnish.cli.main import main
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError
from burnish.files.storage import LocalStorage
from burnish.models.loading import aligned_generation_config
from burnish.models.lora.adapter import Adapter, adapter_record
from burnish.models.lora.adapter_config import save_adapter_config
from burnish.models.meta_init import build_on_meta

BIG = 1 << 40


def adapter_tensors(family: str, lora: LoraConfig) -> dict[str, Tensor]:
    adapter = Adapter(build_on_meta(tiny_config(family)), lora)
    return {r.name: adapter_tensor(r.name, r.shape) for r in adapter.weights}


def save_adapter(
    root: Path, base: Path, family: str = "qwen2", lora: LoraConfig = LORA
) -> CommittedStep:
    weights = adapter_tensors(family, lora)
    slots = {f"exp_avg/{name}": tensor * 2 for name, tensor in weights.items()}
    model = ModelConfig(path=str(base), lora=lora)
    record = adapter_record(model, AutoConfig.from_pretrained(base))

    def write_assets(directory: Path) -> None:
        save_adapter_config(record, directory)
        char_tokenizer().save_pretrained(directory)
        config = AutoConfig.from_pretrained(base)
        aligned = aligned_generation_config(config, char_tokenizer())
        aligned.to_json_file(directory / "generation_config.json")

    contents = contents_of(
        weights,
        slots,
        state={"step": 1, "adapter": record},
        assets=written_by(write_assets),
    )
    with Checkpoints(root, Layout()) as checkpoints:
        checkpoints.save(1, contents)
    step = newest(root)
    assert step is not None
    return step


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 25)[None]).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("base") / "m", "qwen2", torch.float32)
    save_char_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory, base: Path) -> CommittedStep:
    return save_adapter(tmp_path_factory.mktemp("run"), base)


def test_the_model_directory_is_an_adapter_of_pefts(step: CommittedStep, base: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, step.path / "model").eval()
    assert torch.allclose(logits(loaded), logits(plain_adapted(base)), rtol=0, atol=0.05)  # bf16
    assert AutoTokenizer.from_pretrained(step.path / "model").get_vocab()
    assert {path.name for path in (step.path / "model").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    assert list(verify(step.path)) == []


def test_it_comes_back_bit_for_bit(step: CommittedStep) -> None:
    weights = adapter_tensors("qwen2", LORA)
    empty = {name: torch.full_like(tensor, 7.0) for name, tensor in weights.items()}
    for prefix, factor in (("", 1), ("exp_avg/", 2)):
        wanted = {f"{prefix}{name}": tensor for name, tensor in empty.items()}
        CheckpointSource(step, Layout()).fill(shards_of(wanted, Layout()))
        for name, tensor in weights.items():
            assert torch.equal(bits(empty[name]), bits(tensor * factor)), name


@pytest.mark.parametrize("rslora", [False, True])
def test_exported_alone_it_is_exact_in_fp32(tmp_path: Path, base: Path, rslora: bool) -> None:
    lora = LORA.model_copy(update={"rslora": rslora})
    step = save_adapter(tmp_path / "run", base, lora=lora)
    with StepModel(step) as model:
        done = export(model, tmp_path / "out", torch.float32, 1000)
    assert "adapter_model.safetensors" in done  # whatever the size of files: PEFT reads one
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(plain_adapted(base, lora)))


def test_merged_it_keeps_a_head_of_its_own_and_ends_as_the_adapter_does(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "m", "qwen2", torch.float32)
    save_char_tokenizer(base)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    step = save_adapter(tmp_path / "run", base)
    with MergedModel(step, base) as model:
        export(model, tmp_path / "out", torch.float32, BIG)
    with pytest.warns(UserWarning, match="tie_word_embeddings=False"):
        wanted = plain_adapted(base, LORA).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.allclose(logits(found), logits(wanted), atol=1e-5)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == char_tokenizer().eos_token_id
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"][0] == char_tokenizer().eos_token_id


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_merged_it_is_what_peft_merges(tmp_path: Path, family: str) -> None:
    base = save_tiny(tmp_path / "m", family, torch.float32)
    save_char_tokenizer(base)
    targets = ["q_proj", "o_proj", *EXPERTS] if family == "qwen3_moe" else []
    lora = LORA.model_copy(update={"targets": targets})
    step = save_adapter(tmp_path / "run", base, family, lora)
    with MergedModel(step, Path(adapter_of(step)["base"])) as model:
        export(model, tmp_path / "out", torch.float32, 20_000)
    wanted = plain_adapted(base, lora).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-6, atol=1e-7), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "out/adapter_config.json").exists()
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == char_tokenizer().get_vocab()
    )


def test_merged_it_is_rounded_once(tmp_path: Path, step: CommittedStep, base: Path) -> None:
    with MergedModel(step, Path(adapter_of(step)["base"])) as model:
        export(model, tmp_path / "exact", torch.float32, BIG)
        export(model, tmp_path / "rounded", torch.bfloat16, BIG)
    exact = load_file(tmp_path / "exact/model.safetensors")
    for name, tensor in load_file(tmp_path / "rounded/model.safetensors").items():
        assert torch.equal(tensor, exact[name].bfloat16()), name
    untouched = load_file(base / "model.safetensors")["model.norm.weight"]
    assert torch.equal(exact["model.norm.weight"], untouched)


def test_pieces_that_begin_and_end_in_rows(step: CommittedStep) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with MergedModel(step, Path(adapter_of(step)["base"])) as model:
        size = model.weights[name].elements
        whole = model.read(name, 0, size, torch.float32)
        for start, stop in ((0, 1), (5, 50), (47, 49), (48, 96), (size - 1, size)):
            piece = model.read(name, start, stop, torch.float32)
            # A product of fewer rows may add in another order: the matrix library decides.
            torch.testing.assert_close(piece, whole[start:stop], rtol=1e-6, atol=1e-7)


def test_a_model_that_has_moved(tmp_path: Path, base: Path) -> None:
    here = tmp_path / "here"
    save_tiny(here, "qwen2", torch.float32)
    step = save_adapter(tmp_path / "run", here)
    here.rename(tmp_path / "there")
    with pytest.raises(MissingError) as missing:
        MergedModel(step, Path(adapter_of(step)["base"]))
    assert "--base" in str(missing.value)
    with MergedModel(step, tmp_path / "there") as model:
        assert model.weights
    other = tiny_model("qwen2", seed=5)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(IncompatibleError):
        MergedModel(step, tmp_path / "other")


def test_a_step_without_an_adapter(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, Layout()) as checkpoints:
        path = checkpoints.save(1, contents_of({"w": torch.ones(2)}, {}))
    with pytest.raises(IncompatibleError):
        MergedModel(open_step(path, LocalStorage()), tmp_path)


def test_as_commands(
    tmp_path: Path, step: CommittedStep, capsys: pytest.CaptureFixture[str]
) -> None:
    def ckpt(*argv: object) -> tuple[int, str]:
        code = main(["ckpt", *map(str, argv)])
        return code, "".join(capsys.readouterr())

    run, adapter = step.path.parent, tmp_path / "adapter"
    assert "healthy" in ckpt("ls", run)[1]
    code, out = ckpt("show", step.path, "--tensors")
    assert code == 0
    assert "lora_A.weight" in out
    assert ckpt("verify", step.path)[0] == 0
    assert ckpt("export", step.path, adapter)[0] == 0
    code, out = ckpt("diff", step.path, adapter, "--json")
    assert (code, json.loads(out)["counts"].keys()) == (6, {"differs", "only in A"})  # bf16
    code, out = ckpt("export", run, tmp_path / "merged", "--merged", "--dtype", "fp16")
    assert code == 0
    assert "with the adapter merged in, of step-00000001 in fp16" in out
    for argv in (["--base", tmp_path], ["--merged", "--role", "critic"]):
        assert ckpt("export", step.path, tmp_path / "x", *argv)[0] == 2
    assert not (tmp_path / "x").exists()
