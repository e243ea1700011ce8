"""What computes: requests in batches, keys and values that stay, weights that change."""

from __future__ import annotations

import copy
import importlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import Told
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from burnish.models.names import model_shards

MEMORY = ("kv_cache", "weights", "cuda_graph")
STEPS_BEFORE_A_PAUSE = 2
"""The scheduler goes on until a message gets to it."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(eq=False)
class Req:
    rid: str
    origin_input_ids: list[int]
    sampling_params: SamplingParams
    top_logprobs_num: int
    custom_logit_processor: str | None
    stream: bool
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, None]] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int, None]]] = field(default_factory=list)
    cache: Any = None
    sent: int = 0
    to_finish: dict[str, object] | None = None
    finished_reason: dict[str, object] | None = None
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Old versions of the weights, each with the number of tokens when it ended."""

    def __post_init__(self) -> None:
        params = self.sampling_params
        if self.custom_logit_processor is not None and params.custom_params is not None:
            self.sampling_params = params = copy.copy(params)
            params.custom_params = params.custom_params | {"__req__": weakref.proxy(self)}

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids


class Model:
    """A model of transformers, under the names of SGLang's."""

    def __init__(self, directory: str, dtype: str) -> None:
        self.config = AutoConfig.from_pretrained(directory)
        kind = getattr(importlib.import_module("transformers"), self.config.architectures[0])
        assert issubclass(kind, AutoModelForCausalLM._model_mapping[type(self.config)])
        self.network = kind._from_config(self.config, dtype=getattr(torch, dtype)).eval()
        self.views = {shard.spec.name: shard.tensor for shard in model_shards(self.network)}

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Names that it does not know are skipped, as SGLang's models do."""
        for name, tensor in weights:
            if name in self.views:
                self.views[name].copy_(tensor)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.views.items():
            owner, _, kind = name.rpartition(".")
            parent, _, last = owner.rpartition(".")
            one = next((one for one, parts in JOINED.items() if last in parts), None)
            if ".experts." in name:
                continue
            if one is None:
                yield name, tensor
            elif last == JOINED[one][0]:
                parts = [self.views[f"{parent}.{part}.{kind}"] for part in JOINED[one]]
                yield f"{parent}.{one}.{kind}", torch.cat(parts)


class Scheduler:
    def __init__(self, args: Any, model: Model, context_len: int) -> None:
        self.args, self.model = args, model
        self.max_req_len = context_len - 1
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.radix: dict[tuple[int, ...], Any] = {}
        self.paused, self.session = False, False
        self.weight_version = "default"
        self.offloaded: set[str] = set()
        self.outbox: list[Told] = []

    # Messages

    def receive(self, message: Any) -> Any:
        return getattr(self, type(message).__name__)(message)

    def add(self, req: Req) -> None:
        params, room = req.sampling_params, self.max_req_len - len(req.origin_input_ids) - 1
        params.max_new_tokens = max(0, min(params.max_new_tokens or 1 << 30, room))
        self.waiting.append(req)

    def AbortReq(self, message: io_struct.AbortReq) -> None:
        def meant(req: Req) -> bool:
            return message.abort_all or req.rid.startswith(message.rid)

        for req in filter(meant, list(self.waiting)):
            self.waiting.remove(req)
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            spans = self._spans(req) if req.output_ids else None
            self.outbox.append(Told(rid=req.rid, finish_reason=reason, completion_tokens=req.sent, weight_versions=spans))  # fmt: skip
        for req in filter(meant, self.running):
            req.to_finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}  # fmt: skip

    def PauseGenerationReqInput(self, message: io_struct.PauseGenerationReqInput) -> None:
        assert message.mode in ("in_place", "retract")
        for _ in range(STEPS_BEFORE_A_PAUSE):
            self.step()
        self.paused = True
        if message.mode == "retract":
            for req in self.running:
                self._keep(req)
            self.waiting = self.running + self.waiting
            self.running = []

    def ContinueGenerationReqInput(self, message: io_struct.ContinueGenerationReqInput) -> None:
        self.paused = False

    def FlushCacheReqInput(self, message: Any) -> io_struct.FlushCacheReqOutput:
        if self.running or (self.waiting and not self.paused):
            return io_struct.FlushCacheReqOutput(success=False, message="pending requests")
        self.radix.clear()
        return io_struct.FlushCacheReqOutput(success=True)

    def BeginWeightUpdateReqInput(self, message: Any) -> tuple[bool, str]:
        if self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return True, "Success"

    def EndWeightUpdateReqInput(self, message: Any) -> tuple[bool, str]:
        if not self.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return True, "Success"

    @torch.no_grad()
    def UpdateWeightsFromTensorReqInput(
        self, message: io_struct.UpdateWeightsFromTensorReqInput
    ) -> tuple[bool, str]:
        if not self.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"  # fmt: skip
        assert "weights" not in self.offloaded, "there is no memory for weights"
        assert len(message.serialized_named_tensors) == self.args.tp_size
        named = MultiprocessingSerializer.deserialize(message.serialized_named_tensors[0])
        if message.load_format is None:
            self.model.load_weights(named)
        elif message.load_format in (self.args.custom_weight_loader or ()):
            module, _, name = message.load_format.rpartition(".")
            getattr(importlib.import_module(module), name)(self.model, named)
        else:
            raise NotImplementedError(f"Unknown load_format={message.load_format}")
        new = message.weight_version
        if new is not None and new != self.weight_version:
            for req in (*self.running, *self.waiting):
                if req.output_ids:
                    req.versions.append((self.weight_version, len(req.output_ids)))
            self.weight_version = new
        if message.flush_cache and not self.FlushCacheReqInput(None).success:
            return False, "Weights were updated, but the cache was not flushed"
        return True, "Success"

    @torch.no_grad()
    def ReleaseMemoryOccupationReqInput(self, message: Any) -> None:
        assert not self.running, "should be called only when server is idle."
        self.offloaded |= {*(message.tags or MEMORY)}
        if "weights" in self.offloaded and self.args.enable_memory_saver:
            for tensor in self.model.views.values():
                tensor.fill_(torch.nan)
        self.radix.clear()

    def ResumeMemoryOccupationReqInput(self, message: Any) -> None:
        for tag in message.tags or MEMORY:
            self.offloaded.remove(tag)

    # Tokens

    @property
    def is_idle(self) -> bool:
        return self.paused or not (self.waiting or self.running)

    @torch.no_grad()
    def step(self) -> None:
        """A prefill of those that wait, or a token for those that run."""
        if self.is_idle:
            return
        assert not self.offloaded, f"there is no memory for {self.offloaded}"
        room = self.args.max_running_requests - len(self.running)
        batch, self.waiting = self.waiting[:room], self.waiting[room:]
        if batch:
            logits = [self._prefill(req) for req in batch]
            self.running += batch
        else:
            batch = list(self.running)
            logits = [self._forward(req.cache, req.tokens[-1:]) for req in batch]
        self._sample(torch.stack(logits), batch)
        for req in batch:
            self._end(req)
            self._send(req)
            if req.finished_reason is not None:
                self.running.remove(req)
                self._keep(req)

    def _prefill(self, req: Req) -> Tensor:
        tokens = req.tokens
        known = [key for key in self.radix if list(key) == tokens[:-1][: len(key)]]
        key = max(known, key=len, default=())
        if self.args.disable_radix_cache or not key:
            req.cache, key = DynamicCache(config=self.model.config), ()
        else:
            req.cache = copy.deepcopy(self.radix[key])
        if len(key) < len(tokens) - 1:
            self._forward(req.cache, tokens[len(key) : -1])
            self.radix[tuple(tokens[:-1])] = copy.deepcopy(req.cache)
        return self._forward(req.cache, tokens[-1:])

    def _forward(self, cache: Any, tokens: list[int]) -> Tensor:
        out = self.model.network(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def _keep(self, req: Req) -> None:
        """Keep keys and values of what a request has read."""
        if req.cache is not None:
            self.radix[tuple(req.tokens[:-1])] = req.cache
        req.cache = None

    def _sample(self, logits: Tensor, batch: list[Req]) -> None:
        by_processor: dict[str, list[int]] = {}
        for row, req in enumerate(batch):
            if req.custom_logit_processor and self.args.enable_custom_logit_processor:
                by_processor.setdefault(req.custom_logit_processor, []).append(row)
        for text, rows in by_processor.items():
            late = {}
            if not self.args.disable_overlap_schedule:  # the last token is not known yet
                late = {row: batch[row].output_ids.pop() for row in rows if batch[row].output_ids}
            params = [batch[row].sampling_params.custom_params for row in rows]
            indices = torch.tensor(rows)
            result = CustomLogitProcessor.from_str(text)(logits.index_select(0, indices), params)
            for row, token in late.items():
                batch[row].output_ids.append(token)
            logits.index_copy_(0, indices, result.to(logits.dtype))
        assert all(req.sampling_params.top_k <= 1 for req in batch), "only greedily here"
        tokens = logits.argmax(-1)
        logprobs = logits.log_softmax(-1).clamp_(min=torch.finfo(logits.dtype).min)
        for row, (req, token) in enumerate(zip(batch, tokens.tolist(), strict=True)):
            req.output_ids.append(token)
            req.logprobs.append((float(logprobs[row, token]), token, None))
            if req.top_logprobs_num:
                values, ids = logprobs[row].topk(req.top_logprobs_num)
                pairs = zip(values.tolist(), ids.tolist(), strict=True)
                req.top_logprobs.append([(*pair, None) for pair in pairs])

    def _end(self, req: Req) -> None:
        params, token = req.sampling_params, req.output_ids[-1]
        eos = self.model.config.eos_token_id
        ends = {*(params.stop_token_ids or ()), *([eos] if isinstance(eos, int) else eos or [])}
        if req.to_finish is not None:
            req.finished_reason = req.to_finish
        elif token in ends and not params.ignore_eos:
            req.finished_reason = {"type": "stop", "matched": token}
        elif len(req.output_ids) >= (params.max_new_tokens or 0):
            req.finished_reason = {"type": "length", "length": params.max_new_tokens}

    def _send(self, req: Req) -> None:
        interval = req.sampling_params.stream_interval or self.args.stream_interval
        unsent, over = len(req.output_ids) - req.sent, req.finished_reason is not None
        if over or (req.stream and (unsent >= interval or req.sent == 0)):
            self.outbox.append(
                Told(
                    rid=req.rid,
                    finish_reason=req.finished_reason,
                    completion_tokens=len(req.output_ids),
                    output_ids=req.output_ids[req.sent :],
                    logprobs=req.logprobs[req.sent :],
                    top_logprobs=req.top_logprobs[req.sent :],
                    weight_versions=self._spans(req) if over else None,
                )
            )
            req.sent = len(req.output_ids)

    def _spans(self, req: Req) -> list[dict[str, object]]:
        count, spans, start = len(req.output_ids), [], 0
        for version, end in (*req.versions, (self.weight_version, count)):
            if end > start:
                spans.append({"version": version, "start": start, "end": end})
                start = end
        return spans
