from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from burnish.rollout.base import Sampling
from burnish.rollout.running import StopRule

BYTES = Tokenizer(
    models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
)
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTES.decoder = decoders.ByteLevel()

METASPACE = Tokenizer(
    models.WordLevel({"▁": 0, "▁a": 1, "b": 2, "▁b": 3, "\n": 4, ".": 5}, unk_token="b")
)
METASPACE.decoder = decoders.Metaspace()


def ends_at(rule: StopRule, tokens: Sequence[int]) -> int | None:
    """Tokens of the completion when the rule ends it; None when it does not."""
    for count in range(1, len(tokens) + 1):
        if rule.ended(tokens[:count], 1000):
            return count
    return None


def first_end(tokenizer: Tokenizer, tokens: Sequence[int], strings: Sequence[str]) -> int | None:
    """By decoding everything after every token."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        if any(string in text for string in strings):
            return count
    return None


@given(
    text=st.text("abé\n 😀", max_size=30),
    strings=st.lists(st.text("abé\n 😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_in_bytes(text: str, strings: list[str]) -> None:
    """One token per byte: characters are completed by later tokens."""
    tokens = BYTES.encode(text).ids
    rule = StopRule(Sampling(1000, stop_strings=tuple(strings)), (), BYTES.decode)
    assert ends_at(rule, tokens) == first_end(BYTES, tokens, strings)


@given(
    tokens=st.lists(st.integers(0, 5), max_size=40),
    strings=st.lists(st.text("ab .\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_where_a_text_loses_its_first_space(
    tokens: list[int], strings: list[str]
) -> None:
    rule = StopRule(Sampling(1000, stop_strings=tuple(strings)), (), METASPACE.decode)
    assert ends_at(rule, tokens) == first_end(METASPACE, tokens, strings)


def test_most_tokens_cost_no_decoding() -> None:
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return "".join(chr(97 + i) for i in ids)

    rule = StopRule(Sampling(10_000, stop_strings=("zz",)), (), decode)
    assert ends_at(rule, [1, 2, 3] * 100) is None
    assert calls == [1, 1, 1]


@pytest.mark.parametrize(
    ("token", "reason"), [(7, "stop"), (8, "stop"), (9, None)], ids=["eos", "stop id", "other"]
)
def test_ids(token: int, reason: str | None) -> None:
    rule = StopRule(Sampling(10, stop_token_ids=(8,)), (7,), None)
    assert rule.ended([1, 2, token], 10) == reason


def test_length_and_an_id_at_the_last_token() -> None:
    rule = StopRule(Sampling(3), (7,), None)
    assert rule.ended([1, 2, 3], 3) == "length"
    assert rule.ended([1, 2, 7], 3) == "stop"
