"""What is shown of others' texts: no credentials, and nothing that moves a terminal's cursor."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import table
from burnish.functions import failure
from burnish.redaction import in_one_line, presentable, printable, redacted
from burnish.tracking.logs import RankLog
from burnish.tracking.spans import Spans

CREDENTIALS = [
    "GET http://u:hunter2@host/x failed",
    "http://hunter2@host",
    "http://u:hunter2@x:hunter2@host/path",
    "http://u:hunter2/hunter2@host:80/path",
    "postgresql://u:hunter2@host/db",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2&a=b",
    "https://account.blob.example/c?sv=1&sig=hunter2",
    "https://host/rows?token=hunter2 gives 403",
    "Authorization: Bearer hunter2",
    "authorization: hunter2",
    "{'Authorization': 'Basic hunter2'}",
    "a header Bearer hunter2hunter2",
    "aws_secret=hunter2 here",
    "AWS_SECRET_ACCESS_KEY=hunter2",
    '{"api_key": "hunter2", "model": "m"}',
    "{'client_secret': 'hunter2'}",
    "judge(password='hunter2')",
    "api-key: hunter2",
    "Incorrect API key provided: sk-hunter2-0123456789abcdef",
    "hf_hunter2hunter2hunter2",
    "key ASIAHUNTER2HUNTER2 is unknown".replace("HUNTER2HUNTER2", "ABCDEFGHIJKLMNOP"),
]


@pytest.mark.parametrize("text", CREDENTIALS)
def test_what_looks_like_a_credential_is_not_shown(text: str) -> None:
    for found in (redacted(text), presentable(text), redacted(redacted(text))):
        assert "***" in found
        assert "hunter2" not in found
        assert "ABCDEFGHIJKLMNOP" not in found


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:4318/v1/traces",
        "http://host:80/a@b/c",
        "hf://owner/name@main:subset/split",
        "Qwen/Qwen3-0.6B@main",
        "eos_token: </s>, pad_token_id=0, max_tokens=16, tokens 5",
        "tokenizer: the model's own",
        "set reward.functions.kwargs.api_key=$JUDGE_KEY",
        "set the environment variable OPENAI_API_KEY to the endpoint's key alone",
        "the token is missing or wrong",
        "step 3  reward 0.5  key heads 4",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert presentable(text) == text


@given(st.text())
def test_no_character_that_controls_a_terminal_is_left(text: str) -> None:
    for found in (printable(text), in_one_line(text)):
        assert not any(ord(each) < 32 and each not in "\t\n" for each in found)
        assert not any(127 <= ord(each) < 160 or "\u202a" <= each <= "\u202e" for each in found)
    assert "\n" not in in_one_line(text)
    assert printable(printable(text)) == printable(text)


def test_a_cell_of_a_table_begins_no_line() -> None:
    assert len(list(table([["a\nerror: b", "\x1b[2J"], ["c", "d"]]))) == 2


def test_the_text_of_a_users_error_has_no_credentials() -> None:
    said = failure(ConnectionError("http://u:hunter2@judge/score refused the connection"))
    assert "hunter2" not in said
    assert "judge/score" in said


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_has_neither(form: str, tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank-0.log", 0, Spans(), form)  # type: ignore[arg-type]
    try:
        raise ValueError("\x1b[31m http://u:hunter2@host")
    except ValueError as error:
        log.say(logging.ERROR, "api_key=hunter2 \x1b[2J", error)
    log.close()
    text = (tmp_path / "rank-0.log").read_text()
    assert "hunter2" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "code",
    [
        "raise BurnishError(TEXT)",
        "raise ValueError(TEXT)",
        "raise OSError(13, 'no', TEXT)",
        "logging.getLogger('burnish').error('%s', TEXT)",
        "logging.getLogger('other').warning(TEXT, exc_info=ValueError(TEXT))",
    ],
)
def test_the_command_prints_neither(code: str) -> None:
    """Whatever ends it or is logged on the way."""
    lines = [
        "import logging",
        "from burnish.errors import BurnishError",
        "from burnish.cli import main as cli",
        "TEXT = 'http://u:hunter2@host \\x1b[2J\\x9b31m'",
        f"def command(given):\n    {code}",
        "cli.function_of = lambda arguments: command",
        "raise SystemExit(cli.main(['runs']))",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, env=os.environ, check=False
    )
    said = io.TextIOWrapper(io.BytesIO(ended.stdout + ended.stderr), "utf-8").read()
    assert "host" in said
    assert "hunter2" not in said
    assert "\x1b" not in said
    assert "\x9b" not in said
