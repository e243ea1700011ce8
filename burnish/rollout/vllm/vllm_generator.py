"""Sample with vLLM inside the calling process, which has to be its own.

vLLM opens a process group, so keep RANK, WORLD_SIZE and MASTER_ADDR out of the environment. On a CPU it replaces
`torch.set_num_threads` and binds memory. It takes the visible accelerators in order.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain, count
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from burnish.boxes.box import whole
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.config.schema import MOST_SLOTS
from burnish.distributed.device import free_memory, total_memory
from burnish.errors import (
    BurnishError,
    IncompatibleError,
    MissingError,
    UsageError,
    install,
    refusing,
)
from burnish.models.meta_init import build_on_meta, longest_sequence, model_sizes
from burnish.models.names import tied_names
from burnish.records import Completion, Request
from burnish.rollout.base import Sampling, Underway, Watch, require_valid
from burnish.rollout.builtin.stopping import Decode, StopRule
from burnish.rollout.inference_engine import (
    Running,
    held_specs,
    require_no_experts,
    started,
    waves,
    whole_tensors,
    with_architectures,
)

_OLDEST = "0.28"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# What the caller's environment leaves open. vLLM reads the first two later, the others when it is imported.
_CPU_SHARE, _DEVICE_SHARE = 0.4, 0.9
# Of free memory: what keys and values may take on a CPU, and what vLLM may take on an accelerator.
_CPU_BLOCK = 32
# Tokens of a block of keys and values, the fewest that vLLM's kernels allow: completions share their prompt's whole blocks.


class VllmGenerator:
    """Sample with vLLM's engine what the built-in generator samples; a `Continuable`.

    `eos_token_ids` end every completion. Stop strings need `decode`, which turns ids into text. A sequence has at most
    `max_length` tokens, or as many as the model has positions. vLLM runs at most `slots` completions at once, as far as its
    cache has room. Experts are not recorded.
    """

    central = False

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        max_length: int | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        """Start vLLM, without weights. Raises `MissingError` without vLLM, `IncompatibleError` for one that is too old or lacks model or device."""
        model = build_on_meta(hf_config)
        self._specs = held_specs(model, hf_config, dtype)
        self._tied_head = next(iter(tied_names(model).values()), None)
        self._eos_token_ids, self._decode = tuple(eos_token_ids), decode
        self._sleeps, self._asleep = device.type != "cpu", False
        self._version: int | None = None
        self._numbers = count()
        self._underway: Callable[[], list[Underway]] = list
        self._is_clean = True
        """Whether no NaN came out of vLLM since its cache was empty."""
        limits = (max_length, longest_sequence(hf_config))
        self._max_positions = min(filter(None, limits), default=None)
        slots = MOST_SLOTS if slots == "auto" else slots
        vllm = _imported(device)
        self._draws: Any = import_module("burnish.rollout.vllm.draws")
        self._weights: Any = import_module("burnish.rollout.vllm.weights")
        with TemporaryDirectory(prefix="burnish-vllm-") as directory:
            _write_config(hf_config, vllm, directory)
            options: dict[str, Any] = {
                "model": directory,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": str(dtype).removeprefix("torch."),
                "max_num_seqs": slots,
                "max_model_len": self._max_positions,
                "tensor_parallel_size": tensor_parallel,
                "enable_prefix_caching": True,
                "logprobs_mode": "processed_logits",
                "async_scheduling": False,  # so that tokens are of the weights that are loaded
                "enable_sleep_mode": self._sleeps,
                "disable_log_stats": True,
            }
            if device.type == "cpu":
                options |= {"enforce_eager": True, "block_size": _CPU_BLOCK}
                options["kv_cache_memory_bytes"] = self._cpu_cache(hf_config, dtype, slots)
            else:
                share = _DEVICE_SHARE * free_memory(device) / total_memory(device)
                options["gpu_memory_utilization"] = round(share, 3)
            with refusing(
                f"vLLM {vllm.__version__} does not start with this model",
                IncompatibleError,
                do="give it less to hold, rollout.slots or max_response_length, or rollout with the built-in generator",
            ):
                config = vllm.EngineArgs(**options).create_engine_config()
                v2 = getattr(config, "use_v2_model_runner", False)
                processor = "draws_v2:SlotDrawingProcessor" if v2 else "draws:DrawingProcessor"
                config.model_config.logits_processors = [f"burnish.rollout.vllm.{processor}"]
                self._engine: Any = vllm.LLMEngine.from_vllm_config(config, disable_log_stats=True)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """See `Generator.generate`. Raises `UsageError` as the built-in generator does, and if experts are asked for."""
        if self._version is None:
            raise UsageError("the generator has no weights", do="call load_weights first")
        require_no_experts(sampling, "vLLM")
        require_valid(requests, sampling, self._max_positions)
        rule = StopRule(sampling, self._eos_token_ids, self._decode)
        asked = time.time()
        groups = [started(request, sampling, self._numbers) for request in requests]
        running = {each.number: each for group in groups for each in group}

        def so_far() -> list[Underway]:
            found = [[self._finished(each, asked) for each in group] for group in groups]
            return [Underway(sampling, *each) for each in zip(requests, found, strict=True)]

        self._underway = so_far
        try:
            for each in running.values():
                params = self._draws.request_params(sampling, each.key, each.drawn)
                self._engine.add_request(each.number, {"prompt_token_ids": each.prompt}, params)
            while running:
                ended = self._step(running, rule)
                if watch is not None:
                    watch(ended)
        finally:
            self._engine.abort_request(list(running))
            self._underway = list
        self._is_clean = False
        found = [each.completions for each in so_far()]
        self._is_clean = True
        return found

    def so_far(self) -> list[Underway]:
        """See `Continuable.so_far`."""
        return self._underway()

    def load_weights(self, weights: Publication, version: int) -> None:
        """Load a model's tensors, of which every call must bring all, whole or in pieces.

        vLLM holds no more of them a second time than the tensors of layers that are not complete, so bring them by layer. It
        reads completions that run again. Raises `IncompatibleError` for a tensor that is missing, unknown or of another shape;
        then the generator has no weights.
        """
        self._version = None
        if self._asleep:
            self._engine.wake_up(["weights"])
        shards = chain(weights.fixed, weights.changing)
        wanted, filled = self._load("begin_load"), set[str]()
        try:
            for wave in waves(whole_tensors(shards, self._specs)):
                filled |= self._load("load_some", wave)
        finally:
            self._load("end_load")
        if left := sorted(wanted - filled):
            raise IncompatibleError(
                f"vLLM got no values for {left[0]}",
                have=f"{len(left)} of its parameters without values",
                want="values for every parameter",
            )
        if self._asleep:
            self._engine.wake_up(["kv_cache"])
            self._asleep = False
        if not self._is_clean:
            self._call("clear_cache")
            self._is_clean = True
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise BurnishError("vLLM keeps keys and values of the previous weights in its cache")
        self._version = version

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`: of tensors read back from vLLM, which may have joined or packed them.

        On a CPU that is the product of a packed layer and the identity, so a stale or dropped tensor shows; only −0 reads as 0.
        Left out are tensors that vLLM stores under other names, experts on accelerators in another order than Triton's, and with
        tensor parallelism key heads that ranks share and what a checkpoint has joined.
        """
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        heads = [self._tied_head] if self._tied_head else []
        for name, is_head in [*((name, False) for name in shapes), *((n, True) for n in heads)]:
            parts = self._call("read_tensor", name, shapes, is_head)
            tensor = self._weights.join_parts(parts, shapes[name])
            if tensor is not None:
                spec = self._specs[name]
                yield spec, Shard(spec, whole(spec.shape), tensor.to(spec.dtype)).checksum()

    def release(self) -> None:
        """See `Generator.release`. A CPU's memory stays. Not run on accelerators."""
        if self._sleeps and not self._asleep:
            self._version, self._asleep = None, True
            self._engine.sleep(level=2)

    def close(self) -> None:
        """Stop vLLM and close its process groups. The generator cannot be used afterwards."""
        self._version = None
        self._engine.engine_core.shutdown()
        del self._engine
        import_module("vllm.distributed").cleanup_dist_env_and_memory()

    def _step(self, running: dict[str, Running], rule: StopRule) -> int:
        """Make a token of each completion that vLLM runs; take those that end from `running` and count them."""
        ended = []
        outputs, version = self._engine.step(), self._version or 0
        now = time.time()
        for output in outputs:
            each, made = running[output.request_id], output.outputs[0]
            each.reported = made.logprobs.logprobs
            if not each.versions or each.versions[-1][0] != version:
                each.versions.append((version, len(each.own)))
            if each.take(made.token_ids[len(each.own) :], rule, now):
                ended.append(each.number)
        self._engine.abort_request(ended)
        for number in ended:
            del running[number]
        return len(ended)

    def _finished(self, each: Running, asked: float) -> Completion:
        sampled, raw = self._draws.read(each.reported, len(each.own))
        return each.completion(sampled, raw, asked)

    def _load(self, function: str, *arguments: Any) -> Any:
        with refusing("vLLM does not take the weights", IncompatibleError, do="report this model"):
            return self._call(function, *arguments)[0]

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of `weights.py` in each of vLLM's workers."""
        return self._engine.collective_rpc(getattr(self._weights, function), args=arguments)

    def _cpu_cache(self, config: PretrainedConfig, dtype: torch.dtype, slots: int) -> int:
        """Return the bytes for keys and values of all slots, or the half of that and so on, for which memory has room."""
        sizes = model_sizes(config)
        longest = self._max_positions or config.get_text_config().max_position_embeddings
        size = (slots + 1) * (longest + _CPU_BLOCK) * 2 * sizes.depth * sizes.key * dtype.itemsize
        while size > _CPU_SHARE * free_memory(torch.device("cpu")):
            size //= 2
        return size


def _imported(device: torch.device) -> Any:
    """Import vLLM with the environment that it needs here; refuse one that does not fit."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        vllm = import_module("vllm")
    except ModuleNotFoundError as error:
        raise MissingError(
            "rollouts with vLLM need a package that is not installed",
            have=f"no package {error.name}",
            want=f"vLLM {_OLDEST} or newer",
            do=f"{install('vllm')}, or rollout with the built-in generator",
        ) from error
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found and int(found[1]) == 0 and int(found[2]) < int(_OLDEST.partition(".")[2]):
        raise IncompatibleError(
            "this vLLM is too old",
            have=vllm.__version__,
            want=f"{_OLDEST} or newer",
            do=install("vllm"),
        )
    platform = import_module("vllm.platforms").current_platform.device_type
    if platform != device.type:
        raise IncompatibleError(
            "this vLLM is built for another device",
            have=f"a build for {platform}",
            want=device.type,
            do=f"install vLLM for {device.type}",
        )
    return vllm


def _write_config(hf_config: PretrainedConfig, vllm: Any, directory: str) -> None:
    """Write config.json with the class of the model. Raises `IncompatibleError` if vLLM has no such class."""
    config = with_architectures(hf_config)
    known = vllm.ModelRegistry.get_supported_archs()
    if not set(config.architectures).intersection(known):
        raise IncompatibleError(
            f"vLLM {vllm.__version__} has no model of type {config.model_type}",
            have=", ".join(config.architectures),
            want="a class of vLLM's registry",
            do="rollout with the built-in generator, or install a newer vLLM",
        )
    config.save_pretrained(directory)
