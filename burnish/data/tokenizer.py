"""Load tokenizers; repair a missing pad token, or an end-of-sequence token that chat turns never use."""

from __future__ import annotations

import copy
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from burnish.errors import MissingError, UsageError, few, refusing, whole_sentences

logger = logging.getLogger(__name__)

_PROBE = "burnish-probe-7c1f"
_RENDER_SECONDS = 3.0
"""Processor time that a chat template may take for one conversation."""


def load_tokenizer(
    path: str,
    chat_template_file: str | None = None,
    trust_remote_code: bool = False,
    template_name: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load and repair a tokenizer. Of several chat templates, `template_name` is used; all stay with it.

    The token that ends the template's turns becomes the end of sequence, unless the template writes `eos_token`. A missing pad
    token becomes the end of sequence, or the unknown token.

    Raises `MissingError` for a missing directory or template. Raises `UsageError` for a template that cannot be rendered, code
    that needs `trust_remote_code`, and missing tokens.
    """
    tokenizer = _from_directory(path, trust_remote_code)
    if chat_template_file is not None:
        tokenizer.chat_template = _read_template(chat_template_file)
        _check_template(tokenizer, chat_template_file)
    _require_texts(tokenizer, path)
    _repair_eos(tokenizer, path, template_name)
    _repair_pad(tokenizer, path)
    return tokenizer


def single_template(
    tokenizer: PreTrainedTokenizerBase, name: str | None = None, *, tools: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with one of its named chat templates, as transformers chooses it.

    That is `name`, or else `tool_use` for rows with tools, `default`, or the only one. Raises `UsageError` if there is none.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        if name in (None, "default"):
            return tokenizer
        raise UsageError(
            f"the tokenizer has no chat template called {name}",
            have="one template without a name" if templates else "no chat template",
            do="remove data.chat_template_name",
        )
    only = list(templates) if len(templates) == 1 else []
    wanted = [name] if name else [*["tool_use"] * tools, "default", *only]
    chosen = next((candidate for candidate in wanted if candidate in templates), None)
    if chosen is None:
        raise UsageError(
            f"the tokenizer has no chat template called {wanted[-1]}",
            have=", ".join(sorted(templates)),
            want="the name of one of them",
            do=f"set data.chat_template_name={min(templates)}, or to another of them",
        )
    single = copy.copy(tokenizer)
    single.chat_template = templates[chosen]
    return single


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> tuple[int, ...]:
    """Return all ids that end a completion, ascending: of the tokenizer, its single chat template, and each of `configs`."""
    ids = {tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids.update(value if isinstance(value, (list, tuple)) else [value])
    return tuple(sorted(int(token) for token in ids if token is not None))


def completion_decoder(
    tokenizer: PreTrainedTokenizerBase,
    stop_strings: Sequence[str],
    eos_token_ids: Sequence[int],
) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes completions without special tokens, except those of a stop string at the end.

    An end-of-sequence token never shows, even if it is a stop string too.
    """
    special = {i for i, added in tokenizer.added_tokens_decoder.items() if added.special}
    texts = [tokenizer.added_tokens_decoder[token].content for token in special]
    stops = [stop for stop in stop_strings if any(text in stop for text in texts)]
    # A character may have several tokens, of bytes.
    most = max(map(len, stops), default=0) * 4

    def decode(token_ids: Sequence[int]) -> str:
        tokens = list(token_ids)
        is_ended = not tokens or tokens[-1] in eos_token_ids
        for count in range(1, 0 if is_ended else min(len(tokens), most) + 1):
            tail = str(tokenizer.decode(tokens[-count:]))
            if any(stop in tail for stop in stops):
                others = [token for token in tokens[:-count] if token not in special]
                return str(tokenizer.decode([*others, *tokens[-count:]]))
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase, next_role: str = "") -> int | None:
    """Return the special token that the chat template writes after the assistant's last message, or before `next_role`'s."""
    return next(iter(_closing(tokenizer, next_role)), None)


def _closing(tokenizer: PreTrainedTokenizerBase, next_role: str = "") -> list[int]:
    if not tokenizer.chat_template:
        return []
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    messages += [{"role": next_role, "content": "hello"}] if next_role else []
    try:
        text = str(render(tokenizer, messages, tokenize=False))
    except jinja2.TemplateError:  # the template refuses these messages
        return []
    _, probe, tail = text.rpartition(_PROBE)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if probe else []
    special = tokenizer.added_tokens_decoder
    return [int(token) for token in ids if token in special and special[token].special]


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template has `{% generation %}`."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return False
    return re.search(r"{%-?\s*generation\s*-?%}", str(tokenizer.get_chat_template())) is not None


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """Apply the chat template, a program that may raise anything, or run forever.

    Raises `jinja2.TemplateError`, or after `_RENDER_SECONDS` `UsageError`.
    """
    try:
        with _deadline():
            rendered = tokenizer.apply_chat_template(list(messages), **options)
        if isinstance(rendered, str):
            rendered.encode()  # raises for half of a surrogate pair
        return rendered
    except jinja2.TemplateError:
        raise
    except TimeoutError as error:
        raise UsageError(
            "the chat template does not end",
            have=f"a conversation of {len(messages)} messages after {_RENDER_SECONDS:g} seconds",
            want="a template without endless loops",
            do="set model.chat_template to another template",
        ) from error
    except Exception as error:
        raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _deadline() -> Iterator[None]:
    """Raise `TimeoutError` in the block after `_RENDER_SECONDS`; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_: int, frame: FrameType | None) -> None:
        # Python prints and ignores exceptions in callbacks of weakref; the timer calls again.
        if frame is None or "weakref" not in frame.f_code.co_filename:
            raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, _RENDER_SECONDS, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _from_directory(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise MissingError(
            f"no tokenizer directory {path}",
            want="a directory with tokenizer.json or tokenizer_config.json",
            do="set model.path or model.tokenizer to a local model directory",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
        tokenizer.decode(tokenizer(_PROBE)["input_ids"])
    except (
        Exception
    ) as error:  # the tokenizers library raises bare Exception for a file it cannot parse
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"the tokenizer in {path} has its own Python code",
                do="read that code, then set model.trust_remote_code=true",
            ) from error
        raise MissingError(
            f"no usable tokenizer in {path}",
            have=whole_sentences(str(error)),
            want="tokenizer.json and tokenizer_config.json as save_pretrained writes them",
            do="set model.tokenizer to a directory that has them",
        ) from error
    # Without files, transformers makes a tokenizer of special tokens, and perhaps one for spaces.
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder) + 1:
        raise MissingError(
            f"there is no tokenizer in {path}",
            have=few(sorted(each.name for each in folder.iterdir())),
            want="tokenizer.json, or the files of the model's own tokenizer",
            do="copy them from the original model, or set model.tokenizer to a directory that has them",
        )
    return tokenizer


def _read_template(path: str) -> str:
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingError(
            f"no chat template {path}", want="a Jinja file", do="correct model.chat_template"
        )
    with refusing(f"{path} cannot be read", want="a Jinja file in UTF-8", do="correct it"):
        return file.read_text(encoding="utf-8")


def _check_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    try:
        render(tokenizer, [{"role": "user", "content": "hello"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            f"{path}, line {error.lineno}: {error.message}",
            want="a Jinja template",
            do="correct it there",
        ) from error
    except jinja2.TemplateError as error:
        raise UsageError(
            f"{path} cannot render a single user message: {error}",
            want="a chat template over `messages`, each with `role` and `content`",
            do="correct the template",
        ) from error


def _require_texts(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates or ""}
    if not named or not all(isinstance(each, str) for each in named.values()):
        raise UsageError(
            f"the chat template in {path} is not text",
            have=f"{templates!r:.100}",
            want="a Jinja template, or a list of named ones",
            do="correct chat_template in tokenizer_config.json, or set model.chat_template",
        )


def _repair_eos(tokenizer: PreTrainedTokenizerBase, path: str, template_name: str | None) -> None:
    used = single_template(tokenizer, template_name)
    closing = _closing(used)
    if not closing or tokenizer.eos_token_id in closing:
        return
    if tokenizer.eos_token is not None and "eos_token" in str(used.chat_template):
        return  # the template would write another eos token
    token = str(tokenizer.convert_ids_to_tokens(closing[0]))
    logger.warning(
        "tokenizer %s: its chat template ends turns with %r, not with its eos token %r; eos is set to %r",
        path,
        token,
        tokenizer.eos_token,
        token,
    )
    tokenizer.eos_token = token


def _repair_pad(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    token = tokenizer.eos_token if tokenizer.eos_token is not None else tokenizer.unk_token
    if token is None:
        raise UsageError(
            f"the tokenizer in {path} has neither an end-of-sequence nor an unknown token",
            want="eos_token in tokenizer_config.json",
            do="name the token that ends a sequence there",
        )
    logger.warning("tokenizer %s has no pad token; padding with %r", path, token)
    tokenizer.pad_token = token
