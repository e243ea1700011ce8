"""Log-probs and entropy without holding the logits, beside plain `log_softmax`: speed and memory.

    python -m bench.logprobs [--json] [--rounds N] [--vocabularies 4096 32768 152064] [--tokens 2048] [--chunk 1024] [--threads 2] [--clock wall|cpu]

Both sides get the same hidden states, output weight and targets in bf16, and give the log-prob of each target in fp32 with the
gradients of hidden states and weight. The plain side is `(hidden @ weight.T).float().log_softmax(-1)` and a gather, which has no
entropy; ours (`burnish.models.logprobs`) computes that too, of which no gradient is asked. Speed: the two take turns, and the ratio
is the median over rounds of the plain side's time over ours. `forward` is without gradients, as old log-probs are scored.
On a machine that others use at the same time, `--threads 1 --clock cpu` compares the processor time.

Memory is what torch's allocator gave out beyond the inputs at its highest (its own report to the profiler), forward and
backward, in megabytes of 10^6 bytes. Its limit is a chunk and the output: the logits of one chunk in bf16, what of them is in
fp32 at one time on a CPU, the gradients, of which that of the weight is summed in fp32 when there are several chunks, and
4 bytes for each of a few numbers of every token.
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
"""Bytes of fp32 that ours has of a chunk at one time on a CPU; an operation's result may be beside its input."""
COPIES = 4
NUMBERS = 16
"""fp32 numbers for each token: targets, four sums, log-prob, entropy, what is saved and the gradients of these."""
Pass = Callable[[], object]


@dataclass(frozen=True)
class Inputs:
    """One output layer and what it is given."""

    hidden: Tensor
    """[T, H] bf16."""
    weight: Tensor
    """[V, H] bf16."""
    targets: Tensor
    """[T]."""
    chunk: int
    """Rows whose logits ours has at one time."""

    @classmethod
    def of(cls, tokens: int, vocabulary: int, chunk: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        weight = (torch.randn(vocabulary, HIDDEN, generator=generator) * 0.02).bfloat16()
        targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk)

    def limit(self, *, backward: bool) -> float:
        """Bytes of a chunk and the output."""
        (tokens, width), vocabulary = self.hidden.shape, len(self.weight)
        chunk = 2 * self.chunk * vocabulary
        fp32 = COPIES * max(CACHED, 4 * vocabulary)
        numbers = 4 * NUMBERS * tokens
        if not backward:
            return chunk + fp32 + numbers
        of_hidden = 2 * 2 * tokens * width  # of the rows that take part, and at their places
        summed = 4 if tokens > self.chunk else 0
        of_weight = (summed + 2) * vocabulary * width  # the sum, and that of a chunk or the result
        rows = 2 * tokens * width  # the hidden states of the rows that take part
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
    """Most bytes that were allocated at one time."""
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
