"""Say why an argument of verl has no counterpart. The table of names has those that one last part tells."""

from __future__ import annotations

import re

_ACTOR = r"actor_rollout_ref\.actor\."
_ROLLOUT = r"(actor_rollout_ref\.)?rollout\."
_GENERATOR = "the generator's own options have no setting; rollout.engine and rollout.place choose the generator"
_JUDGES = "judges run in the training processes"
_KERNELS = "only speed and memory depend on it; kernels are chosen by device"
_LAUNCHED = (
    "Burnish needs no such program or configuration; see --processes, --ray, torchrun or Slurm"
)
_LAYOUT = "only speed and memory depend on it; engine has the settings for them"
_MICRO_BATCHES = "only speed and memory depend on it; batch.tokens_per_device limits a micro-batch"
_NUMBER = "--processes, --ray, torchrun or Slurm start the processes; their number is not a setting"
_OTHER_ENGINE = "it is an option of another engine; engine.kind is torch (FSDP2) or megatron"
_PATTERNS = (
    (r"actor_rollout_ref\.ref\.(?!model\.path)", "the reference is held as the policy is"),
    (
        r"critic\.(?!model\.path|model\.lora_rank$|optim\.lr$|cliprange_value|path$)",
        "the critic's other settings are those of the policy",
    ),
    (r"ray_kwargs\.|ray_init\.|hydra\.|config_path$", _LAUNCHED),
    (r"(.*\.)?nnodes$|(.*\.)?n_\w*gpus_per_node$", _NUMBER),
    (r"node_rank$|standalone$|rdzv_|master_", _LAUNCHED),
    (r"(nproc_per_node|engine|model|optim)$|actor@|algorithm@", _LAUNCHED),
    (r"trainer\.(v1|use_v1|use_legacy|ray_wait|esi_)|.*hybrid_engine$", _LAUNCHED),
    (r"trainer\.device$", "accelerators that torch finds are used"),
    (r"trainer\.del_local", "checkpoint.keep_last and keep_every say which steps stay"),
    (
        r"(.*\.)?(profiler|global_profiler)\.",
        "tracking.torch_profiler and tracking.profile_steps record steps",
    ),
    (r"distillation\.", "set distill.teachers by hand: see docs/guides/distillation.md"),
    (
        r"(.*\.)?(multi_turn|agent)\.|env\.",
        "set rollout.environment by hand: see docs/guides/environments.md",
    ),
    (r"data\.multiturn\.enable$", "chats are recognised from their columns"),
    (rf"{_ROLLOUT}trace\.", "tracking.traces sends traces"),
    (rf"{_ROLLOUT}prometheus\.", "metrics.jsonl and tracking.trackers have all numbers"),
    (r".*\.qat\.", "quantized models are not trained"),
    (r".*\.mtp\.", "burnish sft trains such layers with model.train_mtp, and no other method does"),
    (r".*\.disaggregation\.|env\.disagg", _GENERATOR),
    (
        r".*\.(turbo_config|impl_cfg)\.|.*\.(veomni|torchtitan)\.(?!optimizer_offload|param_offload|ulysses|router)",
        _OTHER_ENGINE,
    ),
    (
        r".*override_\w+_config\.recompute_(?!granularity|modules)",
        "each decoder layer is recomputed",
    ),
    (r".*\.moe_z_loss_coeff$", "routers have no z loss"),
    (r".*\.dsa_indexer_\w*loss", "this loss is not implemented"),
    (
        r".*\.moe_router_(enable_expert_bias|load_balancing_type)$",
        "engine.router_aux_loss and engine.router_bias_update_rate balance routers",
    ),
    (r".*dropout$|.*_pdrop$", "there is no dropout but that of an adapter"),
    (r".*override_config\.attn_implementation$", _KERNELS),
    (
        r".*override_config\.|.*override_transformer_config\.(normalization|swiglu|multi_latent|num_layers$)",
        "a model directory has its own config.json; change it there",
    ),
    (r".*\.(fp8|fp8_recipe)$", "weights are trained in engine.precision"),
    (
        r".*override_transformer_config\.(?!\w*(coeff|eps|parallel_size|sequence_parallel|granularity|parallel_layout|permute_fusion|recompute_modules)$)|.*override_ddp_config\.(?!overlap_(grad_reduce|param_gather)$)",
        _KERNELS,
    ),
    (
        r".*override_optimizer_config\.(overlap|use_precision|offload_fraction|optimizer_offload_fr)",
        _LAYOUT,
    ),
    (r".*\.decoupled_weight_decay$", "weight decay is always apart from the gradient"),
    (r".*\.engine_kwargs\.", _GENERATOR),
    (rf"{_ROLLOUT}(checkpoint_engine\.|layered_summon|update_weights_bucket)", _LAYOUT),
    (
        rf"{_ROLLOUT}(enable_chunked|enable_prefix|enable_sleep|multi_stage_wake|disable_|\w*capture_sizes)",
        _GENERATOR,
    ),
    (
        rf"{_ROLLOUT}(data_parallel|expert_parallel|moe_tensor_parallel|pipeline_model_parallel)",
        _GENERATOR,
    ),
    (rf"{_ROLLOUT}(quantization|dtype|skip_tokenizer_init|max_num_batched)", _GENERATOR),
    (
        rf"{_ROLLOUT}calculate_log_probs$",
        "the generator's log-probs are always kept",
    ),
    (rf"{_ROLLOUT}(prompt|response)_length$", "the lengths of data and rollout count"),
    (rf"{_ROLLOUT}over_sample", "no completion is drawn to be left out"),
    (
        r"(reward\.)?reward_model\.(rollout\.|model\.(?!path)|micro|use_|forward|enable_resource|launch|strategy)",
        _JUDGES,
    ),
    (r"reward_model\.prime_", "reward.workers and reward.concurrency say how many run at one time"),
    (r".*overlong_buffer(_cfg)?\.log$", "the part of the reward is always logged"),
    (r".*(log_prob|forward)_(use_dynamic_bsz|max_token_len_per_gpu|micro_batch)", _MICRO_BATCHES),
    (r".*micro_batch_size(_per_gpu)?$|data\.max_token_len_per_gpu$", _MICRO_BATCHES),
    (
        r"data\.(num_workers|dataloader_num_workers|filter_overlong_prompts_workers)",
        "data are tokenized once, at the start",
    ),
    (r"data\.(return_raw|ignore_input_ids|return_full)", "chats are kept as they are"),
    (r"data\.(image_|video_|audio_)|.*(freeze_vision|num_images)", "images are not supported"),
    (
        r"data\.(multiturn\.)?tools_key",
        "set rollout.environment.verl by hand: see docs/guides/environments.md",
    ),
    (r".*\bpad_(mode|to_length)$", "sequences are always packed, without padding"),
    (
        r".*(entropy_checkpointing|entropy_from_logits_\w*|fused_kernel_options\.\w+)$",
        "log-probs are always computed in chunks (engine.logprob_chunk)",
    ),
    (r".*use_torch_compile$", "verl compiles the entropy; engine.compile compiles each layer"),
    (
        r".*(forward_prefetch|use_orig_params|use_prefix_grouper|attention_backend_override)$",
        _KERNELS,
    ),
    (r".*(use_mbridge|vanilla_mbridge|dist_checkpointing\w*|use_megatron_fsdp)$", _LAYOUT),
    (r".*\.(model_dtype|torch_dtype|reduce_dtype|buffer_dtype)$", "main weights and sums are fp32"),
    (r".*\.use_liger$", "Liger's layers are used on CUDA if liger-kernel is installed"),
    (r".*lora\.(merge|\w*init_method|type)$", "adapters are those of PEFT"),
    (r"transfer_queue\.", "completions stay in the processes that train on them"),
    (r"skip\.", "completions are not read from disk"),
    (r".*calculate_sum_pi_squared$", "algorithm.advantage has no formula that needs it"),
    (r"trainer\.max_critic", "the critic is saved with every step"),
    (
        r"trainer\.(log_val_generations|val_generations_to_log|validation_data_dir)",
        "the completions of every validation are written to rollouts/ in the run's directory",
    ),
    (r"trainer\.(rl_logging_board|tensorboard_dir|debug)", "a run's directory is output_dir/name"),
    (rf"{_ACTOR}(data_loader_seed|fsdp_config\.seed|megatron\.seed)", "seed is that of all draws"),
    (rf"{_ACTOR}shuffle$|data\.validation_shuffle$", "rows are shuffled once, in a pass over data"),
    (r".*checkpoint\.strict$|trainer\.checkpoint\.", "a whole step is saved"),
)
"""Beginnings of names, and why they have no counterpart. The first that fits counts."""


def why_absent(name: str) -> str | None:
    """Return why a name of verl has no counterpart, or None if it is not among them."""
    return next((reason for start, reason in _PATTERNS if re.match(start, name)), None)
