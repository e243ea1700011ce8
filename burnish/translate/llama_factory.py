"""Translate settings that depend on several of LLaMA-Factory's, and what it does without being told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config.foreign_names import marks_of
from burnish.errors import UsageError
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework, refuse_preferences
from burnish.translate.preferences import carry_losses, carry_numbers, weighted
from burnish.translate.trainer import combine_batch, combine_share, combine_trainer, lora_settings

_STAGES = ("sft", "pt")
_ON_PREFERENCES = {"dpo": "dpo", "kto": "dpo", "rm": "rm"}
"""Stages on preferences, and the methods here."""
_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
_LORA = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target",
    "use_dora",
    "use_rslora",
    "additional_target",
)
_DEFAULTS = {
    "finetuning_type": "lora",
    "cutoff_len": 2048,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
}
_RANK = 8


def _recognizes(arguments: Arguments) -> bool:
    named = any(word.startswith("llamafactory") for word in arguments.program)
    return named or not marks_of("llama_factory").isdisjoint(arguments.given)


def _generates(arguments: Arguments) -> bool:
    """Raise `UsageError` for a stage that is not supported."""
    stage = arguments.given.get("stage") or "sft"
    if stage not in (*_STAGES, *_ON_PREFERENCES):
        raise refuse_preferences("LLaMA-Factory", f"stage {stage}")
    kind = arguments.given.get("finetuning_type") or "lora"
    if kind not in ("lora", "full", "freeze"):
        raise UsageError(
            f"LLaMA-Factory's finetuning_type {kind} has no counterpart",
            have=kind,
            want="lora, full or freeze",
            do="choose one of these",
        )
    return False


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    return _DEFAULTS


def _combine(arguments: Arguments) -> None:
    _generates(arguments)
    _preferences(arguments)
    arguments.carry({}, "stage")
    if arguments.look_up("use_dft_loss"):
        arguments.carry({"method.loss": "dft"}, "use_dft_loss")
    elif not _preferred(arguments):
        carry_numbers(arguments, {"label_smoothing_factor": "method.label_smoothing"})
    _lora(arguments)
    _layers(arguments)
    combine_batch(arguments, "per_device_train_batch_size")
    combine_share(arguments, "val_size")
    combine_trainer(arguments, generates=False)
    _with_revision(arguments)
    arguments.remarks.append("LLaMA-Factory cuts examples over cutoff_len; Burnish leaves them out")


def _preferred(arguments: Arguments) -> str:
    return _ON_PREFERENCES.get(arguments.given.get("stage") or "", "")


def _preferences(arguments: Arguments) -> None:
    """Carry the loss of preferences of the stages dpo and kto."""
    stage = arguments.look_up("stage")
    if stage not in ("dpo", "kto"):
        return
    kind = "kto" if stage == "kto" else arguments.look_up("pref_loss") or "sigmoid"
    beta = arguments.number("pref_beta")
    share = arguments.number("pref_ftx") or 0.0
    losses = {"orpo": beta or 0.1, "nll": 1.0} if kind == "orpo" else weighted(kind)
    if share:
        losses["nll"] = share
    names = ["pref_loss", "pref_ftx", "stage"]
    carry_losses(arguments, losses, [*names, "pref_beta"] if kind == "orpo" else names)
    keys = {
        "pref_beta": "beta",
        "dpo_label_smoothing": "label_smoothing",
        "simpo_gamma": "simpo_gamma",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
    }
    carry_numbers(arguments, {name: f"method.{key}" for name, key in keys.items()})
    if reference := arguments.look_up("ref_model"):
        arguments.carry({"method.reference": reference}, "ref_model")


def _lora(arguments: Arguments) -> None:
    """Carry the adapter, whose alpha is twice its rank unless it is given."""
    if arguments.look_up("finetuning_type") == "freeze":
        arguments.leave(
            "model.train: expressions that are found in names of the layers to train, such as layers.(30|31).",
            "finetuning_type",
            *_FREEZE,
        )
        arguments.drop("it counts only with finetuning_type: lora", *_LORA)
        return
    if arguments.look_up("finetuning_type") == "full":
        arguments.carry({}, "finetuning_type")
        arguments.drop("it counts only with finetuning_type: lora", *_LORA)
        return
    if arguments.look_up("adapter_name_or_path"):
        arguments.carry({}, "finetuning_type")
        return
    arguments.imply({"lora_rank": _RANK})
    rank = arguments.number("lora_rank") or _RANK
    settings = lora_settings(arguments, "lora_rank", 2 * rank)
    arguments.carry(settings, "finetuning_type", "lora_rank", "lora_alpha")


def _layers(arguments: Arguments) -> None:
    """Carry layers' names, which stand in one text."""
    names = {
        "lora_target": "model.lora.targets",
        "additional_target": "model.lora.modules_to_save",
    }
    for name, key in names.items():
        layers = arguments.look_up(name)
        if isinstance(layers, str) and layers != "all":
            arguments.carry({key: [each.strip() for each in layers.split(",")]}, name)


def _with_revision(arguments: Arguments) -> None:
    model = arguments.look_up("model_name_or_path")
    revision = arguments.look_up("model_revision")
    if model and revision:
        arguments.carry(
            {"model.path": f"{model}@{revision}"}, "model_name_or_path", "model_revision"
        )


LLAMA_FACTORY = Framework(
    "LLaMA-Factory",
    table="llama_factory",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
    preferences=_preferred,
)
