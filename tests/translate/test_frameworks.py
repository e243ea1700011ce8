"""Configurations of each framework: its names, its defaults, and what it trains that has no counterpart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from burnish.config.foreign_names import known_ending
from burnish.config.keys import known_keys
from burnish.errors import UsageError
from burnish.translate.translation import translate_arguments

NAMES: dict[str, list[str]] = yaml.safe_load(
    (Path(__file__).parent / "argument_names.yaml").read_text()
)
TABLES = {
    "TRL": ("trl", ["trl", "grpo"]),
    "open-r1": ("open_r1", ["open_r1/grpo.py"]),
    "OpenRLHF": ("openrlhf", ["openrlhf.cli.train_ppo_ray"]),
    "axolotl": ("axolotl", ["axolotl", "train"]),
    "LLaMA-Factory": ("llama_factory", ["llamafactory-cli", "train"]),
    "prime-rl": ("prime_rl", []),
}
"""The table of a framework, and the words that begin its command."""
TOGETHER = {"optim", "datasets", "config"}
"""Names that a framework's module reads, and no table."""


def settings_of(words: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(translate_arguments(words.split()))
    return settings


@pytest.mark.parametrize("framework", TABLES)
def test_every_name_in_published_examples_is_known_and_none_is_lost(framework: str) -> None:
    table, program = TABLES[framework]
    names = [name for name in NAMES[framework] if name not in TOGETHER]
    assert [name for name in names if known_ending(name, table) is None] == []
    plain = [name for name in names if "[" not in name and "-" not in name]
    text = translate_arguments([*program, *(f"{name}=null" for name in plain)])
    assert text.rstrip().endswith(" 0 lost")
    assert f"# {len(plain)} settings: " in text


def test_use_peft_of_trl_is_an_adapter_by_its_defaults() -> None:
    command = "trl sft --model_name_or_path m --dataset_name d --learning_rate 1e-4"
    adapter = settings_of(f"{command} --use_peft")["model"]["lora"]
    assert adapter == {"rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"], "dropout": 0.05}
    given = settings_of(f"{command} --use_peft --lora_r 64 --lora_alpha 16 --lora_dropout 0")
    assert (given["model"]["lora"]["rank"], given["model"]["lora"]["alpha"]) == (64, 16)
    assert "lora" not in settings_of(f"{command} --lora_r 8")["model"]


@pytest.mark.parametrize(
    "words",
    [
        "trl sft --model_name_or_path m --dataset_name d --use_peft --lora_modules_to_save lm_head embed_tokens",
        "llamafactory-cli train --stage sft --model_name_or_path m --dataset d --additional_target lm_head,embed_tokens",
        "axolotl train --base_model=m --adapter=lora --lora_r=8 --lora_modules_to_save=[lm_head,embed_tokens]",
    ],
)
def test_modules_that_train_whole_are_carried(words: str) -> None:
    lora = settings_of(words)["model"]["lora"]
    assert lora["modules_to_save"] == ["lm_head", "embed_tokens"]


@pytest.mark.parametrize(
    ("words", "carried"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --use_peft --load_in_4bit --use_bnb_nested_quant", True),
        ("trl dpo --model_name_or_path m --dataset_name d --use_peft --load_in_4bit --bnb_4bit_quant_type nf4", True),
        ("trl dpo --model_name_or_path m --dataset_name d --use_peft --load_in_4bit --bnb_4bit_quant_type fp4", False),
        ("trl sft --model_name_or_path m --dataset_name d --load_in_4bit", False),
        ("trl sft --model_name_or_path m --dataset_name d --use_peft --load_in_8bit", False),
        ("trl sft --model_name_or_path m --dataset_name d --use_peft --load_in_4bit --use_dora", False),
        ("trl grpo --model_name_or_path m --dataset_name d --use_peft --load_in_4bit", False),
        ("axolotl train base_model=m adapter=qlora lora_r=8 load_in_4bit=true", True),
        ("axolotl train base_model=m adapter=qlora lora_model_dir=a load_in_4bit=true", True),
        ("axolotl train base_model=m load_in_4bit=true", False),
        ("axolotl train rl=grpo base_model=m adapter=qlora lora_r=8 load_in_4bit=true", False),
        ("llamafactory-cli train --stage sft --model_name_or_path m --quantization_bit 4 --quantization_method bnb", True),
        ("llamafactory-cli train --stage rm --model_name_or_path m --quantization_bit 4 --double_quantization false", True),
        ("llamafactory-cli train --stage sft --model_name_or_path m --quantization_bit 8", False),
        ("llamafactory-cli train --stage sft --model_name_or_path m --quantization_bit 4 --quantization_method hqq", False),
        ("llamafactory-cli train --finetuning_type full --model_name_or_path m --quantization_bit 4", False),
    ],
)  # fmt: skip
def test_a_base_in_four_bits_is_carried_under_an_adapter(words: str, carried: bool) -> None:
    text = translate_arguments(words.split())
    lora = yaml.safe_load(text)["model"].get("lora", {})
    assert lora.get("quantize_base") == ("nf4" if carried else None)
    assert ("takes its memory in bf16" in text) == (not carried)
    assert "Still to do" not in text or "quantize_base" not in text.partition("Still to do")[2]
    assert text.rstrip().endswith(" 0 lost")


def test_the_trainers_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    real = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    settings = settings_of("llamafactory-cli train --stage sft --model_name_or_path m")
    assert settings["optim"]["lr"] == real.learning_rate
    assert settings["optim"]["schedule"] == real.lr_scheduler_type
    assert settings["epochs"] == real.num_train_epochs
    assert settings["batch"]["examples"] == real.per_device_train_batch_size
    text = translate_arguments(["trl", "sft", "--model_name_or_path", "m", "--seed", "1"])
    assert "#   batch.examples: 8" in text
    assert "batch.prompts" not in text


@pytest.mark.parametrize("rank", [8, 32])
def test_alpha_of_llama_factory_is_twice_the_rank(rank: int) -> None:
    adapter = settings_of(f"llamafactory-cli train --stage sft --lora_rank {rank}")["model"]["lora"]
    assert (adapter["rank"], adapter["alpha"]) == (rank, 2 * rank)
    full = settings_of("llamafactory-cli train --finetuning_type full --model_name_or_path m")
    assert "lora" not in full["model"]


def test_a_wait_without_end_is_not_carried() -> None:
    words = "llamafactory-cli train --stage sft --learning_rate 1e-5 --ddp_timeout "
    assert "distributed" not in settings_of(words + "180000000")
    assert settings_of(words + "1800")["distributed"] == {"timeout_seconds": 1800}


@pytest.mark.parametrize(
    "words",
    [
        "llamafactory-cli train --finetuning_type oft",
        "llamafactory-cli train --stage ppo",
        "trl bco --model_name_or_path m",
        "python examples/scripts/cpo.py --dataset_name d",
        "axolotl train process_reward_model=true",
        "axolotl train rl=ebft base_model=m",
        "openrlhf.cli.train_dpo --model.beta 0.1",
        "deepspeed --module openrlhf.cli.train_rm --data.max_len 8",
        "foo=1 bar=2",
        "base_model=m stage=sft",
    ],
)
def test_what_has_no_counterpart_is_refused_rather_than_translated(words: str) -> None:
    with pytest.raises(UsageError):
        translate_arguments(words.split())


TRL = "--model_name_or_path m --dataset_name d"
LLAMA_FACTORY = "llamafactory-cli train --model_name_or_path m --dataset d --stage"


@pytest.mark.parametrize(
    ("words", "command", "method"),
    [
        (f"trl dpo {TRL}", "dpo", {}),
        (f"trl dpo {TRL} --beta 0.2 --label_smoothing 0.1", "dpo", {"beta": 0.2, "label_smoothing": 0.1}),
        (
            f"trl dpo {TRL} --loss_type sigmoid_norm sft --loss_weights 1.0 0.5",
            "dpo",
            {"loss": {"sigmoid": 1.0, "nll": 0.5}, "length_normalized": True},
        ),
        (f"trl dpo {TRL} --loss_type exo_pair", "dpo", {}),
        (f"trl kto {TRL} --desirable_weight 2.0", "dpo", {"loss": {"kto": 1.0}, "desirable_weight": 2.0}),
        (f"python scripts/orpo.py {TRL}", "dpo", {"loss": {"orpo": 0.1, "nll": 1.0}, "reference": "none"}),
        (
            f"python scripts/cpo.py {TRL} --loss_type simpo --cpo_alpha 0.0 --beta 2.0",
            "dpo",
            {"loss": {"simpo": 1.0}, "reference": "none", "beta": 2.0},
        ),
        (f"trl reward {TRL} --center_rewards_coefficient 0.01", "rm", {"center": 0.01}),
        (f"trl sft {TRL} --loss_type dft", "sft", {"loss": "dft"}),
        (f"trl sft {TRL} --loss_type dft --label_smoothing_factor 0.1", "sft", {"loss": "dft"}),
        (f"trl sft {TRL} --label_smoothing_factor 0.1", "sft", {"label_smoothing": 0.1}),
        (f"trl sft {TRL} --label_smoothing_factor 0", "sft", {}),
        (f"trl dpo {TRL} --label_smoothing_factor 0.1", "dpo", {}),
        (f"{LLAMA_FACTORY} sft --label_smoothing_factor 0.1", "sft", {"label_smoothing": 0.1}),
        (f"{LLAMA_FACTORY} rm --label_smoothing_factor 0.1", "rm", {}),
        (f"python scripts/gkd.py {TRL} --teacher_model_name_or_path t", "rl", {}),
        ("axolotl train rl=dpo base_model=m rl_beta=0.3", "dpo", {"beta": 0.3}),
        ("axolotl train rl=ipo base_model=m", "dpo", {"loss": {"ipo": 1.0}}),
        (
            "axolotl train rl=kto base_model=m kto_undesirable_weight=0.5",
            "dpo",
            {"loss": {"kto": 1.0}, "undesirable_weight": 0.5},
        ),
        ("axolotl train rl=orpo base_model=m orpo_alpha=0.2", "dpo", {"loss": {"orpo": 0.2, "nll": 1.0}, "reference": "none"}),
        (
            "axolotl train rl=simpo base_model=m cpo_alpha=0 simpo_gamma=0.7",
            "dpo",
            {"loss": {"simpo": 1.0}, "reference": "none", "simpo_gamma": 0.7},
        ),
        ("axolotl train reward_model=true base_model=m", "rm", {}),
        (f"{LLAMA_FACTORY} dpo --pref_beta 0.3", "dpo", {"beta": 0.3}),
        (f"{LLAMA_FACTORY} dpo --pref_ftx 0.5 --pref_loss hinge", "dpo", {"loss": {"hinge": 1.0, "nll": 0.5}}),
        (f"{LLAMA_FACTORY} kto --kto_rejected_weight 2.0", "dpo", {"loss": {"kto": 1.0}, "undesirable_weight": 2.0}),
        (f"{LLAMA_FACTORY} rm --finetuning_type full", "rm", {}),
        (f"{LLAMA_FACTORY} sft --use_dft_loss true", "sft", {"loss": "dft"}),
    ],
)  # fmt: skip
def test_losses_of_preferences_are_carried(
    words: str, command: str, method: dict[str, Any]
) -> None:
    text = translate_arguments(words.split())
    assert text.startswith(f"# for burnish {command}\n")
    assert yaml.safe_load(text).get("method", {}) == method
    assert text.rstrip().endswith(" 0 lost")
    if "exo_pair" in words:
        assert "loss_type=exo_pair: method.loss" in text


@pytest.mark.parametrize(
    ("given", "command", "mix", "undecided"),
    [
        ("--lmbda 1.0 --beta 0.3 --seq_kd true", "rl", 0.3, 0),
        ("--lmbda 0 --beta 0 --temperature 0.7", "sft", 0, 0),
        ("--lmbda 0.0 --seq_kd true --use_fused_linear_loss true", "sft", 0.5, 1),
        ("--lmbda 0.25 --teacher_model_init_kwargs {}", "rl", 0.5, 1),
    ],
)
def test_distillation_of_trl_is_carried(
    given: str, command: str, mix: float, undecided: int
) -> None:
    words = f"python scripts/gkd.py {TRL} --teacher_model_name_or_path t {given}"
    text = translate_arguments(words.split())
    assert text.startswith(f"# for burnish {command}\n")
    settings = yaml.safe_load(text)
    assert settings["distill"] == {"teachers": [{"path": "t"}], "tokens": "all", "mix": mix}
    drawn = {"temperature": 0.9, "n": 1, "max_response_length": 128}
    assert settings.get("rollout") == (drawn if command == "rl" else None)
    assert f"{undecided} left for you to decide, 0 lost" in text


def test_columns_and_parts_of_axolotl_are_carried(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(
        "base_model: m\nrl: dpo\nunfrozen_parameters: [lm_head, ^model.norm]\n"
        "datasets: [{path: d, field_messages: talk, field_chosen: good, field_rejected: bad}]\n"
    )
    settings = settings_of(str(file))
    assert settings["data"] == {"train": ["d"], "prompt_column": "talk", "max_length": 512}
    assert settings["method"] == {"chosen_column": "good", "rejected_column": "bad"}
    assert settings["model"]["train"] == ["^lm_head", "^model.norm"]
    part = settings_of("axolotl train base_model=m unfrozen_parameters=['embed_tokens[:32000]']")
    assert "train" not in part["model"]


def test_openrlhfs_dotted_and_flat_arguments_mean_the_same() -> None:
    dotted = settings_of(
        "openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --actor.adam.lr 5e-7 --rollout.batch_size 128 "
        "--rollout.n_samples_per_prompt 8 --train.batch_size 512 --algo.advantage.estimator group_norm "
        "--algo.kl.init_coef 1e-3 --actor.eps_clip_low_high 0.2 0.27 --reward.remote_url r.py"
    )
    flat = settings_of(
        "openrlhf.cli.train_ppo_ray --pretrain m --actor_learning_rate 5e-7 --rollout_batch_size 128 "
        "--n_samples_per_prompt 8 --train_batch_size 512 --advantage_estimator group_norm "
        "--init_kl_coef 1e-3 --eps_clip_low_high 0.2 0.27 --remote_rm_url r.py"
    )
    assert dotted == flat
    assert dotted["batch"] == {"prompts": 128, "minibatches": 2}
    assert (dotted["optim"]["lr"], dotted["algorithm"]["clip_high"]) == (5e-7, 0.27)
    assert dotted["algorithm"]["kl"] == {"coef": 1e-3, "estimator": "k1", "place": "reward"}


def test_axolotls_yaml(tmp_path: Path) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(
        "base_model: m\ndatasets:\n  - {path: org/data, type: alpaca}\nval_set_size: 0.05\nadapter: lora\nlora_r: 8\n"
        "lora_alpha: 16\nlora_target_linear: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 3\n"
        "warmup_ratio: 0.1\nevals_per_epoch: 4\nsaves_per_epoch: 1\nlearning_rate: 0.0002\nsequence_len: 4096\n"
    )
    settings = yaml.safe_load(translate_arguments([str(path)]))
    assert settings["data"] == {"train": ["org/data"], "validation": ["5%"], "max_length": 4096}
    assert settings["model"] == {"path": "m", "lora": {"rank": 8, "alpha": 16}}
    assert (settings["batch"], settings["epochs"]) == ({"examples": 8}, 3)
    assert settings["optim"] == {"lr": 0.0002, "schedule": "cosine", "warmup_steps": "10%"}
    assert settings["evaluation"] == {"every": "1/4 epoch"}
    assert settings["checkpoint"] == {"save_every": "1 epoch"}


AXOLOTL_GRPO = """
base_model: m
revision_of_model: v1
rl: grpo
trl: {beta: 0.01, max_completion_length: 128, use_vllm: true, num_generations: 4, reward_funcs: [rewards.exact, rewards.form],
  reward_weights: [1.0, 0.5], scale_rewards: false, loss_type: dr_grpo, num_iterations: 2, temperature: 0.9}
vllm: {tensor_parallel_size: 2, gpu_memory_utilization: 0.85, max_model_len: 2048}
datasets: [{path: data/train.jsonl, type: rewards.prompts}]
adapter: lora
lora_r: 8
lora_target_modules: [q_proj]
lora_target_parameters: [experts.down_proj]
fsdp_config: {activation_checkpointing: true, offload_params: false, reshard_after_forward: false}
micro_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 0.00001
max_steps: 100
save_steps: 20
hub_model_id: me/model
"""


def test_axolotls_grpo(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(AXOLOTL_GRPO)
    text = translate_arguments([str(path)])
    settings = yaml.safe_load(text)
    assert settings["model"] == {
        "path": "m@v1",
        "lora": {"rank": 8, "alpha": 1.0, "targets": ["q_proj", "experts.down_proj"]},
    }
    assert settings["engine"] == {
        "activation_checkpointing": "full",
        "reshard_after_forward": False,
    }
    assert settings["batch"] == {"prompts": 4, "epochs": 2}
    rollout = settings["rollout"]
    assert (rollout["n"], rollout["max_response_length"], rollout["temperature"]) == (4, 128, 0.9)
    assert (rollout["engine"], rollout["tensor_parallel"]) == ("vllm", 2)
    functions = [(each["function"], each["weight"]) for each in settings["reward"]["functions"]]
    assert functions == [("rewards:exact", 1.0), ("rewards:form", 0.5)]
    algorithm = settings["algorithm"]
    assert (algorithm["advantage"], algorithm["kl"]) == ("dr_grpo", {"coef": 0.01})
    assert algorithm["aggregation"] == "sequence_sum_fixed"
    assert settings["checkpoint"] == {
        "save_every": 20,
        "push_to_hub": "me/model",
        "hub_strategy": "every_save",
    }
    assert "data/train.jsonl has rows of axolotl's type rewards.prompts" in text
    assert text.rstrip().endswith(" 0 left for you to decide, 0 lost")
    path.write_text(
        AXOLOTL_GRPO.replace("rl: grpo", "rl: gdpo").replace("scale_rewards: false, ", "")
    )
    assert yaml.safe_load(translate_arguments([str(path)]))["algorithm"]["advantage"] == "gdpo"


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ("push_to_hub hub_model_id=me/m hub_strategy=end", {"push_to_hub": "me/m"}),
        ("push_to_hub hub_model_id=me/m", {"push_to_hub": "me/m", "hub_strategy": "every_save"}),
        ("push_to_hub hub_model_id=m", {}),
        ("hub_model_id=me/m", {}),
        ("push_to_hub hub_model_id=me/m hub_strategy=checkpoint", {"push_to_hub": "me/m"}),
        ("num_train_epochs=2 save_steps=0.05", {"save_every": "1/10 epoch"}),
        ("save_steps=-5 save_strategy=no", {"save_every": 0}),
    ],
)
def test_what_is_saved_and_sent(given: str, carried: dict[str, Any]) -> None:
    words = [f"--{word}" if "=" in word else f"--{word}=true" for word in given.split()]
    for program in (["trl", "sft"], ["llamafactory-cli", "train"]):
        text = translate_arguments([*program, "--model_name_or_path=m", *words])
        assert yaml.safe_load(text).get("checkpoint", {}) == carried
        assert text.rstrip().endswith(" 0 lost")


def test_a_server_beside_the_training_is_not_translated(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python -m openrlhf.cli.serve_rm --port 5000 --dataset d &\n"
        "python -m openrlhf.cli.train_ppo_ray --pretrain m --vllm_num_engines 2 --vllm_tensor_parallel_size 2\n"
    )
    settings = yaml.safe_load(translate_arguments([str(path)]))
    assert settings["rollout"] | {"n": 1} == settings["rollout"]
    assert (settings["model"], settings["rollout"]["tensor_parallel"]) == ({"path": "m"}, 2)


def test_a_name_of_trls_in_axolotls_yaml_leaves_it_axolotls(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(
        "base_model: m\nmicro_batch_size: 1\nmax_seq_length: 64\nsteps_per_generation: 1\n"
    )
    assert yaml.safe_load(translate_arguments([str(path)]))["model"] == {"path": "m"}


def test_prime_rls_toml(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(
        'max_steps = 20\nseq_len = 2048\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 128\ngroup_size = 16\n'
        "[orchestrator.train.sampling]\nmax_completion_tokens = 128\n[trainer.optim]\nlr = 3e-6\n"
        '[[orchestrator.train.source]]\nname = "reverse-text"\n'
    )
    text = translate_arguments([str(path)])
    settings = yaml.safe_load(text)
    assert (settings["steps"], settings["model"], settings["optim"]["lr"]) == (
        20,
        {"path": "m"},
        3e-6,
    )
    assert (settings["batch"], settings["rollout"]["n"]) == ({"prompts": 8}, 16)
    assert settings["rollout"]["max_response_length"] == 128
    assert settings["data"] == {"max_prompt_length": 1920}
    assert "orchestrator.train.source=" in text
    assert set(settings) <= set(known_keys())


def test_open_r1s_rewards_are_left_to_the_person() -> None:
    text = translate_arguments(
        ["open_r1/grpo.py", "--reward_funcs", "accuracy", "format", "--report_to", "wandb"]
    )
    assert "reward" not in yaml.safe_load(text)
    assert yaml.safe_load(text)["tracking"] == {"trackers": ["wandb"]}
    assert "#   reward_funcs=[accuracy, format]" in text
