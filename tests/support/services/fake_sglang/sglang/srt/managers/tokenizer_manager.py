"""What requests come to: sends them to the scheduler, and puts together what it says."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Req, Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

STEPS_AHEAD = 2
"""By how many steps the scheduler, which in SGLang is another process, is ahead of who reads what it says."""


@dataclass(eq=False)
class ReqState:
    stream: bool
    event: asyncio.Event = field(default_factory=asyncio.Event)
    out_list: list[dict[str, Any]] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    finished: bool = False


class TokenizerManager:
    def __init__(self, args: Any, scheduler: Scheduler, context_len: int) -> None:
        self.args, self.scheduler, self.context_len = args, scheduler, context_len
        self.rid_to_state: dict[str, ReqState] = {}
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.readers, self.no_readers = 0, asyncio.Condition()
        self.work = asyncio.Event()
        self.unread: set[str] = set()
        self.gracefully_exit = False
        self.weight_version = "default"

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is not None:
            return
        self.event_loop = loop = asyncio.get_running_loop()
        self.tasks.append(loop.create_task(self.handle_loop()))
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, self._sigterm)

    def _sigterm(self) -> None:
        self.gracefully_exit = True

    async def handle_loop(self) -> None:
        ahead = 0
        while True:
            self.work.clear()
            ahead = ahead + 1 if self.unread else 0
            if ahead > STEPS_AHEAD:
                await asyncio.sleep(0)
                continue
            if self.scheduler.is_idle and not self.scheduler.outbox:
                await self.work.wait()
            self.scheduler.step()
            self._deliver()
            await asyncio.sleep(0)

    def _deliver(self) -> None:
        told, self.scheduler.outbox = self.scheduler.outbox, []
        for each in told:
            state = self.rid_to_state[each.rid]
            state.output_ids.extend(each.output_ids)
            state.logprobs.extend(each.logprobs)
            state.top_logprobs.extend(each.top_logprobs)
            meta: dict[str, Any] = {
                "id": each.rid,
                "finish_reason": each.finish_reason,
                "weight_version": self.weight_version,
                "completion_tokens": each.completion_tokens,
                "output_token_logprobs": state.logprobs,
                "output_top_logprobs": state.top_logprobs,
            }
            if each.weight_versions is not None:
                meta["weight_versions"] = each.weight_versions
                meta["weight_version"] = each.weight_versions[-1]["version"]
            state.finished = each.finish_reason is not None
            ids = state.output_ids.copy() if state.finished else state.output_ids
            if state.finished:
                del self.rid_to_state[each.rid]
            if state.finished or state.stream:
                state.out_list.append({"output_ids": ids, "meta_info": meta})
                state.event.set()
                if state.stream:
                    self.unread.add(each.rid)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        self.readers += 1
        try:
            yield
        finally:
            async with self.no_readers:
                self.readers -= 1
                self.no_readers.notify_all()

    async def generate_requests(
        self, prompts: list[list[int]], params: list[dict[str, Any]], rids: list[str], how: Any
    ) -> AsyncIterator[Any]:
        self.auto_create_handle_loop()
        if len(rids) != len(prompts) or len(params) != len(prompts):
            raise ValueError("lengths mismatch with the batch_size for batch processing.")
        if len(set(rids)) != len(rids) or self.rid_to_state.keys() & set(rids):
            raise ValueError("Duplicate request IDs")
        states = {rid: ReqState(how["stream"]) for rid in rids}
        self.rid_to_state |= states
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        async with self._reading():
            for prompt, given, rid in zip(prompts, params, rids, strict=True):
                self._validate(prompt, given)
                self.scheduler.add(
                    Req(
                        rid,
                        list(prompt),
                        SamplingParams(**given),
                        how["top_logprobs_num"] if how["return_logprob"] else 0,
                        how["custom_logit_processor"],
                        how["stream"],
                    )
                )
            self.work.set()
            waiters = {asyncio.create_task(self._next(states[rid])): rid for rid in rids}
            ended = {}
            try:
                while waiters:
                    done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        rid, (out, over) = waiters.pop(task), task.result()
                        if how["stream"]:
                            self.unread.discard(rid)
                            yield out | {"index": rids.index(rid)}
                        if not over:
                            waiters[asyncio.create_task(self._next(states[rid]))] = rid
                        ended[rid] = out
            finally:
                for task in waiters:
                    task.cancel()
            if not how["stream"]:
                yield [ended[rid] for rid in rids]

    async def _next(self, state: ReqState) -> tuple[dict[str, Any], bool]:
        await state.event.wait()
        outs, state.out_list = state.out_list, []
        state.event.clear()
        return outs[-1], state.finished

    def _validate(self, prompt: list[int], given: dict[str, Any]) -> None:
        if len(prompt) >= self.context_len:
            raise ValueError(f"The input ({len(prompt)} tokens) is longer than the model's context")
        if len(prompt) + given.get("max_new_tokens", 0) > self.context_len:
            raise ValueError("Requested token count exceeds the model's maximum context length")

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        asyncio.get_running_loop()  # a socket of asyncio sends nothing outside of it
        if not abort_all and rid not in self.rid_to_state:
            return
        self.scheduler.receive(io_struct.AbortReq(rid=rid, abort_all=abort_all))
        self.work.set()

    async def pause_generation(self, obj: io_struct.PauseGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = True
            assert obj.mode != "abort"
            self.scheduler.receive(obj)
            self.work.set()

    async def continue_generation(self, obj: io_struct.ContinueGenerationReqInput) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            self.scheduler.receive(obj)
            self.work.set()
            self.is_pause_cond.notify_all()

    async def tell(self, obj: Any, *, updates: bool = False) -> Any:
        """Send a message and wait for the answer. An update waits for requests under way, unless they are paused."""
        self.auto_create_handle_loop()
        if updates and not self.is_pause:
            async with self.no_readers:
                await self.no_readers.wait_for(lambda: self.readers == 0)
        answer = self.scheduler.receive(obj)
        self.work.set()
        await asyncio.sleep(0)
        return answer

    async def update_weights_from_tensor(
        self, obj: io_struct.UpdateWeightsFromTensorReqInput, request: Any = None
    ) -> Any:
        answer = await self.tell(obj, updates=True)
        if answer[0] and obj.weight_version is not None:
            self.weight_version = obj.weight_version
        return answer
