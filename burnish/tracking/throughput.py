"""How well a step used the machine, from plain numbers.

Left out: counting flops (`burnish.models`), measuring peaks (`burnish.distributed.device`), and memory (`burnish.tracking.peaks`).
"""

from __future__ import annotations


def throughput(
    *,
    tokens: int,
    seconds: float,
    flops: float | None = None,
    peak_flops_per_s: float | None = None,
    imbalance: float | None = None,
) -> dict[str, float]:
    """`perf/tokens_per_s`, and `perf/mfu` and `perf/imbalance` where what they need is known.

    `tokens` is the total over all ranks for work that took `seconds`. `flops` and
    `peak_flops_per_s` are of the same devices, one rank's or those of all ranks together: model FLOPs
    utilisation is flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B).
    `imbalance` is what the costliest rank takes over what the mean of the ranks takes. No rate is given for 0 seconds.
    """
    values: dict[str, float] = {}
    if seconds > 0:
        values["perf/tokens_per_s"] = tokens / seconds
        if flops is not None and peak_flops_per_s:
            values["perf/mfu"] = flops / (seconds * peak_flops_per_s)
    if imbalance is not None:
        values["perf/imbalance"] = imbalance
    return values
