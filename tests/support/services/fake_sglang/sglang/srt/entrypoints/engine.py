"""SGLang without a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Model, Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager


@dataclass(kw_only=True)
class ServerArgs:
    """Those of its several hundred fields that Burnish gives, or that change what it gets."""

    model_path: str
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str | None = None
    base_gpu_id: int = 0
    tp_size: int = 1
    max_running_requests: int | None = None
    context_length: int | None = None
    random_seed: int | None = None
    mem_fraction_static: float | None = None
    enable_custom_logit_processor: bool = False
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    custom_weight_loader: list[str] | None = None
    enable_memory_saver: bool = False
    stream_interval: int = 1
    log_level: str = "info"


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        args = ServerArgs(**kwargs)
        assert args.skip_tokenizer_init, "there is no tokenizer"
        assert args.load_format == "dummy", "there are no weights"
        model = Model(args.model_path, args.dtype)
        derived = model.config.max_position_embeddings
        longest = args.context_length or derived
        allowed = os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == "1"
        if longest > derived and not allowed:
            raise ValueError("context_length is greater than the derived context_length")
        self.loop = asyncio.new_event_loop()
        scheduler = Scheduler(args, model, longest)
        self.tokenizer_manager = TokenizerManager(args, scheduler, longest)

    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        token_ids_logprob: Any = None,
        custom_logit_processor: str | None = None,
        stream: bool = False,
        rid: Any = None,
    ) -> Any:
        assert prompt is None, "there is no tokenizer"
        how = {
            "return_logprob": return_logprob,
            "top_logprobs_num": top_logprobs_num or 0,
            "custom_logit_processor": custom_logit_processor,
            "stream": stream,
        }
        found = self.tokenizer_manager.generate_requests(input_ids, sampling_params, rid, how)
        if not stream:
            return self.loop.run_until_complete(anext(found))

        def wrapper() -> Iterator[Any]:
            while True:
                try:
                    yield self.loop.run_until_complete(anext(found))
                except StopAsyncIteration:
                    break

        return wrapper()

    def _tell(self, message: Any, **how: Any) -> Any:
        return self.loop.run_until_complete(self.tokenizer_manager.tell(message, **how))

    def flush_cache(self) -> io_struct.FlushCacheReqOutput:
        found: io_struct.FlushCacheReqOutput = self._tell(io_struct.FlushCacheReqInput())
        return found

    def begin_weight_update(self, selector: str = "all") -> Any:
        return self._tell(io_struct.BeginWeightUpdateReqInput(selector=selector), updates=True)

    def end_weight_update(self) -> Any:
        return self._tell(io_struct.EndWeightUpdateReqInput(), updates=True)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._tell(io_struct.ReleaseMemoryOccupationReqInput(tags=tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._tell(io_struct.ResumeMemoryOccupationReqInput(tags=tags))

    def shutdown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
