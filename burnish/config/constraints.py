"""Check settings against each other before anything heavy is loaded.

`burnish.runs.preflight` checks that files exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from burnish.config.algorithm import FormulaConfig
from burnish.config.document import one_line
from burnish.config.schema import EngineConfig, ModelConfig, RunConfig, is_remote
from burnish.config.section import Section
from burnish.config.shares import exact_part
from burnish.errors import BurnishError, UsageError, count_text, together
from burnish.extend import ENGINES, ENVIRONMENTS, GENERATORS, TRACKERS, Table

_LARGEST_BETA_IN_BF16 = 0.996
"""bf16 has 8 significant bits, so a number times 0.997 may round back to itself and never fall."""
_RENDERING = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""Arguments of `apply_chat_template` that Burnish sets itself."""

_LEAST_SHARE = 0.001
"""Smallest share of an entry in a mixture. Its pattern has a period of 10,000 rows (`burnish.data.loader`)."""
_LONGEST_NAME = 200
"""Longest name of a run, in bytes. File systems allow 255, and names of files are made from the run's name."""

_Constraint = tuple[str, str, str]
"""If the first condition holds, the second must hold; the third text says why.

A condition is `SETTING=VALUE|VALUE`, or `SETTING`, which holds if the setting (or one in the section) differs from its default.
An empty condition never holds. FILE:NAME stands for every function or class that is not built in.
"""
_TABLES: Mapping[str, Table[Any]] = {
    "engine.kind": ENGINES,
    "rollout.engine": GENERATORS,
    "tracking.trackers": TRACKERS,
}
"""The settings that name extensions."""
_NOT_SELECTIVE = "engine.activation_checkpointing=none|full"
_UNGROUPED = "algorithm.advantage=reinforce_plus_plus|remax|gae|FILE:NAME"
_WHOLE = "rollout.environment.history=exact|appended"
_TORCH = "engine.kind=torch|FILE:NAME"
_MEGATRON = "engine.kind=megatron|FILE:NAME"
"""What another engine lacks is not known here, so it is not refused."""
_OF_ENGINE: Sequence[_Constraint] = (
    ("model.lora.dora", _TORCH, ""),
    ("model.lora.dropout", _TORCH, ""),
    ("model.lora.modules_to_save", _TORCH, ""),
    ("model.lora.quantize_base", _TORCH, ""),
    ("model.train_mtp", _MEGATRON, "transformers' models have no such layers"),
    ("model.train_mtp", "engine.pipeline_parallel=1", "the last stage has no embeddings"),
    ("model.train", _TORCH, "Megatron keeps main weights of trained parameters only"),
    ("engine.replicas", _TORCH, ""),
    ("engine.reshard_after_forward", _TORCH, ""),
    ("engine.reduce_each_microbatch", _TORCH, ""),
    ("engine.activation_offload", _TORCH, ""),
    ("engine.compile", _TORCH, ""),
    ("engine.parameter_offload", _TORCH, "its distributed optimizer steps on the device"),
    ("engine.megatron_sequence_parallel", _MEGATRON, ""),
    ("engine.pipeline_parallel", _MEGATRON, ""),
    ("engine.virtual_stages", _MEGATRON, ""),
    ("engine.expert_tensor_parallel", _MEGATRON, ""),
    ("engine.layers", _MEGATRON, ""),
    ("engine.megatron", _MEGATRON, ""),
    ("engine.megatron.pipeline_model_parallel_layout", "engine.pipeline_parallel", ""),
    ("engine.megatron.recompute_modules", "engine.activation_checkpointing=selective", ""),
    (
        "engine.layers=transformer_engine",
        "engine.precision=auto|bf16",
        "it multiplies fp32 in tf32",
    ),
    ("engine.virtual_stages", "engine.pipeline_parallel", "they are stages of a pipeline"),
)
_OF_ALL: Sequence[_Constraint] = (
    ("model.fresh", "model.tokenizer", "a new model comes without one"),
    ("model.lora", "model.path", "only the adapter of a new model would be saved"),
    ("model.train_mtp", "model.path", "a new model has no such layer"),
    ("model.train_mtp", "model.lora.rank=0", "an adapter leaves the model as it is"),
    ("model.train_mtp", "model.lora.path=null", "an adapter leaves the model as it is"),
    ("model.lora.dora", "engine.tensor_parallel=1", "it needs the norms of whole rows"),
    ("model.lora.dora", "engine.compile=false", "it computes norms of weights in each pass"),
    ("model.lora.dora", "model.lora.publish=merged", "A and B are not all that changes"),
    ("model.lora.dora", "model.lora.dropout=0.0", "it is not drawn for the rescaled output"),
    ("model.lora.dropout", "engine.compile=false", "it draws between compiled pieces"),
    ("model.lora.quantize_base", "model.lora.dora=false", "DoRA reads plain weights"),
    ("model.lora.quantize_base", "engine.tensor_parallel=1", "it divides plain weights only"),
    ("model.lora.quantize_base", "engine.compile=false", "bitsandbytes' products are not compiled"),
    ("model.lora.modules_to_save", "engine.tensor_parallel=1", "it divides no such layers"),
    ("model.lora.modules_to_save", "engine.expert_parallel=1", "experts may be among them"),
    ("model.lora.modules_to_save", "model.lora.publish=merged", "A and B are not all that changes"),
    (
        "model.lora",
        "engine.router_bias_update_rate=0.0",
        "an adapter leaves the biases as they are",
    ),
    ("optim.moments=bf16", "optim.kind=adamw", "muon has no such moments"),
    ("engine.parameter_offload", "optim.kind=adamw", "Muon multiplies matrices on the device"),
    ("engine.parameter_offload", "engine.tensor_parallel=1", "it divides weights on the device"),
    ("engine.parameter_offload", "model.lora.rank=0", "adapters are merged on the device"),
    ("engine.parameter_offload", "model.lora.path=null", "adapters are merged on the device"),
    ("data.chat_template_name", "model.chat_template=null", "a file has one template"),
    ("checkpoint.keep_best.metric", "checkpoint.keep_best.mode", ""),
    ("checkpoint.keep_best.mode", "checkpoint.keep_best.metric", ""),
    ("checkpoint.hub_strategy", "checkpoint.push_to_hub", ""),
)
_OF_ACTIVATIONS: Sequence[_Constraint] = (
    ("engine.activation_offload", _NOT_SELECTIVE, "selective keeps tensors on the device"),
    ("engine.compile", _NOT_SELECTIVE, "selective cannot see the operations of compiled layers"),
)
_OF_TRAINING: Sequence[_Constraint] = (
    ("data.weights", "steps", "a mixture has no epochs"),
    ("data.curriculum=measured", "steps", "its epochs leave rows out"),
    ("data.curriculum=measured", "data.weights=[]", "a mixture draws by its weights alone"),
    ("data.streaming", "steps", "streamed rows are not counted, so an epoch has no known end"),
    ("data.streaming", "data.curriculum=null", "rows cannot be sorted before all are read"),
    ("data.max_rows", "data.streaming=0", "streamed rows are not counted"),
    ("data.streaming", "data.overlong=drop", "a long row is found when it is drawn"),
    ("distributed.check_replicas_every", "engine.replicas", "else there are no copies"),
    ("evaluation.every", "data.validation", "there is nothing to validate on"),
    ("checkpoint.keep_best.metric", "evaluation.every", "only validated steps are compared"),
    ("tracking.torch_profiler", "tracking.profile_steps", "it runs in these steps only"),
    ("optim.schedule=wsd", "optim.decay_steps", ""),
    ("optim.decay_steps", "optim.schedule=wsd", ""),
    ("optim.min_lr_ratio", "optim.schedule=linear|cosine|wsd", "a constant rate does not decay"),
)
_OF_SFT: Sequence[_Constraint] = (
    ("data.curriculum=measured", "", "examples have no rewards; a column of numbers has an order"),
    (
        "engine.offload_during_rollout",
        "",
        "nothing is generated; engine.optimizer_offload saves memory here",
    ),
)
_OF_SAMPLING: Sequence[_Constraint] = (
    ("model.lora.quantize_base", "", "a generator has plain weights, so it would be another model"),
    ("evaluation.temperature=0.0", "evaluation.n=1", "all completions would be the same"),
    ("rollout.engine=vllm|sglang", "rollout.place=child|servers", "it needs its own process"),
    ("rollout.tensor_parallel", "rollout.engine=vllm|sglang|FILE:NAME", ""),
    ("rollout.servers", "rollout.place=servers", ""),
    ("rollout.engine=sglang", "model.lora.publish=merged", "it loads whole models only"),
    ("rollout.environment", "rollout.in_flight=false", "no save holds half a conversation"),
    ("rollout.environment.pace=free", "rollout.engine=builtin", "it adds turns to those that run"),
    (
        "rollout.environment.pace=free",
        "rollout.place=inside",
        "it asks for turns between two steps",
    ),
    *(
        (each, "rollout.engine=builtin|vllm|sglang|FILE:NAME", "an endpoint gives no log-probs")
        for each in ("rollout.environment.agent", "rollout.environment.verifiers")
    ),
)
_OF_ENDPOINTS: Sequence[_Constraint] = (
    ("rollout.engine=openai", "rollout.url", ""),
    ("rollout.engine=openai", "rollout.model", ""),
    ("rollout.engine=openai", "reward.models=[]", "there is no engine to run them"),
    ("rollout.engine=openai", "rollout.place=inside", "an endpoint runs elsewhere"),
    ("rollout.url", "rollout.engine=openai", ""),
    ("rollout.model", "rollout.engine=openai", ""),
)
# Without an environment, whose conversations go on in token ids.
_OF_ENDPOINTS_ALONE: Sequence[_Constraint] = (
    ("rollout.engine=openai", "reward.functions", "an endpoint computes no losses"),
    ("rollout.engine=openai", "model.chat_template=null", "the endpoint has its own"),
)
_OF_REWARDS_ALONE: Sequence[_Constraint] = (
    ("rollout.n=1", _UNGROUPED, "others compare completions, so one alone gets 0"),
)
_OF_RL: Sequence[_Constraint] = (
    ("model.train_mtp", "", "only burnish sft trains layers for multi-token prediction"),
    ("rollout.engine=openai", "", "its weights cannot be set; burnish eval can use it"),
    ("rollout.temperature=0.0", "", "all completions would be the same"),
    ("rollout.n=1", "algorithm.dynamic_sampling.enabled=false", "one reward has no variance"),
    ("algorithm.dynamic_sampling.part", "algorithm.dynamic_sampling.enabled=true", ""),
    ("algorithm.old_logprobs=rollout", "rollout.temperature=1.0", "they are for temperature 1"),
    ("algorithm.policy_loss=clip_cov|kl_cov", "algorithm.top_entropy=null", "both select tokens"),
    ("algorithm.kl.target", "algorithm.kl.place=reward", "it adapts the KL term in the reward"),
    ("algorithm.kl.target", "algorithm.kl.coef", "it adapts this coefficient"),
    ("algorithm.mismatch_cap", "algorithm.old_logprobs=recompute", "else there is no mismatch"),
    ("algorithm.mismatch_reject", "algorithm.old_logprobs=recompute", "else there is no mismatch"),
    ("algorithm.mismatch_level", "algorithm.mismatch_cap", ""),
    ("algorithm.mismatch_low", "algorithm.mismatch_reject", "they bound what it keeps"),
    ("algorithm.mismatch_high", "algorithm.mismatch_reject", "they bound what it keeps"),
    ("algorithm.advantage=gae|reinforce_plus_plus", _WHOLE, "turns may be sequences of their own"),
    ("critic", "algorithm.advantage=gae", "no other advantage uses a critic"),
    (
        "rollout.engine=sglang",
        "algorithm.router_replay=none|recompute",
        "it does not record the experts that it chose",
    ),
    ("rollout.in_flight", "rollout.ahead", "else nothing is generated during training"),
    (
        "rollout.in_flight",
        "rollout.place=child|servers",
        "inside, generating and training take turns",
    ),
)


def refuse(problems: Sequence[BurnishError], subject: str = "this configuration") -> None:
    """Raise all problems of `subject` as one error, if there are any."""
    if problems:
        raise together(problems, subject)


def check_engine(config: RunConfig) -> None:
    """Raise `UsageError` for settings that this kind of engine lacks."""
    refuse([*_of_extensions(config), *_broken(config, _OF_ENGINE)])


def layout_problems(config: RunConfig, world: int) -> Iterator[BurnishError]:
    """Yield why `world` processes, or the activations of such a layout, cannot be divided."""
    yield from _of_degrees(config.engine, world)
    yield from _broken(config, _OF_ACTIVATIONS)


def missing_files(config: RunConfig, setting: str, purpose: str) -> Iterator[BurnishError]:
    """Yield an error if `setting` names no file to `purpose` on."""
    if not _given(config, setting):
        yield UsageError(
            f"there is nothing to {purpose} on",
            have=f"{setting}: []",
            want="at least one file",
            do=f"set {setting}=FILE",
        )


def _broken(config: RunConfig, constraints: Sequence[_Constraint]) -> Iterator[BurnishError]:
    for when, requires, why in constraints:
        if not _holds(config, when) or (requires and _holds(config, requires)):
            continue
        settings, (needed, values) = _given(config, when), _parts(requires)
        if not needed:
            name, _ = _parts(when)
            default = one_line(_default(config, name))
            yield UsageError(
                f"{name} cannot be {one_line(_value(config, name))} here: {why}",
                have=_have(config, name),
                want=f"another value, such as {default}",
                do=f"set {name}={default}",
            )
            continue
        subject = " and ".join(settings)
        wanted = " or ".join(values)
        first = f"set {needed}={values[0]}" if values else f"set {needed}"
        last = "change" if _parts(when)[1] else "remove"
        yield UsageError(
            f"{subject} {'needs' if len(settings) == 1 else 'need'} {needed}"
            + (f" to be {wanted}" if values else "")
            + (f": {why}" if why else ""),
            have=_have(config, *settings, needed),
            want=f"{needed}: {wanted}" if values else f"a value of {needed}",
            do=f"{first}, or {last} {subject}",
        )


def _parts(condition: str) -> tuple[str, list[str]]:
    name, _, values = condition.partition("=")
    return name, values.split("|") if values else []


def _holds(config: RunConfig, condition: str) -> bool:
    name, values = _parts(condition)
    if not values:
        return bool(_given(config, name))
    text = one_line(_value(config, name))
    table = _TABLES.get(name)
    is_own = ":" in text if table is None else text not in table.builtins
    return text in values or (is_own and "FILE:NAME" in values)


def _given(config: RunConfig, condition: str) -> list[str]:
    """Return the settings of a condition or section that are not their defaults."""
    name, values = _parts(condition)
    value = _value(config, name)
    if isinstance(value, Section):
        return [f"{name}.{field}" for field in value.model_dump(exclude_defaults=True)]
    return [name] if values or value != _default(config, name) else []


def _default(config: RunConfig, name: str) -> Any:
    above, _, last = name.rpartition(".")
    section = _value(config, above) if above else config
    return section.__class__.model_fields[last].default


def _value(config: RunConfig, name: str) -> Any:
    value: Any = attrgetter(name)(config)
    return value.name if isinstance(value, FormulaConfig) else value


def _have(config: RunConfig, *names: str) -> str:
    return ", ".join(f"{name}: {one_line(_value(config, name))}" for name in names)


def _of_extensions(config: RunConfig) -> Iterator[BurnishError]:
    for setting, table in _TABLES.items():
        value = _value(config, setting)
        for name in [value] if isinstance(value, str) else value:
            try:
                table.target(name, setting)
            except UsageError as error:
                yield error


def setting_problems(config: RunConfig, world: int | None) -> Iterator[BurnishError]:
    """Yield what any method refuses on `world` processes (None: on any number)."""
    if world is not None:
        yield from _of_degrees(config.engine, world)
    yield from _of_extensions(config)
    yield from _broken(config, (*_OF_ENGINE, *_OF_ACTIVATIONS, *_OF_ALL))
    yield from _of_places(config)
    yield from _of_held_out(config)
    if config.optim.moments == "bf16" and max(config.optim.betas) > _LARGEST_BETA_IN_BF16:
        yield UsageError(
            "moments in bf16 cannot decay so slowly: rounding undoes each step's decay",
            have=_have(config, "optim.moments", "optim.betas"),
            want=f"both of optim.betas at most {_LARGEST_BETA_IN_BF16}",
            do="set optim.betas=[0.9,0.95], or optim.moments=fp32",
        )
    if arguments := ", ".join(sorted(config.data.chat_template_kwargs.keys() & _RENDERING)):
        yield UsageError(
            "data.chat_template_kwargs sets arguments that are not variables of a chat template",
            have=arguments,
            want="variables that the template itself reads",
            do=f"remove {arguments}; model.chat_template sets another template",
        )


def model_problems(model: ModelConfig) -> Iterator[BurnishError]:
    """Yield why no model, or no adapter, follows from these settings."""
    lora = model.lora.model_dump(exclude_defaults=True)
    own = ("path", "publish", "dropout", "quantize_base")
    others = ", ".join(f"model.lora.{name}" for name in lora if name not in own)
    if (model.path is None) == (model.fresh is None):
        yield UsageError(
            "exactly one of model.path and model.fresh has to be set",
            have="neither" if model.path is None else f"both, model.path={model.path}",
            want="a model directory to start from, or a configuration to make a new model from",
            do="set model.path" if model.path is None else "remove model.path or model.fresh",
        )
    if model.lora.path and others:
        yield UsageError(
            "model.lora.path brings its own rank, alpha and layers",
            have=f"model.lora.path: {model.lora.path}, and {others}",
            want="model.lora.path alone",
            do=f"remove {others}",
        )
    experts = [target for target in model.lora.targets if "." in target]
    if model.lora.dropout and experts:
        yield UsageError(
            "PEFT's adapters of experts have no dropout",
            have=f"model.lora.dropout: {model.lora.dropout}, model.lora.targets: {', '.join(experts)}",
            want="dropout, or experts among the targets",
            do=f"set model.lora.dropout=0, or take {', '.join(experts)} out of model.lora.targets",
        )
    if model.lora.dora and experts:
        yield UsageError(
            "PEFT's adapters of experts have no DoRA",
            have=f"model.lora.dora: true, model.lora.targets: {', '.join(experts)}",
            want="DoRA, or experts among the targets",
            do=f"set model.lora.dora=false, or take {', '.join(experts)} out of model.lora.targets",
        )
    if model.adapter and model.train:
        yield UsageError(
            "model.train and model.lora exclude each other: an adapter leaves the model as it is",
            have=f"model.train: {', '.join(model.train)}",
            want="one of them",
            do="remove model.train, or name what trains whole beside the adapter in model.lora.modules_to_save",
        )
    if model.adapter is None and lora:
        yield UsageError(
            "model.lora is set, and there is no adapter",
            have="model.lora.rank: 0",
            want="1 or more",
            do="set model.lora.rank=16, or remove model.lora",
        )


def _of_places(config: RunConfig) -> Iterator[BurnishError]:
    checkpoint = config.checkpoint
    mirror = config.checkpoint.mirror
    name = config.run_name
    plain = name not in ("", ".", "..") and not any(each in name for each in "/\\\0")
    if not plain or len(os.fsencode(name)) > _LONGEST_NAME:
        yield UsageError(
            "name cannot be used as a directory's name",
            have=repr(name) if len(name) <= _LONGEST_NAME else f"{len(name)} characters",
            want=f"a plain name without slashes, of at most {_LONGEST_NAME} bytes",
            do="set name; output_dir says where the directory is",
        )
    if mirror is not None and not is_remote(mirror):
        yield UsageError(
            "checkpoint.mirror is not a URL",
            have=f"checkpoint.mirror: {mirror}",
            want="hdfs://, s3://, gs:// or file://",
            do=f"set checkpoint.mirror=file://{Path(mirror).absolute()}",
        )
    if mirror is not None and is_remote(config.output_dir):
        yield UsageError(
            "output_dir is a URL, and checkpoint.mirror is set",
            have=_have(config, "output_dir", "checkpoint.mirror"),
            want="one of them: both say where the run is copied to",
            do="remove checkpoint.mirror, or set output_dir to a directory of this machine",
        )
    if config.resume == "fresh" and config.mirror_url is not None:
        yield UsageError(
            "resume is fresh, and the mirror may hold steps of this name",
            have=f"the mirror {config.mirror_url}",
            want="a name that is free there",
            do="set name=NAME, or remove resume",
        )
    if checkpoint.mirror_keep_last and config.mirror_url is None:
        yield UsageError(
            "checkpoint.mirror_keep_last is set, and there is no mirror",
            have=_have(config, "checkpoint.mirror_keep_last"),
            want="checkpoint.mirror, or an output_dir that is a URL",
            do="set checkpoint.mirror, or remove checkpoint.mirror_keep_last",
        )
    interval = checkpoint.save_every
    if isinstance(interval, str) and interval != "auto" and checkpoint.keep_every:
        yield UsageError(
            "checkpoint.keep_every counts steps, and the run saves by epochs",
            have=_have(config, "checkpoint.keep_every", "checkpoint.save_every"),
            want="checkpoint.save_every in steps, or checkpoint.keep_last",
            do="set checkpoint.keep_last=N instead of checkpoint.keep_every",
        )
    if isinstance(interval, int) and interval and checkpoint.keep_every % interval:
        next_saved = -(-checkpoint.keep_every // interval) * interval
        yield UsageError(
            "checkpoint.keep_every keeps steps that are not saved",
            have=_have(config, "checkpoint.keep_every", "checkpoint.save_every"),
            want="a multiple of checkpoint.save_every",
            do=f"set checkpoint.keep_every={next_saved}",
        )


def _of_degrees(engine: EngineConfig, world: int) -> Iterator[BurnishError]:
    sharing = engine.sharing
    stage = world // engine.pipeline_parallel
    if world % sharing:
        names = ["sequence_parallel", "tensor_parallel"]
        names += ["pipeline_parallel"] if engine.pipeline_parallel > 1 else []
        degrees = ", ".join(f"engine.{name}: {getattr(engine, name)}" for name in names)
        yield UsageError(
            "the processes cannot be divided into groups that share a micro-batch",
            have=f"{degrees}, {world} processes",
            want="a number of processes that their product divides",
            do=f"make the product {_near(sharing, world)}, or start {sharing} processes or a multiple: "
            f"torchrun --nproc-per-node {sharing} -m burnish ...",
        )
    elif world // sharing % engine.replicas:
        groups = f" in groups of {sharing}" if sharing > 1 else ""
        yield UsageError(
            "the copies of the model do not divide the processes",
            have=f"engine.replicas: {engine.replicas}, {world} processes{groups}",
            want="a whole number of processes for each copy",
            do=f"set engine.replicas={_near(engine.replicas, world // sharing)}, or start another number of processes",
        )
    elif stage // engine.replicas % engine.expert_sharing:
        tensor = engine.expert_sharing // engine.expert_parallel
        copy = stage // engine.replicas
        within = "; engine.expert_tensor_parallel=1 leaves experts whole"
        yield UsageError(
            "the experts cannot be divided among the processes that hold a layer once",
            have=f"engine.expert_parallel: {engine.expert_parallel} × {tensor} processes for each expert's matrices, "
            f"{copy} processes",
            want="a product that divides them",
            do=f"make the product {_near(engine.expert_sharing, copy)}, or start another number of processes"
            + (within if engine.kind == "megatron" else ""),
        )


def generator_problems(config: RunConfig, world: int) -> Iterator[BurnishError]:
    """Yield why `world` processes cannot share generators."""
    devices = config.rollout.tensor_parallel
    if config.rollout.place == "child" and world % devices:
        yield UsageError(
            "the processes cannot be divided into groups that share a generator",
            have=f"rollout.tensor_parallel: {devices}, {world} processes",
            want="a number that divides them",
            do=f"set rollout.tensor_parallel={_near(devices, world)}, or start another number of processes",
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _near(number: int, total: int) -> str:
    near = sorted(divisors(total), key=lambda each: abs(each - number))[:2]
    return " or ".join(map(str, sorted(near)))


def training_problems(config: RunConfig, waiting: int = 0) -> Iterator[BurnishError]:
    """Yield why no method can train; the learning rate's schedule begins after `waiting` steps."""
    yield from _broken(config, _OF_TRAINING)
    if config.data.weights and len(config.data.weights) != len(config.data.train):
        yield UsageError(
            "data.weights does not fit data.train",
            have=f"{count_text(len(config.data.weights), 'weight')}, data.train: {config.data.train}",
            want="a weight for each entry of data.train",
            do="give as many weights as entries",
        )
    elif config.data.weights and min(config.data.weights) < _LEAST_SHARE * sum(config.data.weights):
        yield UsageError(
            "data.weights would hardly ever draw one of the entries",
            have=f"data.weights: {config.data.weights}",
            want=f"each at least {_LEAST_SHARE:g} of their sum",
            do="raise the smallest weight, or leave its entry out of data.train",
        )
    yield from _of_intervals(config)
    yield from _of_ramps(config, waiting)


def _of_held_out(config: RunConfig) -> Iterator[BurnishError]:
    """Yield why no share of the training data can be held out."""
    data = config.data
    shares = [each for each in data.validation if re.fullmatch(r"[\d.]+%|0?\.\d+", each)]
    if shares and (not data.held_out or not 0 < exact_part(data.held_out, 100) < 100):
        yield UsageError(
            "data.validation is no share of the training data",
            have=_have(config, "data.validation"),
            want="one share, more than 0% and less than 100%, such as 5%; or files alone",
            do="set data.validation=5%, or name files",
        )
    elif shares and data.streaming:
        yield UsageError(
            "no share of streamed rows can be held out: they are not counted before they are drawn",
            have=_have(config, "data.validation", "data.streaming"),
            want="a file of its own for validation, or rows that are not streamed",
            do="set data.validation=FILE, or data.streaming=0",
        )


def _of_intervals(config: RunConfig) -> Iterator[BurnishError]:
    """Yield settings that count in epochs where no epoch has a known length."""
    endless = ["data.streaming", "data.weights"]
    endless += ["data.curriculum"] if config.data.curriculum == "measured" else []
    given = [name for name in endless if _given(config, name)]
    for name in ("evaluation.every", "checkpoint.save_every"):
        if given and str(_value(config, name)).endswith(("epoch", "epochs")):
            yield UsageError(
                f"{name} counts epochs, and with {given[0]} an epoch has no known length",
                have=_have(config, name, given[0]),
                want="a number of steps",
                do=f"set {name}=STEPS",
            )


def _of_ramps(config: RunConfig, waiting: int) -> Iterator[BurnishError]:
    """Yield why warm-up and decay do not fit into the steps after `waiting` ones."""
    ramps = [config.optim.warmup_steps, config.optim.decay_steps]
    if config.steps is None:
        steps = 100
        ramps = [each for each in ramps if isinstance(each, str)]
    else:
        steps = config.steps - waiting
    needed = sum(exact_part(each, steps) for each in ramps)
    if needed > steps > 0:
        names = ["optim.warmup_steps", "optim.decay_steps", "steps"]
        names += ["critic.warmup_steps"] if waiting else []
        most = "100%" if config.steps is None else f"{steps} steps"
        yield UsageError(
            "the learning rate's warm-up and decay are longer than the run",
            have=_have(config, *(name for name in names if _given(config, name))),
            want=f"at most {most} of warm-up and decay together",
            do="shorten them"
            if any(isinstance(each, str) for each in ramps)
            else f"shorten them, or set steps={needed + waiting} or more",
        )


def sampling_problems(config: RunConfig) -> Iterator[BurnishError]:
    """Yield why completions cannot be drawn, by a generator or an endpoint."""
    alone = () if config.rollout.environment.target else _OF_ENDPOINTS_ALONE
    yield from _broken(config, (*_OF_SAMPLING, *_OF_ENDPOINTS, *alone))
    yield from _of_environment(config)


def _of_environment(config: RunConfig) -> Iterator[BurnishError]:
    """Yield an error for settings of conversations without an environment, for two environments, and for limits that agents have themselves."""
    named = [f"rollout.environment.{name}" for name in config.rollout.environment.named]
    given = _given(config, "rollout.environment")
    limits = ("max_calls", "max_reply_tokens", "max_unreadable_turns", "pace")
    unused = [name for name in given if name.endswith(limits)]
    if unused and config.rollout.environment.has_agents:
        yield UsageError(
            "an agent makes its calls itself, in waves, so these settings change nothing",
            have=", ".join(unused),
            do="remove them; rollout.environment.max_turns limits its requests",
        )
    if len(named) > 1 or (given and not named):
        yield UsageError(
            f"rollout.environment names {'two environments' if named else 'no environment'}",
            have=", ".join(named or given),
            want=f"one of the settings function, {', '.join(ENVIRONMENTS)}",
            do="set one of them" if named else "set one of them, or remove rollout.environment",
        )


def example_problems(config: RunConfig) -> Iterator[BurnishError]:
    """Yield settings that need completions and rewards, where a method trains on fixed examples."""
    yield from _broken(config, _OF_SFT)


def reward_problems(config: RunConfig) -> Iterator[BurnishError]:
    """Yield why a policy cannot learn from rewards."""
    yield from _broken(config, (*_OF_RL, *_OF_SAMPLING))
    if not config.distill.teachers:
        yield from _broken(config, _OF_REWARDS_ALONE)
    yield from _of_environment(config)
    if not (config.scores or config.distill.teachers):
        yield UsageError(
            "there is no reward to learn from",
            have="reward.functions: []",
            want="at least one reward function, reward model, an environment that rewards, or a teacher in distill.teachers",
            do="set reward.functions=numeric, or file.py:function of your own",
        )
    weights = [each.weight for each in config.reward.functions]
    weights += [model.weight for model in config.reward.models]
    others = config.distill.teachers or config.rollout.environment.target
    if weights and not (any(weights) or others):
        yield UsageError(
            "the reward is 0 for every completion, so there is nothing to learn",
            have="a weight of 0 for each of reward.functions and reward.models",
            want="another weight for at least one of them",
            do="set its weight",
        )
    if config.algorithm.overlong.buffer > config.rollout.max_response_length:
        yield UsageError(
            "algorithm.overlong.buffer is longer than a completion",
            have=_have(config, "algorithm.overlong.buffer", "rollout.max_response_length"),
            want=f"at most {config.rollout.max_response_length}",
            do="lower algorithm.overlong.buffer",
        )
    part = config.algorithm.dynamic_sampling.part
    names = config.reward.part_names
    if part is not None and part not in names and part.rpartition("/")[0] not in names:
        yield UsageError(
            "algorithm.dynamic_sampling.part is not a part of the reward",
            have=_have(config, "algorithm.dynamic_sampling.part"),
            want=f"one of {', '.join(names)}",
            do="set algorithm.dynamic_sampling.part to one of them, or remove it",
        )
    if config.data.curriculum == "measured" and config.rollout.n == 1:
        yield UsageError(
            "data.curriculum measured compares the completions of a prompt, and there is one",
            have=_have(config, "data.curriculum", "rollout.n"),
            want="2 or more",
            do="raise rollout.n, or remove data.curriculum",
        )
    redraws = {
        "data.curriculum": config.data.curriculum == "measured",
        "algorithm.dynamic_sampling.enabled": config.algorithm.dynamic_sampling.enabled,
        "algorithm.advantage": config.algorithm.advantage.name == "remax",
    }
    name = next((name for name, redraws_now in redraws.items() if redraws_now), None)
    if name and config.reward.models and config.rollout.place != "inside":
        yield UsageError(
            f"reward models judge completions from other processes a whole step at a time, and {name} needs rewards before",
            have=f"{_have(config, 'rollout.place', name)}, reward.models",
            want="rollout.place: inside",
            do=f"set rollout.place=inside, or use reward functions alone, or remove {name}",
        )
    if config.steps is not None and config.critic.warmup_steps >= config.steps:
        yield UsageError(
            "the policy would wait for the critic in all steps of the run",
            have=_have(config, "critic.warmup_steps", "steps"),
            want=f"critic.warmup_steps less than {config.steps}",
            do="lower critic.warmup_steps, or raise steps",
        )


def batch_problems(config: RunConfig, shares: int) -> Iterator[BurnishError]:
    """Yield why `batch.examples` cannot be divided into `shares`."""
    examples = config.batch.examples
    longest = config.data.max_length
    if longest is not None and not config.batch.is_auto and longest > config.microbatch_tokens:
        yield UsageError(
            "the longest example does not fit into a micro-batch",
            have=f"data.max_length: {longest}, {_budget(config)}",
            want=f"data.max_length at most {config.microbatch_tokens}",
            do=f"set batch.tokens_per_device={_per_device(longest, config)}, or lower data.max_length",
        )
    if examples < shares:
        yield UsageError(
            "a step has fewer examples than there are processes",
            have=f"batch.examples: {examples}, {_processes(shares, config)}",
            want=f"{shares} or more",
            do=f"set batch.examples={shares}, or start fewer processes",
        )


def rollout_problems(config: RunConfig, shares: int) -> Iterator[BurnishError]:
    """Yield why the completions of `batch.prompts` cannot be divided into `shares`."""
    prompts = config.batch.prompts
    parts = config.batch.minibatches
    sequences = prompts // parts * config.rollout.n
    if prompts % parts:
        whole = prompts - prompts % parts
        sizes = " or ".join(str(each) for each in (whole, whole + parts) if each)
        around = [max(each for each in divisors(prompts) if each < parts)]
        around += [each for each in divisors(prompts) if each > parts][:1]
        yield UsageError(
            f"batch.prompts {prompts} does not divide by batch.minibatches {parts}",
            have=f"{prompts} / {parts} = {prompts / parts:.2f} prompts per optimizer step",
            want="a whole number",
            do=f"set batch.prompts to {sizes}, or batch.minibatches to {' or '.join(map(str, around))}",
        )
    elif sequences < shares:
        yield UsageError(
            "an optimizer step has fewer completions than there are processes",
            have=f"batch.prompts / batch.minibatches × rollout.n = {sequences}, {_processes(shares, config)}",
            want=f"{shares} or more",
            do="raise batch.prompts or rollout.n, or start fewer processes",
        )
    response = config.rollout.max_response_length
    prompt = config.data.max_prompt_length
    needed = config.longest_completed
    if not config.batch.is_auto and needed > config.microbatch_tokens:
        first = "a prompt of 1" if prompt is None else f"data.max_prompt_length: {prompt}"
        yield UsageError(
            "the longest prompt and completion do not fit into a micro-batch",
            have=f"{first} + rollout.max_response_length: {response} = {needed} tokens, {_budget(config)}",
            want=f"at most {config.microbatch_tokens} together",
            do=f"set batch.tokens_per_device={_per_device(needed, config)} or more, or lower the lengths",
        )


def _budget(config: RunConfig) -> str:
    device = config.batch.tokens_per_device
    ranks = config.engine.sequence_parallel
    shared = f" × engine.sequence_parallel: {ranks}" if ranks > 1 else ""
    return f"batch.tokens_per_device: {device}{shared}"


def _per_device(tokens: int, config: RunConfig) -> int:
    return -(-tokens // config.engine.sequence_parallel)


def _processes(shares: int, config: RunConfig) -> str:
    sharing = config.engine.sharing
    return f"{shares} groups of {sharing} processes" if sharing > 1 else f"{shares} processes"


_WIDE_CLIP = 0.1
"""A clip range that suits ratios of tokens. Ratios of whole sequences hardly ever leave it."""


def settings_among(config: RunConfig, settings: Sequence[str]) -> str:
    """Return which of `settings` are set, in one line."""
    return ", ".join(name for name in settings if _given(config, name))


def formula_notices(config: RunConfig) -> Iterator[str]:
    """Yield remarks on a valid formula of reinforcement learning."""
    algorithm = config.algorithm
    loss = algorithm.policy_loss.name
    own = {"gspo": "sequence_mean", "cispo": "token_mean"}.get(loss, algorithm.aggregation)
    if algorithm.aggregation != own:
        yield (
            f"algorithm.policy_loss {loss} is its paper's objective with algorithm.aggregation {own}; "
            f"here it is {algorithm.aggregation}"
        )
    yield from _of_ahead(config)
    if loss == "gspo" and min(algorithm.clip_low, algorithm.clip_high) >= _WIDE_CLIP:
        yield (
            f"algorithm.policy_loss gspo with clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g} "
            "clips next to nothing; its paper has 3e-4 and 4e-4"
        )
    if loss == "cispo" and algorithm.clip_low < 1:
        yield (
            f"algorithm.policy_loss cispo with clip_low {algorithm.clip_low:g} holds weights at {1 - algorithm.clip_low:g} or more; "
            "its paper leaves the lower side open, as clip_low 1 does"
        )


def _of_ahead(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    ahead = config.rollout.ahead
    steps = config.steps
    is_corrected = algorithm.mismatch_cap is not None or algorithm.mismatch_reject != "none"
    if ahead and algorithm.old_logprobs == "recompute" and not is_corrected:
        yield (
            f"rollout.ahead {ahead} trains on completions of older weights, and nothing corrects for their age; "
            "algorithm.mismatch_cap=2 does"
        )
    if config.rollout.in_flight:
        yield "rollout.in_flight: time decides which weights draw a token, so this run cannot be repeated to the bit"
    if ahead and steps is not None and ahead >= steps:
        yield f"rollout.ahead {ahead} with steps {steps} draws every completion with the first weights"
