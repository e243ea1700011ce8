"""End a completion: at a token id, a stop string, or its length.

The token that completes a stop string is kept: training sees whole tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.errors import UsageError
from burnish.records import StopReason
from burnish.rollout.base import Sampling

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, with or without special tokens."""

_MARGIN = 8
"""Characters decoded before the longest stop string, because tokenizers may alter a text's first ones."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopRule:
    """Decides when a completion has ended."""

    def __init__(
        self, sampling: Sampling, eos_token_ids: Sequence[int], decode: Decode | None
    ) -> None:
        """Raises `UsageError` for stop strings without `decode`, or an empty stop string."""
        if sampling.stop_strings and decode is None:
            raise UsageError(
                "stop strings need a tokenizer to decode with",
                have=f"stop strings {list(sampling.stop_strings)} and no decode function",
                do="give the generator a decode function, or use stop_token_ids",
            )
        if "" in sampling.stop_strings:
            have = list(sampling.stop_strings)
            raise UsageError("a stop string is empty", have=have, do="remove it")
        self._ids = frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)
        self._max_tokens = sampling.max_tokens
        self._strings, self._decode = sampling.stop_strings, decode or str
        self._endings = frozenset(string[-1] for string in self._strings)
        self._needed = max(map(len, self._strings), default=0) + _MARGIN
        self._candidates: dict[int, bool] = {}

    def ended(self, tokens: Sequence[int]) -> StopReason | None:
        """Return why the last of `tokens` ends them, or None. Call it after each token."""
        if tokens[-1] in self._ids:
            return "stop"
        if self._strings and self._may_complete(tokens[-1]):
            tail = self._tail(tokens)
            if any(string in tail for string in self._strings):
                return "stop"
        return "length" if len(tokens) >= self._max_tokens else None

    def _may_complete(self, token: int) -> bool:
        """Return whether the token can end with the last character of a stop string.

        True for tokens that are no text alone, and if a string ends with a space: tokenizers drop leading spaces.
        """
        known = self._candidates.get(token)
        if known is None:
            piece = self._decode([token])
            known = (
                not piece
                or _REPLACEMENT in piece
                or " " in self._endings
                or not self._endings.isdisjoint(piece)
            )
            self._candidates[token] = known
        return known

    def _tail(self, tokens: Sequence[int]) -> str:
        count = self._needed
        text = self._decode(tokens[-count:])
        while len(text) < self._needed and count < len(tokens):
            count *= 2
            text = self._decode(tokens[-count:])
        return text
