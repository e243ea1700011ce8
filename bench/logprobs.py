"""Log-probs and entropy without holding the logits, beside plain `log_softmax`: speed and memory.

    python -m bench.logprobs [--json] [--rounds N] [--vocabularies 4096 32768 152064] [--tokens 2048] [--chunk 1024] [--threads 2] [--clock wall|cpu]

Both sides get the same hidden states, output weight and targets in bf16. They return the log-prob of each target in fp32, and the
gradients of hidden states and weight. The plain side is `(hidden @ weight.T).float().log_softmax(-1)` and a gather, without
entropy. Ours (`burnish.models.logprobs`) computes the entropy too, without its gradient. The sides take turns; the ratio of speed
is the median over rounds of the plain side's time over ours. `forward` is without gradients, as for old log-probs.
On a machine that others use at the same time, `--threads 1 --clock cpu` compares the processor time.

Memory is the peak that torch's allocator reported to the profiler, beyond the inputs, forward and
backward, in megabytes of 10^6 bytes. Its limit is a chunk and the output: the logits of one chunk in bf16, the part of them that
is in fp32 at one time on a CPU, and the gradients. With several chunks, the weight's gradient is summed in fp32. Added are
4 bytes for each of a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.machine import Result, command_line, interleaved, ratio, report
from bench.peers import CLOCKS
from burnish.models.logprobs import LogprobOptions, token_logprobs

HIDDEN = 1024
CACHED = 1 << 21
"""Bytes of a chunk that our side has in fp32 at one time on a CPU. An operation's input and result may exist together."""
COPIES = 4
NUMBERS = 16
"""fp32 numbers for each token: target, four sums, log-prob, entropy, saved tensors, and the gradients of these."""
Pass = Callable[[], object]


@dataclass(frozen=True)
class Inputs:
    """An output layer and its inputs."""

    hidden: Tensor
    """[T, H] bf16."""
    weight: Tensor
    """[V, H] bf16."""
    targets: Tensor
    """[T]."""
    chunk: int
    """Number of rows whose logits our side holds at one time."""

    @classmethod
    def of(cls, tokens: int, vocabulary: int, chunk: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        weight = (torch.randn(vocabulary, HIDDEN, generator=generator) * 0.02).bfloat16()
        targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk)

    def limit(self, *, backward: bool) -> float:
        """Return the bytes of a chunk and the output."""
        (tokens, width), vocabulary = self.hidden.shape, len(self.weight)
        chunk = 2 * self.chunk * vocabulary
        fp32 = COPIES * max(CACHED, 4 * vocabulary)
        numbers = 4 * NUMBERS * tokens
        if not backward:
            return chunk + fp32 + numbers
        of_hidden = 2 * 2 * tokens * width  # for the used rows alone, and for all rows
        summed = 4 if tokens > self.chunk else 0
        of_weight = (summed + 2) * vocabulary * width  # the sum, and a chunk's or the result
        rows = 2 * tokens * width  # the hidden states of the used rows
        return chunk + fp32 + numbers + rows + of_hidden + of_weight


def ours(inputs: Inputs) -> Tensor:
    options = LogprobOptions(chunk=inputs.chunk)
    return token_logprobs(inputs.hidden, inputs.weight, inputs.targets, options)[0]


def plain(inputs: Inputs) -> Tensor:
    scores = (inputs.hidden @ inputs.weight.T).float().log_softmax(dim=-1)
    return scores.gather(1, inputs.targets[:, None])[:, 0]


def forward(side: Callable[[Inputs], Tensor], inputs: Inputs) -> Pass:
    def run() -> None:
        with torch.no_grad():
            side(inputs)

    return run


def forward_backward(side: Callable[[Inputs], Tensor], inputs: Inputs) -> Pass:
    def run() -> None:
        torch.autograd.grad(side(inputs).sum(), [inputs.hidden, inputs.weight])

    return run


def peak(run: Pass) -> int:
    """Return the most bytes that were allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([0, *(event.nbytes() for event in events)]).max())


def measure(inputs: Inputs, rounds: int, clock: Callable[[], float]) -> list[Result]:
    results: list[Result] = []
    for name, passes in (("forward", forward), ("forward-backward", forward_backward)):
        sides = {"ours": passes(ours, inputs), "plain": passes(plain, inputs)}
        seconds = interleaved(sides, rounds, clock)
        mine, theirs = (1e3 * median(seconds[side]) for side in sides)
        quicker = ratio(seconds["plain"], seconds["ours"])
        label = f"logprobs/{len(inputs.weight)}/{name}"
        results.append(Result(label, mine, theirs, None, "ms", quicker, 1.0))
        held, of_plain = (peak(run) / 1e6 for run in sides.values())
        limit = inputs.limit(backward=passes is forward_backward) / 1e6
        results.append(Result(f"{label}/memory", held, of_plain, limit, "MB", limit / held, 1.0))
    return results


def main() -> None:
    parser = command_line(__doc__, rounds=7, threads=2, clock="wall")
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[4096, 32768, 152064])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: list[Result] = []
    for vocabulary in arguments.vocabularies:
        inputs = Inputs.of(arguments.tokens, vocabulary, arguments.chunk)
        results += measure(inputs, arguments.rounds, CLOCKS[arguments.clock])
    report(results, arguments.json)


if __name__ == "__main__":
    main()
