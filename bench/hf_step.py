"""A peer of `bench.gpu`: a plain loop with transformers' model and torch's AdamW. Runs under any Python that has both.

Settings: `model` (a path), `length` (of every sequence), `rows` (sequences per forward and backward pass), `passes`
(per step), `lr`, `weights_dtype` (of the model and so of AdamW: float32 computes in bf16 by autocast, bfloat16 is bf16
throughout), `checkpointing`. An answer has `seconds`, and the number of `tokens` trained on.
"""

from __future__ import annotations

import time
from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from transformers import Qwen3ForCausalLM  # noqa: E402


class Plain:
    """A model, its optimizer and random tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._settings = settings
        dtype = getattr(torch, settings["weights_dtype"])
        self._model = Qwen3ForCausalLM.from_pretrained(settings["model"], dtype=dtype)
        self._model.to(self._device).train()
        if settings["checkpointing"]:
            self._model.gradient_checkpointing_enable()
        parameters = self._model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=settings["lr"], fused=True)
        shape = (settings["rows"], settings["length"])
        self._ids = torch.randint(2, self._model.config.vocab_size, shape, device=self._device)

    def step(self) -> tuple[float, int]:
        """Take one step. Return its seconds, and the number of tokens trained on."""
        start = self._now()
        passes = self._settings["passes"]
        for _ in range(passes):
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
            (loss / passes).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._now() - start, passes * self._ids.numel()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


if __name__ == "__main__":
    plain = Plain(TURNS.next())
    TURNS.answer(ready=True)
    while True:
        TURNS.next()
        seconds, tokens = plain.step()
        TURNS.answer(seconds=seconds, tokens=tokens)
