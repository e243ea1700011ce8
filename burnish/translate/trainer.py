"""Translate what several arguments of transformers' trainer mean together. TRL, axolotl and LLaMA-Factory have them too."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from burnish.errors import count_text
from burnish.translate.foreign_arguments import Arguments

_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""The names of AdamW's coefficients, and their defaults."""
_BATCH = (
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_processes",
    "nproc_per_node",
)
"""What the size of a step's batch follows from, beside the sequences of a device."""
_ADAMW = [
    "adamw",
    "adamw_apex_fused",
    "adamw_hf",
    "adamw_torch",
    "adamw_torch_fused",
    "paged_adamw",
    "paged_adamw_32bit",
]
_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
_LONGEST_WAIT = 86400
"""Seconds. A longer limit is meant as none, and a hang would stay unseen."""
_PUSHED = ("end", "every_save")
"""When a model is sent to the hub; other frameworks can also send what a run resumes from."""
_TARGETS = ("lora_target_modules", "lora_target_parameters")
_QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_bit")
_NF4 = {
    "bnb_4bit_quant_type": ["nf4"],
    "quantization_type": ["nf4"],
    "quantization_method": ["bnb", "bitsandbytes"],
}
"""What else says how weights are quantized, and what it says of bitsandbytes' NF4."""
_DIFFERENCES = {
    "bnb_4bit_compute_dtype": "engine.precision is the precision of products",
    "bnb_4bit_use_double_quant": "the scales stay in fp32",
    "use_bnb_nested_quant": "the scales stay in fp32",
    "double_quantization": "the scales stay in fp32",
}


def combine_trainer(arguments: Arguments, *, generates: bool) -> None:
    """Give a fate to what all frameworks have that build on transformers' trainer. Call it after adapters are carried."""
    _betas(arguments)
    _steps(arguments)
    combine_optimizer(arguments, "optim")
    _reports(arguments)
    _evaluation(arguments)
    _hub(arguments)
    _targets(arguments)
    _quantization(arguments, generates=generates)
    wait = arguments.number("ddp_timeout")
    if wait and wait > _LONGEST_WAIT:
        arguments.drop(
            "a wait without end hides a hang; distributed.timeout_seconds is 600", "ddp_timeout"
        )


def combine_batch(arguments: Arguments, per_device: str) -> None:
    """Carry the prompts and mini-batches of a step, from sequences per device, micro-batches and devices."""
    completions = arguments.number("num_generations") or 1
    of_device = arguments.number(per_device)
    sizes = {name: arguments.number(name) for name in _BATCH}
    if not of_device and not sizes["generation_batch_size"]:
        return
    accumulated = sizes["gradient_accumulation_steps"] or 1
    devices = sizes["num_processes"] or sizes["nproc_per_node"] or 1
    # A generation lasts for so many micro-batches. By default all of them make up one optimizer step.
    micro_batches = sizes["steps_per_generation"] or accumulated
    sequences = sizes["generation_batch_size"]
    if sequences and of_device:
        micro_batches = sequences // (of_device * devices)
    if not sequences:
        sequences = of_device * devices * micro_batches
    prompts = max(1, sequences // completions)
    settings = {"batch.prompts": prompts}
    if micro_batches != accumulated:
        settings["batch.minibatches"] = max(1, micro_batches // accumulated)
    arguments.carry(settings, per_device, *_BATCH)
    if not sizes["generation_batch_size"]:
        arguments.remarks.append(
            f"the batch is that of {count_text(devices, 'device')}; there it is for each device, here for all"
        )
    if prompts * completions != sequences:
        arguments.remarks.append(
            f"{count_text(prompts, 'prompt')} with {completions} completions are {prompts * completions}, not {sequences}"
        )


def combine_share(arguments: Arguments, name: str) -> None:
    """Carry a share of the rows that is held out: 0.1, or 0 for none. A number of rows is left to the person."""
    size = arguments.number(name)
    if size == 0:
        arguments.carry({}, name)
    elif size and size < 1:
        arguments.carry({"data.validation": [share_text(size)]}, name)


def share_text(share: float) -> str:
    """Return 10% for 0.1."""
    return f"{100 * share:g}%"


def _betas(arguments: Arguments) -> None:
    given = {name: arguments.number(name) for name in _BETAS}
    if any(beta is not None for beta in given.values()):
        betas = [_BETAS[name] if beta is None else beta for name, beta in given.items()]
        arguments.carry({"optim.betas": betas}, *given)


def _steps(arguments: Arguments) -> None:
    """Carry the number of steps, and what is a share of them."""
    if arguments.number("max_steps") == -1:
        arguments.carry({}, "max_steps")
    passes = arguments.number("num_train_epochs") or arguments.number("num_epochs")
    for name, key in {
        "save_steps": "checkpoint.save_every",
        "eval_steps": "evaluation.every",
    }.items():
        share = arguments.number(name)
        if share and share < 1 and passes and not arguments.number("max_steps"):
            part = (Fraction(share) * Fraction(passes)).limit_denominator(1000)
            arguments.carry({key: f"{part} epoch"}, name)
    for name in ("warmup_ratio", "warmup_steps"):
        warmup = arguments.number(name)
        if warmup == 0:
            arguments.carry({}, name)
        elif warmup and warmup < 1:
            arguments.carry({"optim.warmup_steps": share_text(warmup)}, name)


def combine_optimizer(arguments: Arguments, name: str) -> None:
    """Carry AdamW by any of its names; others are left to the person."""
    value = arguments.look_up(name)
    if value in _ADAMW:
        arguments.carry({"optim.kind": "adamw"}, name)
    elif value is not None:
        arguments.leave(
            "optim.kind: adamw or muon; moments in 8 bits are not supported, optim.moments: bf16 halves their memory",
            name,
        )


def _reports(arguments: Arguments) -> None:
    value = arguments.look_up("report_to")
    named = [str(each) for each in (value if isinstance(value, list) else [value])]
    if value is not None and all(each in (*_TRACKERS, "none", "console") for each in named):
        trackers = [each for each in named if each in _TRACKERS]
        arguments.carry({"tracking.trackers": trackers} if trackers else {}, "report_to")


def _evaluation(arguments: Arguments) -> None:
    """Carry nothing for the interval of evaluations that there are not."""
    for name in ("eval_strategy", "evaluation_strategy"):
        if str(arguments.look_up(name)).lower() in ("no", "false"):
            arguments.carry({}, name, "eval_steps")


def _targets(arguments: Arguments) -> None:
    """Carry the layers to adapt, matrices of experts among them. A pattern is left to the person."""
    names = [name for ending in _TARGETS if (name := arguments.name_of(ending))]
    values = [arguments.unsettled[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if re.search(r"[\\^$*+?()\[\]|]", str(value if isinstance(value, str) else "")):
            arguments.leave("model.lora.targets: last parts of layers' names, not a pattern", name)
            return
    if len(names) > 1 and all(isinstance(value, list) for value in values):
        arguments.carry(
            {"model.lora.targets": [each for value in values for each in value]}, *names
        )


def _hub(arguments: Arguments) -> None:
    """Carry the repository that gets the model. By default it gets each saved step."""
    names = ("push_to_hub", "hub_model_id", "hub_strategy")
    pushes, repository, strategy = map(arguments.look_up, names)
    if not pushes:
        arguments.carry({}, "push_to_hub")
        arguments.drop("it counts only with push_to_hub", *names, "hub_private_repo")
    elif "/" not in str(repository):
        arguments.leave("checkpoint.push_to_hub: OWNER/NAME; the owner is not given", *names)
    elif strategy in (None, *_PUSHED):
        settings = {
            "checkpoint.push_to_hub": repository,
            "checkpoint.hub_strategy": strategy or "every_save",
        }
        arguments.carry(settings, *names)
    else:
        arguments.carry({"checkpoint.push_to_hub": repository}, *names[:2])


def _quantization(arguments: Arguments, *, generates: bool) -> None:
    """Carry a base model in bitsandbytes' NF4 under an adapter, where nothing is generated."""
    for name in _QUANTIZED:
        value = arguments.look_up(name)
        if value is False:
            arguments.carry({}, name)
        elif value:
            is_4_bit = name != "load_in_8bit" and value in (4, True)
            reason = _why_plain(arguments) if is_4_bit else "model.lora.quantize_base has 4 bits"
            if generates:
                reason = "the generator has plain weights, so it would be another model"
            if reason:
                arguments.drop(reason, name)
                arguments.remarks.append(f"{name}: the base model takes its memory in bf16")
            else:
                arguments.carry({"model.lora.quantize_base": "nf4"}, name, *_NF4)
                for other, difference in _DIFFERENCES.items():
                    arguments.drop(difference, other)


def _why_plain(arguments: Arguments) -> str:
    """Return why a base model in 4 bits would not be what was asked for, or ""."""
    carried = [key for fate in arguments.fates for key in fate.settings or ()]
    if not any(key.startswith("model.lora.") for key in carried) and not any(
        map(arguments.look_up, ("lora_model_dir", "adapter_name_or_path"))
    ):
        return "only an adapter trains on a base model in 4 bits"
    if arguments.look_up("use_dora") or arguments.look_up("peft_use_dora"):
        return "DoRA reads plain weights"
    others = [
        value
        for name, known in _NF4.items()
        if (value := arguments.look_up(name)) not in (None, *known)
    ]
    return f"model.lora.quantize_base has bitsandbytes' nf4, and not {others[0]}" if others else ""


def lora_settings(arguments: Arguments, rank: str, alpha: float) -> dict[str, Any]:
    """Return the rank and scale of an adapter; `alpha` is the scale if none is given."""
    given = arguments.number("lora_alpha")
    return {
        "model.lora.rank": arguments.number(rank) or 0,
        "model.lora.alpha": alpha if given is None else given,
    }
