"""Processors travel as text."""

import json
from abc import ABC, abstractmethod
from typing import Any

import dill
from torch import Tensor


class CustomLogitProcessor(ABC):
    @abstractmethod
    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        return json.dumps({"callable": dill.dumps(cls).hex()})

    @classmethod
    def from_str(cls, json_str: str) -> "CustomLogitProcessor":
        code = bytes.fromhex(json.loads(json_str)["callable"])
        made: CustomLogitProcessor = dill.loads(code)()  # noqa: S301
        return made
