"""Conversations as plain text, for tables and terminals."""

from __future__ import annotations

import unicodedata

from contracts.tracker import ROWS, TALK
from hypothesis import given
from hypothesis import strategies as st
from support.runs.rollouts import made_rollout, made_talk, table_of

from burnish.tracking.conversation_text import conversation_text, visible
from burnish.tracking.rollouts import read_rollouts, rollouts_path, sample_table, write_rollouts


def test_roles_calls_rewards_and_the_end_are_there(tmp_path) -> None:
    write_rollouts(tmp_path, 1, table_of([made_talk()]), [0.0])
    (row,) = read_rollouts(rollouts_path(tmp_path, 1))
    assert conversation_text(row).splitlines() == [
        "[user]",
        "Begin.",
        "[assistant 1: called 0.25]",
        "<call>",
        "-> multiply(a=3)",
        "[tool multiply failed]",
        "Error: no b",
        "[assistant 2: right 1]",
        "12",
        "[ended: done]",
    ]
    assert "Error: \\x1b[31mnoU+202E" in conversation_text(TALK)
    long = {**row, "conversation": [{"role": "user", "content": "x" * 2**20, "unseen": True}]}
    assert len(conversation_text(long)) < 5000


@given(st.text(st.characters(), max_size=40))
def test_nothing_hidden_is_left(text: str) -> None:
    shown = visible(text)
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert {each for each in shown if unicodedata.category(each) in hidden} <= {*"\n\t\u200c\u200d"}
    assert not {"\x1b", "\r", "\x08", "\u202e", "\u2066", "\u2028"} & {*shown}
    if text.isprintable():
        assert shown == text


def test_tables_of_conversations_have_their_end_and_others_do_not(tmp_path) -> None:
    (talk,) = sample_table([TALK | {"reward_parts": {"right": 1.0}, "metrics": {"turns": 1.0}}])
    assert (talk["end"], talk["reward/right"], talk["environment/turns"]) == ("turns", 1.0, 1.0)
    assert talk["completion"].startswith("[assistant 1: called 0.25]")
    (plain,) = sample_table(ROWS)
    assert plain["completion"] == ROWS[0]["completion"]
    assert "end" not in plain
    write_rollouts(tmp_path, 1, table_of([made_rollout(), made_talk(1)]), [0.0, 0.0])
    both = sample_table([*read_rollouts(rollouts_path(tmp_path, 1))])
    assert [row["end"] for row in both] == [None, "done"]
