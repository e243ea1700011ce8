"""Sample with SGLang in a dedicated process.

This module is written from the source of SGLang 0.5.23 and has only run against a stand-in (`tests/support/services/fake_sglang`). SGLang starts processes
that end with this one, handles signals, and uses accelerators from `device` on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, TensorSpec
from burnish.config.schema import MOST_SLOTS
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError
from burnish.records import Floats
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

_OLDEST = (0, 5, 23)
_READ_BACK = "burnish.rollout.sglang.sglang_worker.write_parameters"
# SGLang ends a sequence so many tokens before `context_length`.
_RESERVED_TOKENS = 2
# Share of its memory that SGLang takes for weights and cache. Activations and graphs take more.
_STATIC_SHARE = 0.8
# Tokens of a completion that SGLang sends together if no stop string can end it.
_CHUNK = 16


class SglangGenerator(EngineGenerator):
    """Samples the built-in generator's completions with SGLang. The arguments are `VllmGenerator`'s.

    `so_far` reports some tokens late, and the first token of new weights only at a completion's end.
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
    ) -> None:
        """Start SGLang. Raises `MissingError` without it, `IncompatibleError` if it is too old or does not start."""
        super().__init__(hf_config, device, dtype, eos_token_ids, decode, max_length)
        self._tensor_parallel = tensor_parallel
        self._vocabulary: int = hf_config.get_text_config().vocab_size
        longest = self._max_positions and self._max_positions + _RESERVED_TOKENS
        # SGLang's limit counts two tokens that no sequence gets, so it is above the model's.
        os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
        sglang = import_engine("SGLang", _OLDEST)
        self._messages: Any = import_module("sglang.srt.managers.io_struct")
        from burnish.rollout.sglang import sglang_worker

        self._worker: Any = sglang_worker
        self._processor: str = self._worker.DrawingLogitProcessor.to_str()
        config = with_architectures(hf_config)
        config.eos_token_id = None  # each request names its stop tokens
        share = round(_STATIC_SHARE * share_beside_trainer(device), 3) if self._sleeps else None
        with starting(f"SGLang {sglang.__version__}", config) as directory:
            self._engine: Any = _launch(
                sglang.Engine,
                model_path=directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=str(dtype).removeprefix("torch."),
                device=device.type,
                base_gpu_id=device.index or 0,
                tp_size=tensor_parallel,
                max_running_requests=MOST_SLOTS if slots == "auto" else slots,
                context_length=longest,
                random_seed=0,
                mem_fraction_static=share,  # of the memory that is free when SGLang starts
                enable_custom_logit_processor=True,
                disable_overlap_schedule=True,  # so that a draw knows how many tokens came before
                custom_weight_loader=[_READ_BACK],
                enable_memory_saver=self._sleeps,
            )
        self._manager = self._engine.tokenizer_manager

    def _complete(
        self,
        running: Sequence[EngineRequest],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None:
        if not running:
            return
        stream = self._stream(running, sampling)
        pending = {request.number: request for request in running}
        try:
            for output in stream:
                ended = self._take(output, pending, rule)
                if watch is not None:
                    watch(ended)
        finally:
            self._call(self._manager.abort_request, abort_all=True)
            for _ in stream:  # until SGLang has dropped every request
                pass

    def _logprobs(self, running: EngineRequest) -> tuple[Floats, Floats]:
        return self._worker.read_top_logprobs(running.reported, running.own, self._vocabulary)

    def load_weights(self, weights: Publication, version: int) -> None:
        """Load all of a model's tensors, whole or in pieces.

        SGLang prefills running completions again. Raises `IncompatibleError` as `whole_tensors` does; then there are no weights.
        """
        self._version = None
        if self._asleep:
            self._engine.resume_memory_occupation(["weights"])
        shards = chain(weights.fixed, weights.changing)
        pause = self._messages.PauseGenerationReqInput(mode="retract")
        self._run(self._manager.pause_generation(pause))
        try:
            self._require_success(self._engine.begin_weight_update())
            try:
                for wave in waves(whole_tensors(shards, self._specs)):
                    self._update(wave, weight_version=str(version))
            finally:
                self._require_success(self._engine.end_weight_update())
            if self._asleep:
                self._engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
                self._asleep = False
            if not self._engine.flush_cache().success:
                problem = "SGLang keeps keys and values of the previous weights"
                raise BurnishError(problem, do="set rollout.engine=builtin")
            self._version = version
        finally:
            resume = self._messages.ContinueGenerationReqInput(torch_empty_cache=False)
            self._run(self._manager.continue_generation(resume))

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """See `Generator.checksums`: of tensors read back from SGLang.

        It skips tensors with other names, experts, and everything with tensor parallelism.
        """
        if self._tensor_parallel > 1:
            return
        self._require_success(self._engine.begin_weight_update())
        try:
            with TemporaryDirectory(prefix="burnish-sglang-") as directory:
                for name in self._specs:
                    tensor = self._read_back(name, Path(directory, "tensor.safetensors"))
                    if tensor is not None:
                        yield self._checksum(name, tensor)
        finally:
            self._require_success(self._engine.end_weight_update())

    def _sleep(self) -> None:
        self._engine.release_memory_occupation()

    def close(self) -> None:
        """End SGLang's processes for good."""
        self._version = None
        self._engine.shutdown()

    def _stream(
        self, running: Sequence[EngineRequest], sampling: Sampling
    ) -> Iterator[dict[str, Any]]:
        """Request completions; yield messages about each as it grows."""
        stop = {*self._eos_token_ids, *sampling.stop_token_ids}
        params = [
            self._worker.custom_params(
                sampling, request.key, request.drawn, request.room, sorted(stop)
            )
            | {"stream_interval": 1 if sampling.stop_strings else _CHUNK}
            for request in running
        ]
        return self._engine.generate(
            input_ids=[request.prompt for request in running],
            sampling_params=params,
            rid=[request.number for request in running],
            return_logprob=True,
            top_logprobs_num=self._worker.TOP,
            custom_logit_processor=self._processor,
            stream=True,
        )

    def _take(
        self, output: dict[str, Any], running: dict[str, EngineRequest], rule: StopRule
    ) -> int:
        """Append reported tokens; return 1 if they end a completion. Its last message removes it from `running`."""
        meta = output["meta_info"]
        ended = False
        request = running[meta["id"]]
        finish = meta["finish_reason"]
        if request.reason is None:
            request.reported = meta.get("output_top_logprobs", ())
            # SGLang's own lists grow, so they may hold more tokens than this message reports.
            tokens = output["output_ids"][len(request.own) : meta["completion_tokens"]]
            ended = request.take(tokens, int(meta["weight_version"]), rule, time.time())
        if finish is not None:
            if request.reason is None:
                raise BurnishError(
                    "SGLang ended a completion that is not complete",
                    have=finish,
                    want="the maximum length, or a token that ends it",
                    do="set rollout.engine=builtin",
                )
            spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
            starts = [(int(span["version"]), int(span["start"])) for span in spans]
            request.versions = [span for span in starts if span[1] < len(request.own)]
            del running[request.number]
        elif ended:
            self._call(self._manager.abort_request, request.number)
        return int(ended)

    def _update(self, tensors: Sequence[tuple[str, Tensor]], **options: str) -> None:
        serialize = import_module("sglang.srt.utils").MultiprocessingSerializer.serialize
        update = self._messages.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[serialize(tensors) for _ in range(self._tensor_parallel)],
            flush_cache=False,
            **options,
        )
        self._require_success(self._run(self._manager.update_weights_from_tensor(update)))

    def _read_back(self, name: str, path: Path) -> Tensor | None:
        parent = name.rpartition(".")[0].rpartition(".")[0]
        near = {n: s.shape for n, s in self._specs.items() if n.startswith(parent)}
        question = {"name": name, "path": str(path), "shapes": near}
        path.unlink(missing_ok=True)
        self._update([(json.dumps(question), torch.empty(0))], load_format=_READ_BACK)
        return load_file(path)["tensor"] if path.exists() else None

    def _require_success(self, answer: tuple[bool, str]) -> None:
        if not answer[0]:
            raise IncompatibleError(
                "SGLang refuses the new weights",
                have=answer[1],
                do="set rollout.engine=builtin, and report this model",
            )

    def _run(self, coroutine: Any) -> Any:
        return self._engine.loop.run_until_complete(coroutine)

    def _call(self, function: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Call a function in SGLang's event loop, which its sockets belong to."""

        async def call() -> None:
            function(*arguments, **keywords)

        self._run(call())


def _launch(engine: Any, **options: Any) -> Any:
    """Start SGLang but keep the old SIGTERM handler, which SGLang replaces at its first call."""
    before = signal.getsignal(signal.SIGTERM)
    launched = engine(**options)
    launched.flush_cache()
    if threading.current_thread() is threading.main_thread():
        launched.loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
    return launched
