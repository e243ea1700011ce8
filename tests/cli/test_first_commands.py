"""What people type first: of TRL, verl, Axolotl, LLaMA-Factory and OpenRLHF, with wrong names, without a file, with flags.

Each command ends with its exit code, in a sentence that names the setting to use, and never in a traceback.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.cli.main import main

FILES = {
    "sums.jsonl": '{"prompt": "2+3=", "answer": "5", "completion": "5"}\n',
    "rewards.py": "def correct(completions, **columns):\n    return [1.0 for _ in completions]\n",
    "rl.yaml": "model: {path: models/m}\ndata: {train: sums.jsonl}\nreward: {functions: 'rewards.py:correct'}\n",
    "sft.yaml": "name: mine\nmodel:\n  path: models/m\ndata:\n  train: sums.jsonl\n",
    "axolotl.yml": "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n- path: teknium/GPT4-LLM-Cleaned\n  type: alpaca\n"
    "sequence_len: 2048\nmicro_batch_size: 2\nlearning_rate: 0.0002\nadapter: lora\nlora_r: 16\n",
    "llama_factory.yaml": "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\ncutoff_len: 2048\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\n",
    "verl.sh": "python3 -m verl.trainer.main_ppo data.train_batch_size=64 \\\n  actor_rollout_ref.rollout.n=4 \\\n  trainer.save_freq=5\n",
    "models/m/config.json": '{"model_type": "qwen3"}',
    "runs/old/config.yaml": "name: old\nrollout: {n: 4}\n",
}
"""All that is in the working directory."""
RL = "model.path=models/m data.train=sums.jsonl reward.functions=rewards.py:correct"
SFT = "model.path=models/m data.train=sums.jsonl"

COMMANDS = [
    # Nothing, or next to nothing.
    ("", 0, "burnish init"),
    ("--help", 0, "burnish rl"),
    ("help", 2, "sft"),
    ("train", 2, "sft"),
    ("grpo", 2, "rl"),
    ("sft", 2, "CONFIG key=value init"),
    ("rl", 2, "CONFIG key=value init"),
    ("eval", 2, "CONFIG"),
    ("init", 2, "sft|dpo|rm|rl"),
    ("init ppo", 2, "sft rl"),
    ("sft --version", 2, "--version"),
    # Without a configuration file.
    (f"config check {SFT}", 0, "sft"),
    (f"config check {RL}", 0, "rl"),
    (f"config check {RL} name=123", 0, "rl"),
    ("config check model.path=Qwen/Qwen3-0.6B data.train=openai/gsm8k reward.functions=numeric", 0, "rl"),
    ("config check model.path=Qwen/Qwen3-0.6B@main data.train=[a.jsonl,b.jsonl]", 0, "sft"),
    ("rl model.path=models/m data.train=sums.jsonl", 2, "reward.functions=numeric"),
    ("sft model.path=models/m", 2, "data.train=FILE"),
    ("sft data.train=sums.jsonl", 2, "model.path model.fresh"),
    (f"sft {SFT} data.validation=none.jsonl", 5, "data.validation none.jsonl"),
    ("sft model.path=models/n data.train=sums.jsonl", 5, "model.path models/n"),
    ("sft model.path=./none data.train=sums.jsonl", 5, "model.path none"),
    ("sft model.path=Qwen/Qwen3-0.6B data.train=trl-lib/Capybara", 5, "model.path data.train Qwen/Qwen3-0.6B Capybara"),
    ("rl rl.yaml data.train=openai/gsm8k@main:main/train", 5, "data.train openai/gsm8k"),
    (f"rl {RL} reward.functions=reward.py:correct", 5, "reward.functions[0].function reward.py rewards.py"),
    # Something else where the file should be.
    ("sft Qwen/Qwen3-0.6B", 5, "model.path=Qwen/Qwen3-0.6B"),
    ("sft models/m sums.jsonl", 2, "models/m"),
    ("sft sums.jsonl", 2, "sums.jsonl"),
    ("rl more.jsonl", 5, "data.train=more.jsonl"),
    ("rl r.yaml", 5, "r.yaml"),
    ("eval runs/new", 5, "runs/new"),
    ("eval runs/old", 2, "data.validation"),
    ("config show runs/old", 0, "n: 4"),
    ("config show runs", 5, "runs"),
    ("plan rl.yaml --devices 4xBanana", 2, "--devices"),
    # As TRL's commands.
    ("sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara", 2, "model.path data.train"),
    ("sft sft.yaml --learning_rate 1e-5", 2, "optim.lr"),
    ("sft sft.yaml --num_train_epochs=3 --packing", 2, "epochs leave"),
    ("rl rl.yaml --num-generations 8 --beta 0.04", 2, "rollout.n algorithm.kl.coef"),
    ("rl rl.yaml --use_vllm --vllm_mode colocate", 2, "rollout.engine vllm rollout.place child"),
    ("rl rl.yaml learning_rate=1e-5", 2, "optim.lr=1.0e-05"),
    ("rl rl.yaml max_completion_length=512", 2, "rollout.max_response_length=512"),
    ("rl rl.yaml per_device_train_batch_size=8", 2, "batch.prompts"),
    ("rl rl.yaml gradient_accumulation_steps=4", 2, "batch.tokens_per_device leave"),
    ("rl rl.yaml loss_type=dr_grpo scale_rewards=false", 2, "aggregation=sequence_sum_fixed advantage=dr_grpo"),
    ("sft sft.yaml use_peft=true lora_r=16", 2, "model.lora.rank=16"),
    ("sft sft.yaml gradient_checkpointing=true bf16=true", 2, "activation_checkpointing=full precision=bf16"),
    ("sft sft.yaml report_to=wandb", 2, "tracking"),
    ("sft sft.yaml model.revision=main", 2, "model.path @REVISION"),
    ("config translate --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 2e-5", 0, "Qwen/Qwen3-0.6B 2.0e-05"),
    # As verl's.
    ("rl rl.yaml algorithm.adv_estimator=rloo", 2, "algorithm.advantage=rloo"),
    ("rl data.train_files=sums.jsonl actor_rollout_ref.model.path=models/m", 2, "data.train=sums.jsonl model.path"),
    ("rl rl.yaml actor_rollout_ref.rollout.n=5 trainer.save_freq=20", 2, "rollout.n=5 checkpoint.save_every=20"),
    ("rl rl.yaml actor_rollout_ref.actor.ppo_mini_batch_size=64", 2, "batch.minibatches"),
    ("rl rl.yaml actor_rollout_ref.actor.fsdp_config.param_offload=False", 2, "leave"),
    ("rl rl.yaml actor_rollout_ref.rollout.gpu_memory_utilization=0.6", 2, "rollout.slots leave"),
    ("rl rl.yaml trainer.n_gpus_per_node=8 trainer.nnodes=1", 2, "torchrun"),
    ("rl rl.yaml trainer.logger=[console,wandb]", 2, "tracking"),
    ("rl rl.yaml +trainer.val_before_train=False", 2, "evaluation.before=false"),
    ("config translate verl.sh", 0, "prompts: 64 n: 4 save_every: 5"),
    # As Axolotl's, LLaMA-Factory's and OpenRLHF's files and flags.
    ("sft axolotl.yml", 2, "base_model datasets optim.lr model.lora.rank"),
    ("config translate axolotl.yml", 0, "NousResearch rank: 16"),
    ("sft llama_factory.yaml", 2, "model.path optim.lr epochs batch.examples"),
    ("config translate llama_factory.yaml", 0, "Qwen/Qwen3-4B rank: 8 cutoff_len"),
    ("rl --pretrain models/m --prompt_data sums.jsonl", 2, "model.path data.train"),
    ("rl rl.yaml --actor_learning_rate 5e-7 --n_samples_per_prompt 8", 2, "optim.lr rollout.n"),
    # Misspelt, or of the wrong kind.
    ("rl rl.yaml rolout.n=4", 2, "rollout.n"),
    ("rl rl.yaml lr=1e-6", 2, "optim.lr critic.lr"),
    ("rl rl.yaml rollout.n=eight", 2, "rollout.n eight"),
    ("rl rl.yaml rollout.n", 2, "rollout.n key=value"),
    ("rl rl.yaml rollout.n = 4", 2, "key=value"),
    ("rl rl.yaml optim.lr=1e-6.0", 2, "optim.lr"),
    ("rl rl.yaml --rollout.n=4", 2, "rollout.n=4"),
    ("rl rl.yaml reward.functions=correct", 2, "reward.functions"),
    ("sft sft.yaml batch.minibatches=2 --dryrun", 2, "--dry-run"),
    ("sft sft.yaml name=a/b", 2, "name"),
    ("sft sft.yaml output_dir=/dev/null/x", 2, "output_dir"),
    ("sft sft.yaml engine.precision=fp16", 2, "engine.precision bf16 fp32"),
    ("sft sft.yaml engine.tensor_parallel=2", 2, "engine.tensor_parallel"),
    ("config explain learning_rate", 2, "optim.lr"),
    ("ckpt ls runs/none", 5, "runs/none"),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("first")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(files)
    level = logging.getLogger("burnish").level
    before = sorted(files.rglob("*"))
    yield files
    assert sorted(files.rglob("*")) == before  # nothing was written
    logging.getLogger("burnish").setLevel(level)


@pytest.mark.parametrize(("command", "code", "named"), COMMANDS, ids=[each[0] for each in COMMANDS])
def test_a_first_command(
    command: str, code: int, named: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == code
    written = capsys.readouterr()
    said = written.out if code == 0 else written.err
    assert "Traceback" not in written.err
    assert [name for name in named.split() if name not in said] == [], said


def test_there_are_enough() -> None:
    assert len(COMMANDS) >= 60
