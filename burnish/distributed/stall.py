"""Report on all ranks why a run stands still, then end it (`distributed.stall_seconds`).

In each rank a thread watches the main thread. The rank moves if its stack differs from those seen
lately, if a phase begins or ends, or if a progress bar advances. A rank that stands still alarms
rank 0's relay, which asks every rank.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from burnish.distributed.device import current_device, total_memory, used_memory
from burnish.tracking import logs

# Modules whose frames do not show a rank's work. _Frames of Python's standard library do not either.
_MACHINERY = ("torch", "burnish.distributed", "burnish.boxes")
# Number of stacks to remember. A loop that only waits repeats a few stacks.
_REMEMBERED = 16
_TICK_SECONDS = 5.0
_LONGEST_PAUSE = 60.0
_LONGEST_ANSWER = 30.0
_WRITING_SECONDS = 2.0
SHARE_OF_TIMEOUT = 0.9
"""Share of a collective's time-out after which ranks report."""
_MOST_GROUPS = 64
_MOST_RECORDED = 3
_COLLECTIVE = re.compile(
    r"_?(all_|reduce|broadcast|barrier|monitored_barrier|gather|scatter|send|recv)"
)
# Torch's functions that return the flight records of NCCL and of other backends.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_WRAPPERS = "torch.distributed.c10d_logger"

Answer = dict[str, Any]
"""A rank's report about itself, as JSON."""
_Frames = Sequence[tuple[FrameType, int]]
"""Frames and their line numbers, the innermost last."""
Process = tuple[str, int]
"""A rank's host name and process id."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """How long ranks may stand still."""

    stall: float
    """Seconds after which the run ends if no rank moves; 0: never."""
    timeout: float = math.inf
    """Seconds after which a collective fails. Shortly before, rank 0 reports on all ranks, and the run goes on."""

    @property
    def first(self) -> float:
        """Seconds after which a rank that stands still sends an alarm."""
        return min(self.stall or math.inf, SHARE_OF_TIMEOUT * self.timeout)

    @property
    def pause(self) -> float:
        """Seconds between two questions to all ranks."""
        return min(_LONGEST_PAUSE, self.first / 10)

    @property
    def answer(self) -> float:
        """Seconds within which a rank has to answer."""
        return min(_LONGEST_ANSWER, max(2.0, self.first / 10))


NO_LIMITS = StallLimits(0.0)


class Watchdog(threading.Thread):
    """Watches whether the main thread moves; if not, repeatedly calls `alarm` with the seconds."""

    def __init__(self, limits: StallLimits, alarm: Callable[[float], None]) -> None:
        super().__init__(name="burnish-watchdog", daemon=True)
        self._main = threading.get_ident()
        self._alarm = alarm
        self._limits = limits
        self._tick = min(_TICK_SECONDS, limits.first / 8)
        self._stopped = threading.Event()
        self._seen: deque[int] = deque(maxlen=_REMEMBERED)
        self._moves = 0
        self._phase = ""
        self._moved_at = self._phase_at = time.monotonic()
        self._device = current_device()  # another thread's current device is the first

    def run(self) -> None:
        """Look at the main thread until `stop`."""
        looked_at = time.monotonic()
        while not self._stopped.wait(self._tick):
            now = time.monotonic()
            if now - looked_at > 4 * self._tick + 1:  # the process was suspended
                self._moved_at = now
            looked_at = now
            if (still := self._still(now)) >= self._limits.first:
                self._alarm(still)

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()

    def _still(self, now: float) -> float:
        spans = logs.spans()
        frame = sys._current_frames().get(self._main)
        if spans is None:  # the run has not begun
            self._moved_at = now
            return 0.0
        if spans.path != self._phase:
            self._phase = spans.path
            self._phase_at = now
        places = [(id(each.f_code), each.f_lasti) for each, _ in traceback.walk_stack(frame)]
        place = hash(tuple(places)) if frame is not None else 0
        if spans.moves != self._moves or place not in self._seen:
            self._moves = spans.moves
            self._moved_at = now
            self._seen.append(place)
        return now - self._moved_at

    def answer(self) -> Answer:
        """Return where this process is."""
        frames = sys._current_frames()
        spans = logs.spans()
        stack = stack_of(frames.get(self._main))
        if stack and stack[-1][0].f_code.co_name == "_engine_run_backward":
            # An accelerator's backward pass runs in threads of torch.
            ours = {each.ident for each in threading.enumerate()}
            for thread, frame in frames.items():
                stack += [] if thread in ours else stack_of(frame)
        now = time.monotonic()
        codes = [(each.f_code, line) for each, line in stack]
        return {
            "still": now - self._moved_at,
            "step": None if spans is None else spans.step,
            "phase": self._phase,
            "since": now - self._phase_at,
            "stack": [f'File "{c.co_filename}", line {n}, in {c.co_qualname}' for c, n in codes],
            "waits": _waits(frames.values()),
            "place": place_of_work(stack),
            "collective": _collective(stack),
        }

    def memory(self) -> Answer:
        """Return the used memory, and the collectives that torch has running. May hang with the device."""
        device = self._device
        try:
            memory = f"{used_memory(device) / 1e9:.2f} of {total_memory(device) / 1e9:.2f} GB"
        except RuntimeError as error:
            memory = str(error)
        return {"memory": f"{device.type}: {memory}", "recorded": _recorded()}


def stack_of(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return a frame and its callers, the outermost first."""
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_machinery(frame: FrameType) -> bool:
    name = _module(frame)
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return True
    return any(name == each or name.startswith(each + ".") for each in _MACHINERY)


def place_of_work(stack: _Frames) -> str:
    """Return the innermost frame that shows a rank's work."""
    for frame, line in reversed(stack):
        if not _is_machinery(frame):
            where = f"{Path(frame.f_code.co_filename).name} line {line}"
            return f"{_module(frame)}.{frame.f_code.co_qualname} ({where})"
    return "no code of its own"


def _collective(stack: _Frames) -> str:
    """Return the collective that the innermost frames call, with FSDP's layer."""
    inner = list(takewhile(lambda each: _is_machinery(each[0]), reversed(stack)))
    of_torch = [each for each, _ in inner if _module(each).startswith("torch.distributed")]
    names = [each.f_code.co_name for each in of_torch if _module(each) != _WRAPPERS]
    if not names:
        return ""
    name = next(filter(_COLLECTIVE.match, names), names[0]).strip("_")
    layers = (getattr(each.f_locals.get("self"), "_module_fqn", None) for each in of_torch)
    layer = next(filter(None, layers), None)
    return f"{name} of {layer}" if layer else name


def _waits(threads: Collection[FrameType]) -> str:
    """Return the answers of our objects that have a method `waits_for`."""
    owners: dict[int, Any] = {}
    for thread in threads:
        for frame, _ in stack_of(thread):
            owner = frame.f_locals.get("self") if _module(frame).startswith("burnish.") else None
            if hasattr(owner, "waits_for"):
                owners[id(owner)] = owner
    answers = []
    for owner in owners.values():
        with suppress(OSError, ValueError):  # the owner has stopped waiting
            answers.append(owner.waits_for())
    return "; ".join(filter(None, answers))


def _recorded() -> str:
    running: list[str] = []
    for name in _RECORDERS:
        with suppress(AttributeError, RuntimeError, ValueError, KeyError):  # some builds lack it
            entries = json.loads(getattr(torch._C._distributed_c10d, name)()).get("entries", [])
            running += [
                f"{each['profiling_name']} number {each['collective_seq_id']} of group {each['process_group'][-1]} ({each['state']})"
                for each in entries
                if not each["retired"]
            ]
    return ", ".join(running[:_MOST_RECORDED])


def process_state(process: Process) -> str:
    """Return the kernel's state of a sibling process, such as "T (stopped)"."""
    with suppress(OSError):
        status = Path(f"/proc/{process[1]}/status").read_text()
        state = re.search(rf"^State:\t(.*)$[^$]*^PPid:\t{os.getppid()}$", status, re.M)
        return state[1] if state and process[0] == socket.gethostname() else ""
    return ""


def end_silent(*processes: Process) -> None:
    """Kill sibling processes that cannot end by themselves."""
    for process in processes:
        if process_state(process):
            with suppress(OSError):
                os.kill(process[1], signal.SIGKILL)


def likely_cause(answers: Mapping[int, Answer], silent: Mapping[int, str]) -> tuple[int, str]:
    """Return the rank that most probably holds up the others, and a sentence on each rank.

    `silent` has process states of ranks that do not answer.
    """
    groups: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, state in silent.items():
        why = f"process {state}" if state else "stopped, or C code holds the interpreter"
        groups[0, f"not answering: {why}"].append(rank)
    for rank, answer in answers.items():
        # A rank's device may wait for a collective while its host code is elsewhere.
        collective = answer["collective"] or (not answer["waits"] and answer.get("recorded"))
        if collective:
            groups[2, f"waiting in {collective} called by {answer['place']}"].append(rank)
        else:
            groups[1, f"in {answer['waits'] or answer['place']}"].append(rank)
    # Of several groups of a kind, the smallest is the odd one out.
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1])))
    sentences = []
    for (kind, text), ranks in ordered:
        verbs = ("has been", "have been") if kind else ("is", "are")
        seconds = f" for {max(answers[rank]['still'] for rank in ranks):.0f} s" if kind else ""
        sentences.append(f"{_named(ranks)} {verbs[len(ranks) > 1]} {text}{seconds}")
    return ordered[0][1][0], "; ".join(sentences)


def _named(ranks: Collection[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def stall_report(
    summary: str,
    answers: Mapping[int, Answer],
    silent: Mapping[int, str],
    processes: Mapping[int, Process],
) -> str:
    """Return the summary, then each group of ranks with one stack, small groups first."""
    lines = [f"burnish: {summary}"]
    for rank, state in sorted(silent.items())[:_MOST_GROUPS]:
        where = f"host {processes[rank][0]}, pid {processes[rank][1]}"
        lines.append(f"  rank {rank} ({where}) does not answer; its process: {state or 'not seen'}")
    stacks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, each in answers.items():
        stacks["\n      ".join(each["stack"])].append(rank)
    for stack, ranks in sorted(stacks.items(), key=lambda each: len(each[1]))[:_MOST_GROUPS]:
        first = answers[ranks[0]]
        at = f"step {first['step']}, {first['phase'] or 'no phase'} for {first['since']:.0f} s"
        where = f"host {processes[ranks[0]][0]}, pid {processes[ranks[0]][1]}"
        lines.append(f"  {_named(ranks)} ({where}): {at}, unmoved for {first['still']:.0f} s")
        facts = {
            "waits for": first["waits"],
            "collective": first["collective"],
            "recorded by torch": first.get("recorded", ""),
            "memory": first.get("memory", "the device does not answer"),
            "stack": f"\n      {stack}",
        }
        lines += [f"    {name}: {text}" for name, text in facts.items() if text]
    return "\n".join(lines)


def publish(text: str, *, aloud: bool = True) -> None:
    """Write to this rank's log, and `aloud` to standard error. Either may hang, so wait at most two seconds."""

    def write() -> None:
        with suppress(OSError):  # standard error may be closed
            if aloud:
                os.write(2, f"\n{text}\n".encode())
        logs.add(text)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_WRITING_SECONDS)


@contextmanager
def watching_alone(stall_seconds: float) -> Iterator[None]:
    """End a run of one process, with a report, if it does not move."""

    def end(still: float) -> None:
        answers = {0: watchdog.answer()}
        asking = threading.Thread(target=lambda: answers[0].update(watchdog.memory()), daemon=True)
        asking.start()  # the device may hang
        asking.join(_WRITING_SECONDS)
        _, cause = likely_cause(answers, {})
        summary = f"nothing has moved for {still:.0f} s: {cause}"
        publish(stall_report(summary, answers, {}, {0: (socket.gethostname(), os.getpid())}))
        os._exit(1)

    watchdog = Watchdog(StallLimits(stall_seconds), end)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
