"""The setup that SFT, RL and evaluation share."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.boxes.shards import ShardSource, renamed
from burnish.checkpoint.save import ModelContents
from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from burnish.data.loader import MEASURED, Loader, MeasuredLoader, MixedLoader
from burnish.data.sources import Rows, load_rows
from burnish.data.tasks import ItemSequence, Mixture, PromptDataset
from burnish.data.tokenizer import (
    eos_token_ids,
    load_tokenizer,
    single_template,
)
from burnish.distributed.device import has_bf16_products
from burnish.distributed.layout import Layout
from burnish.engines import factory as making
from burnish.engines.base import Engine, Part, compute_dtype
from burnish.errors import UsageError, few, refusing
from burnish.extend import GENERATORS
from burnish.models.flops import ModelFlops, Passed
from burnish.models.heads import require_language_model
from burnish.models.language_model import Composite
from burnish.models.loading import (
    GENERATION_CONFIG,
    SafetensorsSource,
    aligned_generation_config,
    composite_of,
    generation_config,
    read_model_config,
    require_embeddings,
    save_model_assets,
    weights_source,
)
from burnish.models.meta_init import count_flops, kept_in_fp32, length_limits
from burnish.records.seeds import derive_seed
from burnish.rewards.pool import RewardPool
from burnish.rollout.base import Sampling
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress

if TYPE_CHECKING:
    from burnish.config.frozen_models import FrozenModel
    from burnish.data.examples import ExampleDataset
    from burnish.data.streaming import Stream
    from burnish.models.mtp_names import MTPNames

_MEGABYTE = 1_000_000
_log = logging.getLogger(__name__)

Dataset = TypeVar("Dataset", bound=ItemSequence[Any])


@dataclass(frozen=True, slots=True)
class TextFoundation:
    """The setup to evaluate an endpoint: a tokenizer, no model."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer, with repaired pad and eos."""
    layout: Layout
    """The processes. An engine's own layout says how they divide its model."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Foundation(TextFoundation):
    """The model that a run starts from, before any weight is read."""

    hf_config: PretrainedConfig
    source: ShardSource
    """Initial values of the trained weights: the model's, or its adapter's."""
    base: ShardSource  # the model's weights, which stay frozen where an adapter is trained
    adapter: Mapping[str, Any] | None
    """The record of the adapter for state.json; None where the model itself is trained."""
    eos_token_ids: tuple[int, ...]
    """All ids that end a completion."""
    flops: ModelFlops
    """FLOPs of a forward pass over the model's sequences."""
    composite: Composite | None = None
    """The checkpoint around the model, with the names of what is trained; None where it holds the model alone."""
    card: str = ""
    """The README.md of the trained model; "" for none."""
    assets: Mapping[str, bytes] = field(default_factory=dict)
    """The files beside the weights, by name; only on rank 0 of a run that trains."""
    adapted: int = 0
    """The numbers that a run trains, if those are not the whole model's."""
    beside: Sequence[FrozenModel] = ()
    """The frozen models of the method (`Method.frozen`)."""
    mtp: MTPNames | None = None
    """The layer for multi-token prediction that is trained; None: none is."""

    @property
    def costs(self) -> ModelFlops:
        """FLOPs of sequences in an update."""
        return self.flops.of_training(frozen=self.adapter is not None)

    @property
    def names(self) -> Mapping[str, str]:
        """Names in checkpoints of the trained tensors that are called otherwise there."""
        return {} if self.composite is None else self.composite.names

    def places(self, *, fresh: bool) -> list[str | None]:
        """Return where the weights lie that a run only reads, and if `fresh` those that it trains."""
        model = self.config.model
        started = [model.path, model.lora.path] if fresh else []
        frozen = [] if self.adapter is None else [model.path]
        beside = [each.path for each in self.beside if fresh or each.gives != "weights"]
        return [*beside, *frozen, *started]

    def write_assets(self, directory: Path) -> None:
        """Write the files that make trained weights a Hugging Face model or PEFT adapter."""
        if self.adapter is None:
            is_fp32 = self.config.checkpoint.model_dtype == "fp32"
            dtype = torch.float32 if is_fp32 else torch.bfloat16
            save_model_assets(self.hf_config, self.tokenizer, directory, dtype, self.eos_token_ids)
            if self.composite is not None and self.names:
                from burnish.models import composite

                composite.write_composite_assets(self.composite, directory, dtype)
        else:
            from burnish.models.lora import adapter_config

            adapter_config.save_adapter_config(self.adapter, directory, self.names.values())
            self.tokenizer.save_pretrained(directory)
            # The base's own knows nothing of the tokens that training has taught the adapter to end with.
            generation = aligned_generation_config(
                self.hf_config, self.tokenizer, self.eos_token_ids
            )
            generation.to_json_file(directory / GENERATION_CONFIG)
        if self.card:
            (directory / "README.md").write_text(self.card, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that is trained."""

    engine: Engine
    foundation: Foundation

    def take_flops(self) -> float:
        """Return the FLOPs of this rank's passes since the last call."""
        passed = self.engine.passed
        self.engine.passed = Passed()
        frozen = self.foundation.adapter is not None
        return self.foundation.flops.training(passed, frozen=frozen) / self.engine.layout.sharing

    def contents(self) -> ModelContents:
        """Return its checkpoint's contents."""
        weights = list(self.engine.shards(Part.WEIGHTS))
        names = self.foundation.names
        whole = kept_in_fp32(self.foundation.hf_config, (each.spec.name for each in weights))
        return ModelContents(
            weights=[renamed(shard, names) for shard in weights],
            training=[renamed(shard, names) for shard in self.engine.shards(Part.TRAINING)],
            assets=self.foundation.assets,
            whole=frozenset(names.get(name, name) for name in whole),
        )


def lay_foundation(
    config: RunConfig,
    layout: Layout | None = None,
    device: torch.device | None = None,
    *,
    given: ModelConfig | None = None,
    card: str = "",
    may_judge: bool = False,
    beside: Iterable[FrozenModel] = (),
) -> Foundation:
    """Read configuration, tokenizer and weight headers. Raises if they do not fit each other.

    `given` is `config.model` before copies replaced URLs and ids. With `may_judge` it may be a reward model. `beside`: the frozen models of the
    method, which are not read yet.
    """
    hf_config = read_model_config(config.model)
    if not may_judge:
        do = "set model.path to a language model; a critic's directory belongs in critic.path"
        require_language_model(config.model.path, hf_config, do)
    tokenizer = model_tokenizer(config.model, config.data.chat_template_name)
    require_embeddings(hf_config, tokenizer)
    _require_stop_tokens(config.rollout.stop_token_ids, hf_config)
    model = config.model
    used = {"lora": model.adapter, "train": model.train, "mtp": model.train_mtp}
    making.require_fitting(hf_config, config.engine, [name for name in used if used[name]])
    layout = layout or Layout()
    device = device or torch.device("cpu")
    # What costs milliseconds came first. The proof takes seconds, once for each model. Weights are read after it.
    prove_model(
        hf_config,
        layout,
        device,
        lora=config.model.adapter,
        generates=config.scores,
        sampling=_proved_sampling(config.rollout),
        engine=config.engine,
    )
    if config.algorithm.router_replay != "none":
        from burnish.models import routing

        routing.require_routers(hf_config, "algorithm.router_replay")
    base = weights_source(config.model, hf_config, config.seed)
    composite, mtp = _around(config.model, hf_config, layout)
    source: ShardSource = base
    adapter: dict[str, Any] | None = None
    adapted = 0
    if config.model.adapter:
        from burnish.models.lora.adapter import (
            adapter_record,
            count_trained,
            first_adapter,
            warn_of_unadapted,
            within,
        )

        composite = within(composite, config.model, hf_config)
        if config.model.adapter.quantize_base != "none":
            from burnish.models.lora.quantized_base import require_quantizable

            dtype = compute_dtype(config.engine)
            plain = require_quantizable(config.model.adapter, hf_config, device, dtype)
            if plain and layout.is_main:
                message = "model.lora.quantize_base leaves the linear layers %s as they are"
                _log.warning(message, few(plain))
        if layout.is_main:
            warn_of_unadapted(config.model.adapter, hf_config)
        # A checkpoint names the model where anybody finds it, and not its copy on this machine.
        origin = given.path if given and given.path != config.model.path else None
        adapter = adapter_record(config.model, hf_config, origin)
        adapted = count_trained(hf_config, config.model.adapter)
        source = first_adapter(config.model, hf_config, adapter, config.seed, base, composite)
        if config.model.adapter_beside:
            _require_adaptable(config, adapter["targets"], hf_config, device)
    elif config.model.train:
        from burnish.models.freezing import count_unfrozen

        adapted = count_unfrozen(hf_config, config.model.train)
    template = single_template(tokenizer, config.data.chat_template_name)
    foundation = Foundation(
        config,
        tokenizer,
        layout,
        device,
        hf_config,
        source,
        base,
        adapter,
        eos_token_ids(template, hf_config, generation_config(hf_config)),
        count_flops(hf_config),
        composite,
        card,
        adapted=adapted,
        beside=[*beside],
        mtp=mtp,
    )
    # Written once now, so that what cannot be written ends the run here and not at its first save.
    return foundation if given is None else with_assets(foundation)


def _around(
    config: ModelConfig, hf_config: PretrainedConfig, layout: Layout
) -> tuple[Composite | None, MTPNames | None]:
    """Return what lies around the model in its checkpoint and stays as it is, and the MTP layer that is trained."""
    composite = composite_of(config.path, hf_config)
    if composite is not None and composite.names:
        from burnish.check import composite_proof

        composite_proof.prove_composite(composite, hf_config, layout)
    if not config.train_mtp:
        return composite, None
    from burnish.models.mtp_names import trained_layer

    mtp, composite = trained_layer(composite, hf_config, layout)
    return composite, mtp


def _proved_sampling(rollout: RolloutConfig) -> Sampling:
    """Return what the proof draws with: the run's filters, without its stops."""
    return Sampling(
        rollout.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
    )


def _require_adaptable(
    config: RunConfig, targets: Sequence[str], hf_config: PretrainedConfig, device: torch.device
) -> None:
    """Raise `IncompatibleError` if the generator cannot hold the adapter beside the model."""
    generator = GENERATORS.load(config.rollout.engine, "rollout.engine", config.generator_options)
    generator.require_adaptable(targets, hf_config, device, compute_dtype(config.engine))


def model_tokenizer(
    model: ModelConfig, template_name: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; `template_name` is `data.chat_template_name`."""
    place = model.tokenizer or model.path or ""
    trusts = model.trust_remote_code
    tokenizer = load_tokenizer(place, model.chat_template, trusts, template_name)
    if model.tokenizer and model.path:
        from burnish.data.vocabularies import tell_other_tokens

        tell_other_tokens(tokenizer.get_vocab(), model.path)
    return tokenizer


def ends_of(foundation: TextFoundation) -> tuple[int, ...]:
    """Return all ids that end a completion, for an endpoint those of the tokenizer."""
    if isinstance(foundation, Foundation):
        return foundation.eos_token_ids
    name = foundation.config.data.chat_template_name
    return eos_token_ids(single_template(foundation.tokenizer, name))


def with_assets(foundation: Foundation) -> Foundation:
    """Add the files beside trained weights. Raises `UsageError` where a library refuses to write them."""
    with (
        refusing(
            "the files beside the model's weights cannot be written as they were read",
            do="correct config.json, generation_config.json or the tokenizer's files",
        ),
        tempfile.TemporaryDirectory() as name,
    ):
        directory = Path(name)
        foundation.write_assets(directory)
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return replace(foundation, assets=files if foundation.layout.is_main else {})


def prove_model(
    hf_config: PretrainedConfig, layout: Layout, device: torch.device, **how: Any
) -> None:
    """Compare a small model with transformers, unless an earlier start did. Raises `IncompatibleError`."""
    from burnish.check import proof

    proof.prove(hf_config, device, layout=layout, **how)


def _require_stop_tokens(token_ids: Sequence[int], hf_config: PretrainedConfig) -> None:
    vocabulary = hf_config.get_text_config().vocab_size
    missing = [each for each in token_ids if each >= vocabulary]
    if missing:
        raise UsageError(
            "rollout.stop_token_ids names tokens that the model does not have",
            have=", ".join(map(str, missing)),
            want=f"ids below {vocabulary}",
            do="take them from the model's own tokenizer",
        )


@contextmanager
def reward_pool(
    reward: RewardConfig, environment: EnvironmentConfig, moved: Callable[[], None] = lambda: None
) -> Iterator[RewardPool]:
    """Open the reward functions, and the processes of an environment. Raises `UsageError` for an unusable function or class."""
    with RewardPool(reward, moved) as pool:
        if environment.target is not None:
            from burnish.environments.pool import EnvironmentPool

            pool.environments = EnvironmentPool(environment)
        yield pool


def prompt_dataset(
    foundation: TextFoundation,
    paths: Sequence[str],
    setting: str,
    first: int | None = None,
    pool: RewardPool | None = None,
    progress: Progress | None = None,
) -> PromptDataset:
    """Read the prompts in `paths`, or their `first` rows, that leave room for a completion. Collective.

    Errors name `setting`. Raises `MissingError` if a reward needs a missing column.
    """
    config = foundation.config
    rows = run_rows(foundation, paths, setting, progress).first(first)
    if pool is not None:
        pool.check_columns(rows.columns, setting)
    limits = prompt_limits(foundation) if isinstance(foundation, Foundation) else {}
    layout = foundation.layout
    return PromptDataset(
        rows,
        foundation.tokenizer,
        config.data,
        limits=limits,
        scored=() if pool is None else pool.columns,
        tools=pool.environments.described.tools if pool and pool.environments else (),
        progress=progress,
        layout=layout,
    )


def prompt_limits(foundation: Foundation) -> dict[str, int]:
    """Return the most tokens of a prompt, by the limit's name. Raises `UsageError` if a completion leaves no room."""
    config = foundation.config
    response = config.rollout.max_response_length
    limits = {}
    budgets = {}
    if config.batch.is_auto:  # only a longest prompt makes it more
        most = config.sequence_limit(config.longest_completed)
        limits["data.max_prompt_length"] = most - response
    else:
        budgets["batch.tokens_per_device"] = config.microbatch_tokens
    budgets |= length_limits(foundation.hf_config)
    for name, most in budgets.items():
        if response >= most:
            raise UsageError(
                "rollout.max_response_length leaves no room for a prompt",
                have=f"{response} of {name}: {most}",
                want=f"less than {most}",
                do=f"lower rollout.max_response_length{f', or raise {name}' if name.startswith('batch') else ''}",
            )
    rests = {f"{name} - rollout.max_response_length": n - response for name, n in budgets.items()}
    return limits | rests


def run_rows(
    foundation: TextFoundation, paths: Sequence[str], setting: str, progress: Progress | None
) -> Rows:
    """Read rows, or list the files of streamed ones. Collective."""
    data = foundation.config.data
    seed = foundation.config.seed
    if setting == "data.train" and data.streaming:
        from burnish.data.streaming import open_rows

        buffer = data.streaming * _MEGABYTE
        shuffle = data.shuffle
        layout = foundation.layout
        return open_rows(paths, setting, buffer, seed=seed, shuffle=shuffle, layout=layout)
    if setting == "data.validation" and not data.held_out:
        return load_rows(paths, setting, progress)
    rows = load_rows(paths, "data.train", progress).first(data.max_rows)
    if not data.held_out:
        return rows
    from burnish.data.held_out import split_off

    return split_off(rows, data.held_out)[setting == "data.validation"]


def train_dataset(
    read: Callable[[Sequence[str], str], Dataset], data: DataConfig
) -> Dataset | Mixture[Any]:
    """Read `data.train` as one data set or, with weights, as one for each entry. Collective."""
    if not data.streaming:
        return _read_entries(read, data, "data.train")
    entries = [[entry] for entry in data.train] if data.weights else [data.train]
    parts = [read(entry, "data.train") for entry in entries]
    from burnish.data.streaming import Stream

    return Stream(cast(list[Any], parts))


def validation_dataset(
    read: Callable[[Sequence[str], str], Dataset], data: DataConfig
) -> Dataset | Mixture[Any]:
    """Read `data.validation`, or the share of `data.train` that it names. Collective."""
    if data.held_out:
        return _read_entries(read, data, "data.validation")
    return read(data.validation, "data.validation")


def _read_entries(
    read: Callable[[Sequence[str], str], Dataset], data: DataConfig, setting: str
) -> Dataset | Mixture[Any]:
    """Read the entries of `data.train` for a setting."""
    if not data.weights:
        return read(data.train, setting)
    return Mixture([cast(Any, read([entry], setting)) for entry in data.train])


def make_loader(
    dataset: ItemSequence[Any],
    data: DataConfig,
    seed: int,
    size: int,
    *,
    by_epoch: bool,
) -> Loader:
    """Return the loader of `data.train`. A step draws `size` items."""
    shuffle = data.shuffle
    if data.streaming:
        from burnish.data.streaming import StreamLoader

        return StreamLoader(cast("Stream[Any]", dataset), data.weights)
    if size > len(dataset) and not by_epoch:
        times = "a step draws %d rows of data.train, which has %d: some of them several times"
        _log.warning(times, size, len(dataset))
    if data.curriculum == MEASURED:
        return MeasuredLoader(len(dataset), seed, shuffle)
    if not isinstance(dataset, Mixture):
        hard = dataset.difficulty()
        return Loader(len(dataset), seed, shuffle, by_epoch=by_epoch, difficulty=hard)
    loaders = []
    for number, part in enumerate(dataset.parts):
        own = derive_seed(seed, "mixture", number)
        loaders.append(Loader(len(part), own, shuffle, difficulty=part.difficulty()))
    return MixedLoader(loaders, data.weights)


def example_dataset(
    foundation: Foundation,
    paths: Sequence[str],
    setting: str,
    first: int | None = None,
    progress: Progress | None = None,
    weight_column: str | None = None,
) -> ExampleDataset:
    """Read the SFT examples in `paths`, or their `first` rows. Collective."""
    from burnish.data.examples import ExampleDataset
    from burnish.runs.example_limits import example_limit, tell_long_examples

    rows = run_rows(foundation, paths, setting, progress).first(first)
    limit, name = example_limit(foundation.config.example_limits(), foundation.hf_config)
    dataset = ExampleDataset(
        rows,
        foundation.tokenizer,
        foundation.config.data,
        limit,
        progress,
        foundation.layout,
        foundation.eos_token_ids,
        strict=True,
        limit_name=name,
        weight_column=weight_column,
    )
    if foundation.layout.is_main:
        tell_long_examples(foundation.hf_config, dataset, setting)
    return dataset


def make_run_engine(
    foundation: Foundation, optim: OptimConfig | None, beside: Engine | None = None
) -> Engine:
    """Make the configured engine without weights. Collective."""
    in_bf16 = foundation.config.engine.precision == "bf16"
    if beside is None and in_bf16 and not has_bf16_products(foundation.device):
        _log.warning(
            "this processor has no matrix products in bf16, and can take a hundred times as long for them as in fp32: "
            "set engine.precision=fp32"
        )
    settings = foundation.config.engine
    lora = foundation.config.model.adapter if foundation.adapter else None
    engine = making.make_engine(
        foundation.hf_config,
        settings,
        optim,
        layout=foundation.layout,
        device=foundation.device,
        lora=lora,
        train=foundation.config.model.train if foundation.adapted else (),
        mtp=None if optim is None else foundation.mtp,
        beside=beside,
    )
    if foundation.layout.world > 1 or settings.kind != "torch":
        from burnish.check.proof import prove_layout

        prove_layout(engine, foundation.hf_config, settings, lora, foundation.device)
    return engine


def prove_start(engine: Engine, foundation: Foundation) -> None:
    """Call `prove_loaded` for the weights that a run starts from. Collective.

    An adapter that training continues is left out, because transformers alone does not add it.
    """
    config = foundation.config
    flops = foundation.flops
    if foundation.adapter is None:
        prove_directory(engine, foundation.source, foundation.hf_config, flops, config.engine)
    elif config.model.lora.path is None and config.model.lora.quantize_base == "none":
        given = (foundation.hf_config, flops, config.engine, Part.FROZEN)
        prove_directory(engine, foundation.base, *given)


def prove_directory(
    engine: Engine,
    source: ShardSource,
    hf_config: PretrainedConfig,
    flops: ModelFlops,
    settings: EngineConfig,
    part: Part = Part.WEIGHTS,
) -> None:
    """Call `burnish.check.loaded.prove_loaded` if `source` is a model directory. Collective."""
    if not isinstance(source, SafetensorsSource):
        return
    if settings.kind != "torch" or settings.compile:
        if engine.layout.is_main:
            why = "engine.compile" if settings.kind == "torch" else f"engine.kind={settings.kind}"
            _log.info("not checked after loading, because of %s", why)
        return
    from burnish.check import loaded

    dtype = compute_dtype(settings)
    loaded.prove_loaded(engine, hf_config, source.directory, flops, dtype, part)


def load_start(foundation: Foundation, engine: Engine, intact: Intact) -> Engine:
    """Return the frozen model that training starts from; under a fresh adapter that is `engine`, with the adapter off. Collective."""
    adapter = foundation.config.model.adapter
    if adapter and adapter.path is None:
        return engine
    intact.require(*foundation.places(fresh=True))
    return load_frozen(foundation, engine)


def load_frozen(foundation: Foundation, beside: Engine | None = None) -> Engine:
    """Return an engine for inference, with weights. Collective."""
    engine = make_run_engine(foundation, None, beside)
    engine.load(foundation.base, Part.FROZEN)
    engine.load(foundation.source, Part.WEIGHTS)
    return engine
