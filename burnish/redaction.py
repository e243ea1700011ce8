"""Make text fit to be shown: without credentials, and without characters that control a terminal.

Everything that Burnish prints, logs or writes about others goes through `presentable`, or through one of its two parts.
"""

from __future__ import annotations

import re

_NAMES = (
    r"pass(?:word|wd|phrase)|secret|signature|credentials?|"
    r"(?:api|access|private|secret|account)[_-]?key|"
    r"(?:access|api|auth|bearer|csrf|github|hf|id|refresh|security|session|wandb)[_-]?token"
)
_VALUE = r"(?!\$)[^&\s\"',;)}\]]+"  # $NAME is the name of an environment variable
_CREDENTIALS = (
    # user:password@ outside of the hub's URLs, also if the password has an @ or a slash; a port is no password
    (("://",), re.compile(r"(?<!hf)(://)[^/\s\"'<>]{0,500}@"), r"\1***@"),
    (
        ("://",),
        re.compile(r"(://)[^/\s\"'<>:@]{0,500}:(?!\d{1,5}(?:[/?#\s\"']|$))[^\s\"'<>@]{0,500}@"),
        r"\1***@",
    ),
    (
        ("pass", "secret", "signature", "credential", "key", "token"),
        re.compile(rf"(?i)((?:{_NAMES})[\"']?\s{{0,9}}[=:]\s{{0,9}}[\"']?){_VALUE}"),
        r"\1***",
    ),
    (("?", "&"), re.compile(rf"(?i)([?&](?:token|key|sig|auth|code)=){_VALUE}"), r"\1***"),
    (
        ("authorization",),
        re.compile(
            rf"(?i)(authorization[\"']?\s{{0,9}}[=:]\s{{0,9}}[\"']?(?:[a-z]{{1,20}}\s{{1,9}})?){_VALUE}"
        ),
        r"\1***",
    ),
    (("bearer",), re.compile(r"(?i)\b(bearer\s{1,9})[\w.~+/=-]{8,}"), r"\1***"),
    (
        ("akia", "asia", "sk-", "rk-", "hf_", "gh", "xox", "aiza", "eyj"),
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{12,}|[sr]k-[\w-]{16,}|hf_\w{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}"
            r"|xox[abprs]-[\w-]{8,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
        ),
        "***",
    ),
)
"""What credentials look like: texts in lower case of which one occurs, a pattern, and what stands for the credential."""
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Characters that move a cursor, change colours or turn the direction of writing."""
_IN_LINES = {code: text for code, text in _CONTROLS.items() if chr(code) not in "\t\n"}


def redacted(text: str) -> str:
    """Replace anything like a credential by `***`."""
    lower = text.lower()
    for hints, pattern, replacement in _CREDENTIALS:
        if any(hint in lower for hint in hints):
            text = pattern.sub(replacement, text)
    return text


def printable(text: str) -> str:
    r"""Replace control characters other than tabs and ends of lines by escapes such as `\x1b`."""
    return text.translate(_IN_LINES)


def in_one_line(text: str) -> str:
    """Replace all control characters by escapes, so that a name cannot begin a line of its own."""
    return text.translate(_CONTROLS)


def presentable(text: str) -> str:
    """Return a text for people: `redacted` and `printable`."""
    return printable(redacted(text))
