"""Check settings against each other, before anything heavy is loaded. All problems are reported at once.

Bounds of single settings are in the schema; `burnish.train.preflight` checks that files exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from burnish.config.check_engine import of_degrees, of_engine, of_kind
from burnish.config.check_training import of_completions, of_examples, of_rl, of_sft
from burnish.config.problems import Problem, refusal
from burnish.config.schema import ModelConfig, OptimConfig, RunConfig, is_remote

Command = Literal["sft", "rl", "eval"]
"""What the configuration is for."""

_LARGEST_BETA_IN_BF16 = 0.996
_HOW_TO_RENDER = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""What `apply_chat_template` is told by Burnish itself."""


def check(config: RunConfig, command: Command, world: int = 1) -> None:
    """Raise `UsageError` with everything that keeps `command` from running on `world` processes."""
    problems = list(_of_run(config))
    problems += _of_model(config)
    problems += _of_data(config, command)
    problems += _of_optimizer(config)
    problems += of_engine(config, world)
    problems += _of_activations(config)
    if command == "sft":
        problems += of_sft(config, world // config.engine.sharing)
    if command == "rl":
        problems += of_rl(config, world // config.engine.sharing)
    problems += _of_evaluation(config, command)
    problems += _of_retention(config, command)
    problems += _of_mirror(config)
    if problems:
        raise refusal(problems, "this configuration")


def check_kind(config: RunConfig) -> None:
    """Raise `UsageError` for settings that this kind of engine does not have."""
    if problems := list(of_kind(config)):
        raise refusal(problems, "this configuration")


def check_layout(config: RunConfig, command: Literal["sft", "rl"], world: int) -> None:
    """Raise `UsageError` with what keeps the settings from dividing `world` processes, and a step's work among them."""
    shared_out = of_examples if command == "sft" else of_completions
    problems = list(of_degrees(config, world))
    problems += _of_activations(config)
    problems += shared_out(config, world // config.engine.sharing)
    if problems:
        raise refusal(problems, "this layout")


def _of_run(config: RunConfig) -> Iterator[Problem]:
    if config.name in ("", ".", "..") or any(each in config.name for each in "/\\\0"):
        yield Problem(
            "name cannot be used as a directory's name",
            have=repr(config.name),
            want="a plain name without slashes",
            do="set name, and output_dir for where it lies",
        )


def _of_model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if (model.path is None) == (model.fresh is None):
        yield Problem(
            "exactly one of model.path and model.fresh has to be set",
            have="neither" if model.path is None else f"both, model.path={model.path}",
            want="a model directory to start from, or a configuration to make a new model from",
            do="set model.path" if model.path is None else "remove model.path or model.fresh",
        )
    yield from _of_adapter(model)
    if model.fresh is not None and model.tokenizer is None:
        yield Problem(
            "model.fresh comes without a tokenizer",
            have="model.tokenizer: null",
            want="the directory of a tokenizer",
            do="set model.tokenizer",
        )


def _of_adapter(model: ModelConfig) -> Iterator[Problem]:
    given = model.lora.model_dump(exclude_defaults=True)
    others = [f"model.lora.{name}" for name in given if name not in ("path", "publish")]
    if model.lora.path and others:
        yield Problem(
            "model.lora.path brings its own rank, alpha and layers",
            have=f"model.lora.path: {model.lora.path}, and {', '.join(others)}",
            want="model.lora.path alone",
            do=f"remove {', '.join(others)}",
        )
    if model.adapter is None and given:
        yield Problem(
            "model.lora is set, and there is no adapter",
            have="model.lora.rank: 0",
            want="1 or more",
            do="set model.lora.rank=16, or remove model.lora",
        )
    if model.adapter and model.path is None:
        yield Problem(
            "model.lora needs a model that the adapter belongs to",
            have="a new model, of which only the adapter would be saved",
            want="model.path",
            do="set model.path to a model directory, or remove model.lora",
        )


def _of_data(config: RunConfig, command: Command) -> Iterator[Problem]:
    if command == "eval" and not config.data.validation:
        yield Problem(
            "there is nothing to evaluate on",
            have="data.validation: []",
            want="at least one file",
            do="set data.validation=[FILE]",
        )
    if command != "eval" and not config.data.train:
        yield Problem(
            "there is nothing to train on",
            have="data.train: []",
            want="at least one file",
            do="set data.train=[FILE]",
        )
    if taken := sorted(config.data.chat_template_kwargs.keys() & _HOW_TO_RENDER):
        yield Problem(
            "data.chat_template_kwargs sets what is no variable of a chat template",
            have=", ".join(taken),
            want="variables that the template itself reads",
            do=f"remove {', '.join(taken)}; model.chat_template sets another template",
        )
    if command == "rl" and not config.reward.given:
        yield Problem(
            "there is no reward to learn from",
            have="reward.functions: []",
            want="at least one reward function or reward model",
            do="set reward.functions='[{function: numeric}]', or module:function of your own",
        )


def _of_optimizer(config: RunConfig) -> Iterator[Problem]:
    if config.optim.moments == "bf16":
        yield from _of_narrow_moments(config.optim)


def _of_narrow_moments(optim: OptimConfig) -> Iterator[Problem]:
    """Refuse betas near 1: bf16 has 8 bits, so a number times 0.997 may round to itself and never fall."""
    if optim.kind != "adamw":
        yield Problem(
            "optim.moments are those of adamw",
            have=f"optim.moments: bf16, optim.kind: {optim.kind}",
            want="one of them",
            do="set optim.kind=adamw, or optim.moments=fp32",
        )
    if max(optim.betas) > _LARGEST_BETA_IN_BF16:
        yield Problem(
            "moments in bf16 cannot decay so slowly: rounding undoes each step's decay",
            have=f"optim.moments: bf16, optim.betas: {list(optim.betas)}",
            want=f"both of optim.betas at most {_LARGEST_BETA_IN_BF16}",
            do="set optim.betas=[0.9,0.95], or optim.moments=fp32",
        )


def _of_activations(config: RunConfig) -> Iterator[Problem]:
    if config.engine.activation_checkpointing != "selective":
        return
    if config.engine.activation_offload:
        yield Problem(
            "what selective checkpointing keeps cannot be moved to the host",
            have="engine.activation_offload: true, engine.activation_checkpointing: selective",
            want="one of them",
            do="set engine.activation_checkpointing=none or full, or engine.activation_offload=false",
        )
    if config.engine.compile:
        yield Problem(
            "selective checkpointing cannot see the operations of compiled layers",
            have="engine.compile: true, engine.activation_checkpointing: selective",
            want="one of them: the compiler itself chooses what is cheap to compute again",
            do="set engine.activation_checkpointing=none or full, or engine.compile=false",
        )


def _of_evaluation(config: RunConfig, command: Command) -> Iterator[Problem]:
    evaluation = config.evaluation
    if command != "eval" and evaluation.every and not config.data.validation:
        yield Problem(
            "there is nothing to validate on",
            have=f"evaluation.every: {evaluation.every}, data.validation: []",
            want="at least one file",
            do="set data.validation=[FILE], or evaluation.every=0",
        )
    if command != "sft" and evaluation.n > 1 and evaluation.temperature == 0:
        yield Problem(
            "evaluation.n completions at temperature 0 are all the same",
            have=f"evaluation.n: {evaluation.n}, evaluation.temperature: 0",
            want="one completion, or a temperature above 0",
            do="set evaluation.n=1, or evaluation.temperature=1.0",
        )


def _of_retention(config: RunConfig, command: Command) -> Iterator[Problem]:
    best, save_every = config.checkpoint.keep_best, config.checkpoint.save_every
    if (best.metric is None) != (best.mode is None):
        missing, given = ("mode", "metric") if best.mode is None else ("metric", "mode")
        yield Problem(
            f"checkpoint.keep_best.{given} is set without checkpoint.keep_best.{missing}",
            have=f"checkpoint.keep_best.{given}: {getattr(best, given)}",
            want="both, or neither",
            do="set checkpoint.keep_best.mode=min or max"
            if best.mode is None
            else "set checkpoint.keep_best.metric=val/NAME, or remove the mode",
        )
    if command != "eval" and best.metric is not None and not config.evaluation.every:
        yield Problem(
            "checkpoint.keep_best needs validations to compare",
            have="evaluation.every: 0",
            want="1 or more",
            do="set evaluation.every, or remove checkpoint.keep_best",
        )
    if save_every and config.checkpoint.keep_every % save_every:
        yield Problem(
            "checkpoint.keep_every keeps steps that are not saved",
            have=f"checkpoint.keep_every: {config.checkpoint.keep_every}, checkpoint.save_every: {save_every}",
            want="a multiple of checkpoint.save_every",
            do=f"set checkpoint.keep_every={-(-config.checkpoint.keep_every // save_every) * save_every}",
        )


def _of_mirror(config: RunConfig) -> Iterator[Problem]:
    mirror = config.checkpoint.mirror
    if mirror is not None and not is_remote(mirror):
        yield Problem(
            "checkpoint.mirror is no URL",
            have=f"checkpoint.mirror: {mirror}",
            want="hdfs://, s3://, gs:// or file://",
            do=f"set checkpoint.mirror=file://{Path(mirror).absolute()}",
        )
    if mirror is not None and is_remote(config.output_dir):
        yield Problem(
            "output_dir is a URL, and checkpoint.mirror is set",
            have=f"output_dir: {config.output_dir}, checkpoint.mirror: {mirror}",
            want="one of them: both say where the run is copied to",
            do="remove checkpoint.mirror, or set output_dir to a directory of this machine",
        )
    if config.checkpoint.mirror_keep_last and mirror is None and not is_remote(config.output_dir):
        yield Problem(
            "checkpoint.mirror_keep_last is set, and there is no mirror",
            have=f"checkpoint.mirror_keep_last: {config.checkpoint.mirror_keep_last}",
            want="checkpoint.mirror, or an output_dir that is a URL",
            do="set checkpoint.mirror, or remove checkpoint.mirror_keep_last",
        )
