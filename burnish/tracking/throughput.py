"""How well a step used the machine, from plain numbers."""

from __future__ import annotations


def throughput(
    *,
    tokens: int,
    seconds: float,
    flops: float | None = None,
    peak_flops_per_s: float | None = None,
    imbalance: float | None = None,
) -> dict[str, float]:
    """Return `perf/tokens_per_s`, and `perf/mfu` and `perf/imbalance` if their inputs are known.

    `tokens` is the total over all ranks in `seconds`. `flops` and `peak_flops_per_s` belong to the same devices; MFU is
    flops / (seconds · peak) (PaLM, arXiv 2204.02311, appendix B). `imbalance` is the costliest rank over the mean.
    """
    values: dict[str, float] = {}
    if seconds > 0:
        values["perf/tokens_per_s"] = tokens / seconds
        if flops is not None and peak_flops_per_s:
            values["perf/mfu"] = flops / (seconds * peak_flops_per_s)
    if imbalance is not None:
        values["perf/imbalance"] = imbalance
    return values
