"""Sample with vLLM in a dedicated process.

vLLM opens a process group, so keep RANK, WORLD_SIZE and MASTER_ADDR out of the environment. On a CPU it replaces
`torch.set_num_threads` and binds memory. It uses the visible accelerators in order.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from transformers import PretrainedConfig

from burnish.boxes.box import whole
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.config.schema import MOST_SLOTS, LoraConfig
from burnish.distributed.device import free_memory, total_memory
from burnish.distributed.environment import environ_of_child
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError, install, refusing
from burnish.families import layers_with_experts
from burnish.models.meta_init import model_sizes
from burnish.models.names import tied_names
from burnish.records import Experts, Floats
from burnish.rollout.base import Decode, Sampling, Watch
from burnish.rollout.inference_engine import (
    EngineGenerator,
    EngineRequest,
    import_engine,
    share_beside_trainer,
    starting,
    waves,
    whole_tensors,
    with_architectures,
)
from burnish.rollout.running import StopRule

_OLDEST = (0, 28)
_BEYOND = (0, 34)
# Defaults of environment variables. vLLM reads the first two after its import, and the next ones during it. Triton reads the last.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile for nothing, because the logits processor draws
    "TRITON_F32_DEFAULT": "ieee",  # else fp32 products in attention and experts are TF32, with 10 bits
}
PROCESSORS = (
    "burnish.rollout.vllm.logits_processor_v1:DrawingProcessor",
    "burnish.rollout.vllm.logits_processor_v2:SlotDrawingProcessor",
)
"""The logits processors for vLLM's model runners V1 and V2."""
# Share of a CPU's free memory for keys and values, and of an accelerator's for all of vLLM.
_CPU_SHARE = 0.4
_DEVICE_SHARE = 0.9
# Ranks of adapters that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Tokens of a block of keys and values, the fewest that vLLM's kernels allow. Completions share whole blocks of their prompt.
_CPU_BLOCK = 32


class VllmGenerator(EngineGenerator):
    """Samples the built-in generator's completions with vLLM.

    A sequence has at most `max_length` tokens, or as many as the model has positions. At most `slots` completions run at once. With
    `experts` it can record tokens' experts.
    """

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        *,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        max_length: int | None = None,
        tensor_parallel: int = 1,
        experts: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Start vLLM. Raises `MissingError` without it, `IncompatibleError` if it is too old or lacks model or device."""
        super().__init__(hf_config, device, dtype, eos_token_ids, decode, max_length, experts)
        self._tied_head = next(iter(tied_names(self._meta_model).values()), None)
        self._is_clean = True
        self._has_cache = True
        """Whether vLLM's cache cannot hold a NaN, and whether the cache has memory."""
        slots = MOST_SLOTS if slots == "auto" else slots
        vllm = _import_vllm(device)
        self._peft_config: dict[str, Any] | None = None
        """PEFT's configuration of an adapter beside the model."""
        self._factors = dict[str, TensorSpec]()
        self._scale = 1.0
        self._has_model = False
        """Whether vLLM has the base model's weights, with an adapter beside them."""
        if lora is not None:
            from burnish.models.lora.adapter import Adapter, target_weights
            from burnish.models.lora.adapter_config import kinds_of, peft_config

            targets = kinds_of(target_weights(self._meta_model, lora))
            self.require_adaptable(targets, hf_config, device, dtype)
            self._peft_config = peft_config(lora, targets).to_dict()
            adapter = Adapter(self._meta_model, lora)
            specs = [TensorSpec(weight.name, weight.shape, dtype) for weight in adapter.weights]
            self._factors = {spec.name: spec for spec in specs}
            self._scale = adapter.scale
        from vllm.usage.usage_lib import UsageContext

        from burnish.rollout.vllm import logits_processor_v1, vllm_worker

        self._draws: Any = logits_processor_v1
        self._worker: Any = vllm_worker
        if experts:
            self._layers = layers_with_experts(hf_config.get_text_config().to_dict())
        config = with_architectures(hf_config)
        _require_class(config, vllm.__version__, vllm.ModelRegistry.get_supported_archs())
        with starting(f"vLLM {vllm.__version__}", config) as directory:
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
                "async_scheduling": False,  # so that the loaded weights draw every token
                "enable_sleep_mode": self._sleeps,
                "disable_log_stats": True,
            }
            if device.type == "cpu":
                options |= {"enforce_eager": True, "block_size": _CPU_BLOCK}
                options["kv_cache_memory_bytes"] = self._cpu_cache(hf_config, dtype, slots)
            else:
                share = share_beside_trainer(device) * free_memory(device) / total_memory(device)
                options["gpu_memory_utilization"] = round(_DEVICE_SHARE * share, 3)
                options["enable_return_routed_experts"] = experts
            if lora is not None:
                options |= {"enable_lora": True, "max_loras": 1, "lora_target_modules": targets}
                options["max_lora_rank"] = next((r for r in _RANKS if r >= lora.rank), lora.rank)
            options["logits_processors"] = [PROCESSORS[0]]
            # By default a step has 2,048 tokens, as a server's; for `LLM` vLLM takes what fits the device.
            engine = vllm.EngineArgs(**options).create_engine_config(
                usage_context=UsageContext.LLM_CLASS
            )
            set_processor(engine)
            self._engine: Any = vllm.LLMEngine.from_vllm_config(engine, disable_log_stats=True)
            if experts and device.type == "cpu":
                self._call(self._worker.begin_recording)
        if tensor_parallel > 1 and lora is None:
            from burnish.rollout.vllm.vllm_receivers import VllmReceivers

            self.receivers = VllmReceivers(self._call, device, tensor_parallel)

    @staticmethod
    def require_supported(hf_config: PretrainedConfig, device: torch.device) -> None:
        """Import vLLM in a child process; raise `IncompatibleError` if vLLM does not fit."""
        code = f"from {__name__} import supported; print(*supported({device.type!r}))"
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environ_of_child(),
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise IncompatibleError(
                "vLLM cannot be used here",
                have="\n".join(child.stderr.split("\n")[-6:]),
                do=f"{install('vllm')}, or set rollout.engine=builtin",
            )
        version, *classes = child.stdout.splitlines()[-1].split()
        _require_class(with_architectures(hf_config), version, classes)

    @staticmethod
    def require_adaptable(
        targets: Sequence[str],
        hf_config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raise `IncompatibleError` for an adapter without vLLM kernel: of experts, on a CPU beside experts, on a GPU in fp32."""
        if device.type != "cpu" and dtype == torch.float32:
            raise IncompatibleError(
                "vLLM does not compute an adapter beside the model in fp32 on a GPU",
                have="engine.precision: fp32, model.lora.publish: adapter",
                want="bf16, or weights with the adapter merged into them",
                do="set engine.precision=bf16 or model.lora.publish=merged",
            )
        mixture = bool(model_sizes(hf_config).experts)
        if any("." in target for target in targets) or (mixture and device.type == "cpu"):
            raise IncompatibleError(
                "vLLM does not compute this adapter beside the model",
                have=f"model.lora.targets: {', '.join(targets)}",
                want="linear layers, and on a CPU a model without experts",
                do="set model.lora.publish=merged",
            )

    def _complete(
        self,
        running: Sequence[EngineRequest],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None:
        self._make_cache()
        pending = {request.number: request for request in running}
        lora = self._worker.ADAPTER if self._peft_config else None
        try:
            for request in running:
                params = self._draws.request_params(
                    sampling, request.key, request.drawn, request.room
                )
                prompt = {"prompt_token_ids": request.prompt}
                self._engine.add_request(request.number, prompt, params, lora_request=lora)
            while pending:
                ended = self._step(pending, rule, sampling.experts)
                if watch is not None:
                    watch(ended)
        finally:
            self._engine.abort_request(list(pending))

    def _logprobs(self, running: EngineRequest) -> tuple[Floats, Floats]:
        self._is_clean = False
        draws: tuple[Floats, Floats] = self._draws.read_draws(running.reported, len(running.own))
        self._is_clean = True
        return draws

    def load_weights(self, weights: Publication, version: int) -> None:
        """Load all tensors of a model or its adapter. Pass them by layer: vLLM copies incomplete layers.

        vLLM prefills running completions again. Raises `IncompatibleError` as `whole_tensors` does; then there are no weights.
        """
        self._version = None
        if self._asleep:
            self._engine.wake_up(["weights"])
        if self._peft_config is None:
            self._load_model(chain(weights.fixed, weights.changing))
        else:
            if weights.anew or not self._has_model:
                self._has_model = False
                self._load_model(weights.fixed)
                self._has_model = True
            factors = dict(whole_tensors(weights.changing, self._factors))
            self._load(self._worker.load_adapter, factors, self._peft_config)
        self._asleep = False
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            problem = "vLLM keeps keys and values of the previous weights in its cache"
            raise BurnishError(problem, do="set rollout.engine=builtin")
        self._version = version

    def _make_cache(self) -> None:
        if not self._has_cache:
            self._engine.wake_up(["kv_cache"])
            self._has_cache = True
            self._is_clean = False
        if not self._is_clean:
            self._call(self._worker.clear_cache)
            self._is_clean = True

    def _load_model(self, shards: Iterable[Shard]) -> None:
        parameters = self._load(self._worker.begin_load)
        filled = set[str]()
        try:
            for wave in waves(whole_tensors(shards, self._specs)):
                filled |= self._load(self._worker.load_some, wave)
        finally:
            self._load(self._worker.end_load)
        if empty := sorted(parameters - filled):
            raise IncompatibleError(
                f"vLLM got no values for {empty[0]}",
                have=f"{len(empty)} of its parameters without values",
                want="values for every parameter",
                do="set rollout.engine=builtin",
            )

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`: of tensors read back from vLLM.

        It skips tensors with other names, and B of an adapter whose scale is no power of two. On accelerators it skips experts in
        another order than Triton's. With tensor parallelism it skips shared key heads and tensors that the checkpoint joins.
        """
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        heads = [self._tied_head] if self._tied_head else []
        for name, is_head in [*((name, False) for name in shapes), *((n, True) for n in heads)]:
            parts = self._call(self._worker.read_tensor, name, shapes, is_head)
            tensor = self._worker.join_parts(parts, shapes[name])
            if tensor is not None:
                yield self._checksum(name, tensor)
        is_exact = math.frexp(self._scale)[0] == 0.5
        for name, spec in self._factors.items():
            if is_exact or ".lora_A." in name:
                parts = self._call(self._worker.read_factor, name, self._scale)
                rows, *columns = (slice(size) for size in spec.shape)
                tensor = self._worker.join_parts(parts, spec.shape)[rows, *columns].contiguous()
                yield spec, Shard(spec, whole(spec.shape), tensor).checksum()

    def _sleep(self) -> None:
        self._has_cache = False
        self._engine.sleep(level=1 if self._peft_config else 2)

    def close(self) -> None:
        """Stop vLLM and close its process groups, for good."""
        self._version = None
        self._engine.engine_core.shutdown()
        del self._engine
        import_module("vllm.distributed").cleanup_dist_env_and_memory()

    def _step(self, running: dict[str, EngineRequest], rule: StopRule, experts: bool) -> int:
        """Draw a token per completion; remove ended completions from `running` and count them."""
        ended: dict[str, Any] = {}
        outputs = self._engine.step()
        version = self._version or 0
        now = time.time()
        for output in outputs:
            request = running[output.request_id]
            completion = output.outputs[0]
            request.reported = completion.logprobs.logprobs
            if request.take(completion.token_ids[len(request.own) :], version, rule, now):
                ended[request.number] = completion
        if ended and experts:
            self._note_experts(ended, running)
        self._engine.abort_request(list(ended))
        for number in ended:
            del running[number]
        return len(ended)

    def _note_experts(self, ended: Mapping[str, Any], running: Mapping[str, EngineRequest]) -> None:
        requests = [running[name] for name in ended]
        if not self._sleeps:
            counts = {
                request.number: len(request.prompt) + len(request.own) - 1 for request in requests
            }
            rows = self._call(self._worker.read_experts, counts)[0]
        else:
            rows = [self._experts_of(*pair)[:, self._layers] for pair in ended.items()]
        for request, experts in zip(requests, rows, strict=True):
            request.experts = [experts]

    def _experts_of(self, name: str, completion: Any) -> Experts:
        """Return a request's experts, joined from chunks unless vLLM ended it."""
        experts: Any = completion.routed_experts
        if experts is None:
            processor = self._engine.output_processor
            [inside] = processor.external_req_ids[name]
            experts = np.concatenate(processor.request_states[inside].routed_experts_chunks)
        return experts.astype(np.int16) if experts.dtype == np.uint16 else experts

    def _load(self, function: Callable[..., Any], *arguments: Any) -> Any:
        do = "set rollout.engine=builtin, and report this model"
        with refusing("vLLM refuses the new weights", IncompatibleError, do=do):
            return self._call(function, *arguments)[0]

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._engine.collective_rpc(function, args=arguments)

    def _cpu_cache(self, config: PretrainedConfig, dtype: torch.dtype, slots: int) -> int:
        """Return the bytes for keys and values of all slots, halved until they fit."""
        sizes = model_sizes(config)
        longest = self._max_positions or config.get_text_config().max_position_embeddings
        size = (slots + 1) * (longest + _CPU_BLOCK) * 2 * sizes.depth * sizes.key * dtype.itemsize
        while size > _CPU_SHARE * free_memory(torch.device("cpu")):
            size //= 2
        return size


def set_processor(engine: Any) -> None:
    """Give an engine's configuration the logits processor of the model runner that it uses.

    Before vLLM 0.31, runner V2 takes none: with a processor, vLLM uses V1. So the question comes after the setting.
    """
    engine.model_config.logits_processors = [PROCESSORS[0]]
    if engine.use_v2_model_runner:
        engine.model_config.logits_processors = [PROCESSORS[1]]


def _import_vllm(device: torch.device) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm = import_engine("vLLM", _OLDEST, _BEYOND)
    platform = import_module("vllm.platforms").current_platform.device_type
    if platform != device.type:
        raise IncompatibleError(
            "this vLLM is built for another device",
            have=f"a build for {platform}",
            want=f"a build for {device.type}",
            do=f"install vLLM for {device.type}",
        )
    return vllm


def supported(device: str) -> list[str]:
    """Return vLLM's version and the model classes that it has. Call it in its own process."""
    vllm = _import_vllm(torch.device(device))
    return [vllm.__version__, *vllm.ModelRegistry.get_supported_archs()]


def _require_class(config: PretrainedConfig, version: str, known: Iterable[str]) -> None:
    if "GptOssForCausalLM" in config.architectures:  # it copies experts and sinks into placeholders
        raise IncompatibleError(
            f"vLLM {version} does not take new weights of gpt-oss",
            have="a loader that copies them into placeholders",
            want="a model whose weights vLLM reloads",
            do="set rollout.engine=builtin",
        )
    if not set(config.architectures).intersection(known):
        raise IncompatibleError(
            f"vLLM {version} has no model of type {config.model_type}",
            have=", ".join(config.architectures),
            want="a class of vLLM's registry",
            do="set rollout.engine=builtin, or install a newer vLLM",
        )
