"""Messages to the scheduler."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class PauseGenerationReqInput:
    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass(kw_only=True)
class ContinueGenerationReqInput:
    torch_empty_cache: bool = True


@dataclass(kw_only=True)
class BeginWeightUpdateReqInput:
    selector: str = "all"


@dataclass(kw_only=True)
class EndWeightUpdateReqInput:
    pass


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: str = "all"
    torch_empty_cache: bool = False


@dataclass(kw_only=True)
class FlushCacheReqInput:
    timeout_s: float | None = None


@dataclass(kw_only=True)
class FlushCacheReqOutput:
    success: bool
    message: str = ""


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass(kw_only=True)
class AbortReq:
    rid: str = ""
    abort_all: bool = False


@dataclass(kw_only=True)
class Told:
    """What the scheduler says of a request: what is new of tokens and log-probs, and how it ended."""

    rid: str
    finish_reason: dict[str, object] | None
    completion_tokens: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, None]] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int, None]]] = field(default_factory=list)
    weight_versions: list[dict[str, object]] | None = None
