"""Compare vocabularies: models that read the same ids have to mean the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from burnish.errors import IncompatibleError

_FILE = "tokenizer.json"

_log = logging.getLogger(__name__)


def vocabulary_of(directory: str) -> Mapping[str, int] | None:
    """Return the tokens of a model's directory and their ids; None without a `tokenizer.json`."""
    file = Path(directory, _FILE)
    return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None


def require_same_vocabulary(
    path: str, setting: str, policys: Mapping[str, int], own: Mapping[str, int]
) -> None:
    """Raise `IncompatibleError`, naming the first token, if a token of the policy is another one of the model at `path`."""
    tokens = {number: token for token, number in policys.items()}
    others = {number: token for token, number in own.items()}
    different = [number for number in sorted(tokens) if others.get(number) != tokens[number]]
    if different:
        number = different[0]
        theirs = repr(others[number]) if number in others else "none"
        raise IncompatibleError(
            f"{path} has another vocabulary, so it cannot score the tokens of model.path",
            have=f"token {number} is {tokens[number]!r} of model.path and {theirs} of {setting}; "
            f"{len(different)} of {len(tokens)} tokens differ",
            want="the same token for each id",
            do=f"set {setting} to a model of the same family, with the same tokenizer",
        )


def tell_other_tokens(given: Mapping[str, int], path: str) -> None:
    """Warn if ids of the model's own tokens are other tokens in the vocabulary of `model.tokenizer`. Further tokens are no mistake."""
    own = {number: token for token, number in (vocabulary_of(path) or {}).items()}
    different = [token for token, number in given.items() if own.get(number, token) != token]
    if different:
        token = different[0]
        _log.warning(
            "model.tokenizer and the tokenizer of %s differ in %d of %d tokens: id %d is %r and %r",
            path,
            len(different),
            len(given),
            given[token],
            token,
            own[given[token]],
        )
