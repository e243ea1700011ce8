"""Sampling parameters of a request."""

from dataclasses import dataclass
from typing import Any

TOP_K_ALL = 1 << 30
SCALARS = (type(None), bool, int, float, str)


@dataclass(kw_only=True)
class SamplingParams:
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: Any = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    ignore_eos: bool = False
    stream_interval: int | None = None
    custom_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop_token_ids = {int(t) for t in self.stop_token_ids or ()} or None
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        for value in (self.custom_params or {}).values():
            parts = value if isinstance(value, list) else [value]
            if not all(isinstance(part, SCALARS) for part in parts):
                raise TypeError(f"cannot be sent: {value}")
            if any(isinstance(part, int) and not -(2**63) <= part < 2**64 for part in parts):
                raise OverflowError(f"cannot be sent: {value}")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
