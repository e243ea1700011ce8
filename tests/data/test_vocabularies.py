"""Whether ids mean the same tokens to two models."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.tokenizers import char_tokenizer, save_char_tokenizer

from burnish.data.vocabularies import require_same_vocabulary, tell_other_tokens, vocabulary_of
from burnish.errors import IncompatibleError

VOCABULARY = char_tokenizer().get_vocab()
SWAPPED = VOCABULARY | {"a": VOCABULARY["b"], "b": VOCABULARY["a"]}
LONGER = VOCABULARY | {"<tool>": len(VOCABULARY)}


def test_the_vocabulary_of_a_directory_is_its_tokenizers(tmp_path: Path) -> None:
    assert vocabulary_of(str(tmp_path)) is None
    assert vocabulary_of(save_char_tokenizer(tmp_path)) == VOCABULARY


def test_a_model_with_another_token_for_an_id_is_refused() -> None:
    require_same_vocabulary("judge", "critic.path", VOCABULARY, LONGER)
    for other in (SWAPPED, {"a": VOCABULARY["a"]}):
        with pytest.raises(IncompatibleError) as caught:
            require_same_vocabulary("judge", "critic.path", VOCABULARY, other)
        assert "critic.path" in str(caught.value)


@pytest.mark.parametrize("given", [VOCABULARY, LONGER, SWAPPED], ids=["same", "longer", "swapped"])
def test_a_tokenizer_with_other_tokens_than_the_model_s_is_named(
    given: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tell_other_tokens(given, save_char_tokenizer(tmp_path))
    assert bool(caplog.records) == (given is SWAPPED)
