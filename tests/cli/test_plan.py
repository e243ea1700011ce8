from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.tiny import tiny_config
from support.models.tokenizers import save_char_tokenizer
from support.nightly import by_day

from burnish.cli.main import main

MODEL = (
    "{model_type: qwen3, hidden_size: 4096, intermediate_size: 12288, num_hidden_layers: 36, "
    "num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 151936}"
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration whose model has no weights and whose data are not there."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(
        f"model: {{fresh: {MODEL}, tokenizer: t}}\n"
        "data: {train: [train.jsonl], max_length: 4096, max_prompt_length: 512}\n"
        "batch: {examples: 256, prompts: 64, tokens_per_device: 16384}\n"
    )
    return tmp_path


def test_a_plan_in_words(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "c.yaml", "--devices", "64xH100-80G"]) == 0
    text = capsys.readouterr().out
    for fact in (
        "8.2 billion parameters on 64 × H100 with 80 GiB",
        "supervised fine-tuning: 256 sequences of 4096 tokens a step",
        "Recommended: ",
        "█",
        "compute  time",
        " TFLOP  ",
        "engine.activation_checkpointing=",
        "layouts fit",
        "do not fit in 80.7 GB",
        "most of it activations",
        "Assumed:",
        "within",
    ):
        assert fact in text


def test_layouts_of_the_megatron_engine_can_be_taken_as_they_are_recommended(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "c.yaml", "engine.kind=megatron", "--devices", "64xH100-80G"]
    assert main([*argv, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["fits"]
    assert best["shards"] * best["tensor"] * best["pipeline"] == 64
    assert main([*argv, *best["overrides"]]) == 0
    assert "layers by" in capsys.readouterr().out


def test_an_adapter_on_the_megatron_engine_is_planned(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "c.yaml", "engine.kind=megatron", "--devices", "64xH100-80G", "--json"]
    assert main(argv) == main([*argv, "model.lora.rank=16"]) == 0
    whole, adapter = map(json.loads, capsys.readouterr().out.splitlines())
    kept, less = (each["configured"]["plan"]["bytes"]["save"] for each in (whole, adapter))
    assert less["gradients"] < kept["gradients"] / 10
    assert less["optimizer"] < kept["optimizer"] / 10


def test_a_plan_for_rewards_has_the_phases_of_reinforcement_learning(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "c.yaml", "reward.functions=[{function: numeric}]", "--devices", "64xH100-80G"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][0]
    assert best["fits"]
    assert list(best["bytes"]) == ["rollout", "update", "publish", "save"]
    assert list(best["flops"]) == ["rollout", "update"]
    assert best["replicas"] * best["shards"] * best["tensor"] == 64
    assert main([*argv, *best["overrides"]]) == 0


def test_what_lies_on_the_host_has_lines_of_its_own(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "c.yaml", "engine.optimizer_offload=true", "--devices", "64xH100-80G"]
    assert main(argv) == 0
    assert re.search(r"\n  host, optimizer +1\.0 GB\n", capsys.readouterr().out)
    assert main([*argv, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["shards"] == 64
    assert best["host_bytes"] == {"optimizer": 8 * 8_190_735_360 / 64}


def test_reward_models_are_planned(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "judge").mkdir()
    (work / "judge/config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    argv = ["plan", "c.yaml", "--devices", "64xH100-80G", "--json"]
    for place in ("judge", (work / "judge").as_uri()):
        assert main([*argv, f"reward.models=[{{path: {place}}}]"]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert best["bytes"]["save"]["reward models"] > 0
    assert main([*argv, "reward.models=[{path: nothing}]"]) == 5
    assert "reward.models" in capsys.readouterr().err


def configured(text: str) -> str:
    """What a plan says of the settings as they are."""
    found = re.search(r"\n(As configured .*?)\n\n(?=\S)", text, re.DOTALL)
    assert found
    return found[1]


NARROW = "model.fresh={model_type: qwen3_moe, hidden_size: 512, intermediate_size: 512, num_hidden_layers: 2, num_attention_heads: 32, num_key_value_heads: 8, head_dim: 16, vocab_size: 512, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 24}"  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["engine.replicas=3"], ["engine.replicas: 3", "64 processes"]),
        (["engine.tensor_parallel=3"], ["engine.tensor_parallel: 3", "64 processes"]),
        (["engine.sequence_parallel=64"], ["engine.sequence_parallel: 64", "32 attention heads"]),
        (["engine.tensor_parallel=4", NARROW], ["24 columns"]),
        (["engine.kind=megatron", "engine.pipeline_parallel=3"], ["engine.pipeline_parallel: 3"]),
        (["engine.kind=megatron", "engine.pipeline_parallel=64"], ["36 layers"]),
        (["engine.kind=megatron", "engine.expert_parallel=2"], ["engine.expert_parallel: 2"]),
        (["engine.sequence_parallel=2", "data.max_length=40000"], ["engine.sequence_parallel: 2", "40000"]),
        (["engine.activation_checkpointing=selective", "engine.compile=true"], ["engine.activation_checkpointing", "engine.compile: true"]),
    ],
)  # fmt: skip
def test_of_settings_that_cannot_be_run_a_plan_says_why(
    work: Path, capsys: pytest.CaptureFixture[str], settings: list[str], facts: list[str]
) -> None:
    argv = ["plan", "c.yaml", *settings, "--devices", "64xH100-80G"]
    assert main(argv) == 0
    said = configured(capsys.readouterr().out)
    assert all(fact in said for fact in facts), said
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["configured"]
    assert found["plan"] is None
    refusal = " ".join(map(str, found["refusal"].values()))
    assert all(fact in refusal for fact in facts), refusal


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (["engine.replicas=4", "engine.activation_checkpointing=full"], "4 copies over 16 processes"),
        (["engine.kind=megatron", "engine.pipeline_parallel=8", "engine.tensor_parallel=2"], "1 copy over 4 processes, matrices by 2, layers by 8"),
    ],
)  # fmt: skip
def test_the_layout_that_was_chosen_has_its_bytes_by_phase(
    work: Path, capsys: pytest.CaptureFixture[str], settings: list[str], layout: str
) -> None:
    argv = ["plan", "c.yaml", *settings, "--devices", "64xH100-80G"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["configured"]
    assert found["refusal"] is None
    assert found["plan"]["fits"]
    assert set(settings) - {"engine.kind=megatron"} <= set(found["plan"]["overrides"])
    assert main(argv) == 0
    said = configured(capsys.readouterr().out)
    sizes = {phase: sum(parts.values()) / 1e9 for phase, parts in found["plan"]["bytes"].items()}
    assert said.startswith(f"As configured it fits: {layout}")
    assert f" {sizes['update']:.1f} GB of 80.7 GB on each device, most in update" in said
    assert list(sizes) == ["update", "save"]
    for phase, size in sizes.items():
        assert re.search(rf"\n  {phase} +{size:.1f} GB ", said)
    assert (
        main([*argv, "engine.activation_checkpointing=none", "batch.tokens_per_device=262144"]) == 0
    )
    said = configured(capsys.readouterr().out)
    assert said.startswith(f"As configured it does not fit: {layout}")
    assert "; try engine.activation_checkpointing=full" in said
    assert "\n  update " in said


def test_no_table_is_printed_twice_nor_for_defaults(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("torch", "megatron"):
        argv = ["plan", "c.yaml", f"engine.kind={kind}", "--devices", "64xH100-80G"]
        assert main([*argv, "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert main([*argv, *best["overrides"]]) == 0
        text = capsys.readouterr().out
        assert configured(text).startswith("As configured it fits: as recommended; ")
        assert text.count("  phase ") == 1
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert "it does not fit: 1 copy over 64 processes, checkpointing none; " in configured(text)
        assert text.count("  phase ") == 1
        assert main([*argv, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["configured"]
        assert not found["plan"]["fits"]
        assert "80.7 GB" in found["refusal"]["want"]


def test_nothing_fits(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "c.yaml", "--devices", "4xL4-24G"]) == 2
    out, error = capsys.readouterr()
    assert "do not fit in 24.2 GB" in out
    for fact in (
        "does not fit on 4 × L4 with 24 GiB",
        "have: ",
        "want: at most 24.2 GB",
        "do:   try ",
    ):
        assert fact in error


def test_a_device_that_is_not_in_the_table(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "c.yaml", "--devices", "64xZ9"]
    assert main(argv) == 2
    assert "--device-memory" in capsys.readouterr().err
    assert main([*argv, "--device-memory", "80", "--device-tflops", "400"]) == 0
    assert main(["plan", "c.yaml", "--device-memory", "80"]) == 2  # this machine's is known


def test_a_model_in_a_directory_or_a_file(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "m").mkdir()
    (work / "m/config.json").write_text(json.dumps(tiny_config("llama").to_dict()))
    for setting in ("model.path=m", "model.fresh=m/config.json"):
        other = "model.fresh=null" if setting.startswith("model.path") else "model.path=null"
        assert main(["plan", "c.yaml", other, setting, "--devices", "2xCPU-24G"]) == 0
    assert main(["plan", "c.yaml", "model.fresh=nothing.json", "--devices", "2xCPU-24G"]) == 5
    (work / "m/config.json").rename(work / "no-such-config.json")  # and not the one in the root
    argv = ["plan", "c.yaml", "model.fresh=/no-such-config.json", "--devices", "2xCPU-24G"]
    assert main(argv) == 5
    (work / "m/config.json").write_text("{")
    assert main(["plan", "c.yaml", "model.fresh=m/config.json", "--devices", "2xCPU-24G"]) == 2
    assert "m/config.json" in capsys.readouterr().err


def test_a_trillion_parameters_on_many_devices_without_torch(work: Path) -> None:
    model = (
        "{model_type: qwen3_moe, hidden_size: 7168, intermediate_size: 18432, num_hidden_layers: 61, "
        "moe_intermediate_size: 2048, num_experts: 384, num_experts_per_tok: 8, num_attention_heads: 64, "
        "num_key_value_heads: 8, head_dim: 128, vocab_size: 163840}"
    )
    program = (
        "import sys\nfrom burnish.cli.main import main\n"
        f"argv = ['plan', 'c.yaml', 'model.fresh={model}', 'batch.examples=8192']\n"
        "assert main([*argv, '--devices', '16384xH100-80G', '--json']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["plans"]) > 100
    assert "8192, 16384 processes" in found["configured"]["refusal"]["have"]
    best = found["plans"][0]
    assert best["replicas"] * best["shards"] * best["tensor"] == 16384
    assert best["tensor"] > 1  # a layer's gathered experts fit no device otherwise


def make_runnable(work: Path) -> None:
    """What a dry run wants to be there."""
    save_char_tokenizer(work / "t")
    (work / "train.jsonl").write_text('{"prompt": "1+1", "completion": "2", "answer": "2"}\n')


def test_a_dry_run_says_what_memory_it_needs(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runnable(work)
    assert main(["sft", "c.yaml", "--dry-run", "--devices", "64xB200-180G"]) == 0
    text = capsys.readouterr().out
    assert "GB on each of 64 × B200 with 180 GiB, most in update" in text
    assert "64 processes" in text


@pytest.mark.parametrize("command", by_day(["sft", "rl"], ["rl"]))
def test_a_dry_run_refuses_what_cannot_fit(
    work: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    make_runnable(work)
    argv = [command, "c.yaml", "reward.functions=[{function: numeric}]"]
    assert main([*argv, "--dry-run", "--devices", "64xB200-180G"]) == 0
    capsys.readouterr()
    assert main([*argv, "--dry-run", "--devices", "1xCPU-24G"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "1 × CPU with 24 GiB" in error
    assert "burnish plan CONFIG --devices" in error
    assert main([*argv, "--devices", "1xCPU-24G"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engine.tensor_parallel=16"], "engine.tensor_parallel: 16, 8 "),
        (["engine.sequence_parallel=64"], "engine.sequence_parallel: 64, 32 "),
        (["engine.kind=megatron", "engine.pipeline_parallel=64"], "36"),
        (["engine.kind=megatron", "engine.expert_parallel=2"], "engine.expert_parallel: 2"),
        (["model.fresh.model_type=olmo2", "engine.tensor_parallel=2"], "engine.tensor_parallel=1"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_cannot_be_cut(
    work: Path, capsys: pytest.CaptureFixture[str], settings: list[str], said: str
) -> None:
    make_runnable(work)
    assert main(["sft", "c.yaml", *settings, "--dry-run", "--devices", "64xB200-180G"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert said in error


def test_an_adapter_of_layers_that_are_not_there_is_not_planned(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "c.yaml", "model.lora.rank=4", "model.lora.targets=[q_proj, query]"]
    assert main([*argv, "--devices", "64xB200-180G"]) == 4
    error = capsys.readouterr().err
    assert "query" in error
    assert "have: down_proj, gate_proj, k_proj" in error


def test_a_dry_run_refuses_a_family_that_cannot_be_trained(work: Path) -> None:
    make_runnable(work)
    fresh = "model.fresh={model_type: mamba}"
    assert main(["sft", "c.yaml", fresh, "--dry-run", "--devices", "64xB200-180G"]) == 4


def test_a_dry_run_of_the_megatron_engine(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runnable(work)
    megatron = ["engine.kind=megatron", "engine.pipeline_parallel=4", "engine.tensor_parallel=2"]
    assert main(["sft", "c.yaml", *megatron, "--dry-run", "--devices", "64xB200-180G"]) == 0
    text = capsys.readouterr().out
    assert "4 pipeline × 8 data × 1 sequence × 2 tensor" in text
    assert "not planned" not in text
    assert "on each of 64 × B200" in text


def test_more_devices_than_sequences_are_said_to_be_that(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "c.yaml", "batch.examples=4", "--devices", "64xH100-80G"]) == 2
    said = capsys.readouterr().err
    assert "64 × H100" in said
    assert "have: 4 sequences" in said
