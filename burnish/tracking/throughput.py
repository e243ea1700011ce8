"""How well a step used the machine, from plain numbers.

Left out: counting flops and measuring peaks (`burnish.models`), and asking the device for its memory.
"""

from __future__ import annotations

_GIGABYTE = 1e9


def throughput(
    *,
    tokens: int,
    seconds: float,
    flops: float | None = None,
    peak_flops_per_s: float | None = None,
    max_memory_bytes: int | None = None,
    imbalance: float | None = None,
) -> dict[str, float]:
    """`perf/tokens_per_s`, and `perf/mfu`, `perf/max_memory_gb` and `perf/imbalance` where what they need is known.

    `tokens` is the total over all ranks for work that took `seconds`. `flops` and
    `peak_flops_per_s` are of the same devices, one rank's or those of all ranks together: model FLOPs
    utilisation is flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B). A gigabyte is 10⁹ bytes.
    `imbalance` is what the costliest rank takes over what the mean of the ranks takes. No rate is given for 0 seconds.
    """
    values: dict[str, float] = {}
    if seconds > 0:
        values["perf/tokens_per_s"] = tokens / seconds
        if flops is not None and peak_flops_per_s:
            values["perf/mfu"] = flops / (seconds * peak_flops_per_s)
    if max_memory_bytes is not None:
        values["perf/max_memory_gb"] = max_memory_bytes / _GIGABYTE
    if imbalance is not None:
        values["perf/imbalance"] = imbalance
    return values
