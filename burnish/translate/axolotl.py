"""Translate settings that depend on several of axolotl's, and what axolotl does without being told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config.foreign_names import marks_of
from burnish.errors import UsageError
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework, refuse_preferences
from burnish.translate.preferences import carry_losses, carry_numbers, weighted
from burnish.translate.trainer import (
    combine_batch,
    combine_optimizer,
    combine_share,
    combine_trainer,
    lora_settings,
)
from burnish.translate.trl import combine_rewards, with_suffixes

_ONLINE = ("grpo", "gdpo")
_ON_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
_LORA = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_linear",
    "lora_target_parameters",
    "lora_modules_to_save",
)
_KINDS = ("alpaca", "sharegpt", "chat_template", "completion", "input_output")
"""Kinds of rows that are recognised here from their columns."""
_READ = (
    "path",
    "type",
    "split",
    "name",
    "data_files",
    "ds_type",
    "field",
    "field_messages",
    "field_chosen",
    "field_rejected",
    "revision",
)
"""What is read of an entry of `datasets`."""
_DEFAULTS = {
    "lr_scheduler": "cosine",
    "micro_batch_size": 1,
    "warmup_ratio": 0.03,
}
_OF_SFT = {"sequence_len": 512}
_OF_GRPO = {"num_generations": 8, "max_completion_length": 512}


def _recognizes(arguments: Arguments) -> bool:
    return "axolotl" in arguments.program or not marks_of("axolotl").isdisjoint(arguments.given)


def _generates(arguments: Arguments) -> bool:
    """Raise `UsageError` for training that is not supported."""
    method = arguments.given.get("rl")
    if arguments.given.get("process_reward_model"):
        raise refuse_preferences("axolotl", "process_reward_model")
    if method not in (None, False, *_ONLINE, *_ON_PREFERENCES):
        raise UsageError(
            f"axolotl's rl: {method} has no counterpart",
            have=method,
            want=f"supervised fine-tuning, {', '.join((*_ONLINE, *_ON_PREFERENCES))}",
            do="translate such a configuration",
        )
    return method in _ONLINE


def _preferred(arguments: Arguments) -> str:
    if arguments.given.get("reward_model"):
        return "rm"
    return "dpo" if arguments.given.get("rl") in _ON_PREFERENCES else ""


def _preferences(arguments: Arguments) -> None:
    """Carry the loss of preferences, which `rl` names."""
    carry_numbers(arguments, {"center_rewards_coefficient": "method.center"})
    arguments.carry({}, "reward_model")
    kind = arguments.look_up("rl")
    if kind not in _ON_PREFERENCES:
        return
    beta = next(filter(None, map(arguments.number, ("trl.beta", "rl_beta", "orpo_alpha"))), 0.1)
    alpha = arguments.number("cpo_alpha")
    match kind:
        case "dpo":
            types = arguments.look_up("dpo_loss_type") or "sigmoid"
            losses = weighted(types, arguments.look_up("dpo_loss_weights"))
        case "orpo":
            losses = {"orpo": beta, "nll": 1.0}
        case "simpo":
            losses = {"simpo": 1.0, "nll": 1.0 if alpha is None else alpha}
        case _:
            losses = {str(kind): 1.0}
    names = ["rl", "dpo_loss_type", "dpo_loss_weights", "cpo_alpha", "orpo_alpha"]
    carry_losses(arguments, losses, [*names, "trl.beta", "rl_beta"] if kind == "orpo" else names)
    arguments.carry({}, "precompute_ref_log_probs")
    keys = {
        "trl.beta": "beta",
        "rl_beta": "beta",
        "dpo_label_smoothing": "label_smoothing",
        "simpo_gamma": "simpo_gamma",
        "kto_desirable_weight": "desirable_weight",
        "kto_undesirable_weight": "undesirable_weight",
    }
    carry_numbers(arguments, {name: f"method.{key}" for name, key in keys.items()})


def _parts(arguments: Arguments) -> None:
    """Carry patterns of parameters that are trained, which are searched from the beginning of a name."""
    patterns = arguments.look_up("unfrozen_parameters")
    if isinstance(patterns, list) and not any("[:" in str(each) for each in patterns):
        from_start = [f"^{str(each).removeprefix('^')}" for each in patterns]
        arguments.carry({"model.train": from_start}, "unfrozen_parameters")


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    given = {**_DEFAULTS, **(_OF_GRPO if _generates(arguments) else _OF_SFT)}
    if "warmup_steps" in arguments.given:
        del given["warmup_ratio"]
    if arguments.given.get("hub_model_id"):
        given["push_to_hub"] = True
    endings = {name.rpartition(".")[2] for name in arguments.given}
    return {name: value for name, value in given.items() if name not in endings}


def _combine(arguments: Arguments) -> None:
    online = _generates(arguments)
    _preferences(arguments)
    _parts(arguments)
    arguments.carry(
        {"algorithm.advantage": "gdpo"} if arguments.look_up("rl") == "gdpo" else {}, "rl"
    )
    with_suffixes(arguments, "model.path", "base_model", "@", ["revision_of_model"])
    combine_rewards(arguments)
    _datasets(arguments)
    _lora(arguments)
    _intervals(arguments)
    if arguments.look_up("sample_packing"):
        arguments.remarks.append(
            "with sample_packing axolotl's micro-batch counts rows of sequence_len tokens, each of several examples; "
            "batch.examples counts examples, so raise it by how many fit into a row"
        )
    combine_batch(arguments, "micro_batch_size")
    combine_optimizer(arguments, "optimizer")
    combine_share(arguments, "val_set_size")
    combine_trainer(arguments, generates=online)
    if online:
        arguments.leave(
            "data.max_prompt_length and rollout.max_response_length: prompt and completion have separate limits",
            "sequence_len",
        )
        arguments.drop("data.train has the prompts of all passes", "dataset_prepared_path")


def _lora(arguments: Arguments) -> None:
    """Carry the adapter that `adapter` switches on."""
    if arguments.look_up("lora_target_linear") is True:
        arguments.drop("all linear layers are adapted", "lora_target_modules")
    adapter = arguments.look_up("adapter")
    if adapter not in ("lora", "qlora"):
        if not adapter:
            arguments.carry({}, "adapter")
            arguments.drop("it counts only with adapter: lora", *_LORA)
        return
    if arguments.look_up("lora_model_dir"):
        arguments.carry({}, "adapter")
        arguments.drop("the adapter that is given has it", *_LORA)
        return
    if arguments.number("lora_r"):
        arguments.carry(lora_settings(arguments, "lora_r", 1.0), "adapter", "lora_r", "lora_alpha")


def _intervals(arguments: Arguments) -> None:
    """Carry several evaluations and saves per epoch."""
    if not arguments.look_up("val_set_size") and not arguments.look_up("test_datasets"):
        arguments.drop("there is nothing to validate on", "evals_per_epoch", "eval_steps")
    keys = {"evals_per_epoch": "evaluation.every", "saves_per_epoch": "checkpoint.save_every"}
    for name, key in keys.items():
        count = arguments.number(name)
        if count:
            arguments.carry({key: "1 epoch" if count == 1 else f"1/{count:g} epoch"}, name)


def _datasets(arguments: Arguments) -> None:
    """Carry files and data sets' ids. What is said of their rows beyond a known kind is left to the person."""
    for name, key in {"datasets": "data.train", "test_datasets": "data.validation"}.items():
        entries = arguments.look_up(name)
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            continue
        settings: dict[str, Any] = {key: [_source(entry) for entry in entries]}
        for entry in entries:
            settings |= _columns(entry, bool(_preferred(arguments)))
            arguments.remarks.extend(f"{name}: {each}" for each in _unread(entry))
        arguments.carry(settings, name)


def _source(entry: Mapping[str, Any]) -> str:
    path = str(entry.get("path", ""))
    files = entry.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, str):
        return f"{path}/{files}" if path not in ("json", "csv", "parquet") else files
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    parts = [str(entry[part]) for part in ("name", "split") if entry.get(part)]
    is_cut = any("[" in part for part in parts)
    parts = [part.partition("[")[0] for part in parts]
    if not is_cut and parts == ["train"]:
        parts = []
    return f"{path}{revision}" + (f":{'/'.join(parts)}" if parts else "")


def _columns(entry: Mapping[str, Any], are_pairs: bool) -> dict[str, Any]:
    if are_pairs:
        keys = {
            "field_messages": "data.prompt_column",
            "field_chosen": "method.chosen_column",
            "field_rejected": "method.rejected_column",
        }
        return {key: entry[name] for name, key in keys.items() if name in entry}
    if entry.get("type") == "completion":
        return {"data.text_column": entry.get("field", "text")}
    if "field_messages" in entry:
        return {"data.messages_column": entry["field_messages"]}
    return {}


def _unread(entry: Mapping[str, Any]) -> list[str]:
    """Return sentences about what an entry says that is not carried."""
    path = entry.get("path")
    kind = entry.get("type")
    said = []
    if kind is not None and str(kind).partition(".")[0] not in _KINDS:
        said.append(
            f"{path} has rows of axolotl's type {kind}; here they are messages, prompt and completion, Alpaca's or ShareGPT's columns, or text"
        )
    if "[" in str(entry.get("split", "")):
        said.append(
            f"{path}: of its split {entry['split']} all rows are taken; data.max_rows limits them"
        )
    others = [str(name) for name in entry if name not in _READ]
    if others:
        said.append(
            f"{path}: {', '.join(others)} are not read; columns are recognised by their names"
        )
    return said


AXOLOTL = Framework(
    "axolotl",
    table="axolotl",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
    preferences=_preferred,
)
