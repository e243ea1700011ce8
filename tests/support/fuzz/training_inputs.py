"""Hostile rows, chat templates and reward functions for `commands.py`, each with a dry run that reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.fuzz.mutations import bad_template, displace, mutated, spliced
from support.models.tokenizers import CHATML, CHATML_MARKED, save_char_tokenizer
from support.runs.training_files import FRESH

_CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
_CALL = {"function": {"name": "look", "arguments": {"up": "2"}}}
_ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "2", "answer": "2"},
    {"prompt": _CHAT[:1], "completion": _CHAT[1:], "answer": "2", "extra_info": {"index": 1}},
    {"messages": _CHAT, "tools": [{"name": "look"}], "answer": 2},
    {"messages": [*_CHAT, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]},
    {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
    {"instruction": "Add.", "input": "1+1", "output": "2"},
    {"text": "1+1=2", "answer": "2"},
]
_SETTINGS = [
    "data.string_prompts=user", "data.overlong=error", "data.max_length=4", "data.max_prompt_length=1", "data.system_prompt=x",
    "data.chat_template_kwargs={enable_thinking: false}", "data.chat_template_kwargs={x: 1}", "data.prompt_column=text",
    "data.messages_column=conversations", "data.text_column=prompt", "data.prompt_column=extra_info.index", "data.answer_column=answer",
    "data.completion_column=answer", "data.prompt_column=a.b.c", "data.shuffle=false", "batch.tokens_per_device=8",
]  # fmt: skip


def rows(rng: random.Random) -> list[str]:
    """A data file with something in it that nobody should write."""
    path = Path(rng.choice(["a.jsonl"] * 8 + ["a.json", "a.parquet", "a.csv"]))
    kind = rng.random()
    if kind < 0.2:
        displace(rng, path)
    elif kind < 0.25:
        path.write_bytes(rng.choice([b"\n \n", b"PAR1" + rng.randbytes(50)]))
    else:
        path.write_bytes(_rows_text(rng))
    command = rng.choice(["sft", "rl", "rl"])
    words = [f"data.train=[{path}]", *rng.sample(_SETTINGS, rng.choice([0, 0, 1, 2]))]
    return _dry_run(command, rng.choice([CHATML, CHATML, CHATML_MARKED, None]), words)


def _rows_text(rng: random.Random) -> bytes:
    sound = rng.choice(_ROWS)
    found: list[Any] = [sound for _ in range(rng.randrange(1, 5))]
    for _ in range(rng.choice([0, 1, 1, 2])):
        place = rng.randrange(len(found))
        found[place] = mutated(rng, found[place])
    lines = [json.dumps(row).encode() for row in found]
    text = b"[" + b",".join(lines) + b"]" if rng.random() < 0.1 else b"\n".join(lines)
    return spliced(rng, text) if rng.random() < 0.4 else text


def template(rng: random.Random) -> list[str]:
    """A chat template with something in it that fails, does not end, or writes nonsense."""
    text = bad_template(rng, rng.choice([CHATML, CHATML_MARKED]))
    row = rng.choice([_ROWS[1], _ROWS[2], _ROWS[3], _ROWS[4]])
    Path("a.jsonl").write_text(json.dumps(row))
    words = ["data.train=[a.jsonl]"]
    if rng.random() < 0.5:
        Path("t.jinja").write_text(text)
        return _dry_run(rng.choice(["sft", "rl"]), CHATML, [*words, "model.chat_template=t.jinja"])
    return _dry_run(rng.choice(["sft", "rl"]), text, words)


_BODIES = [
    "return 1.0", "return None", "return 'x'", "return []", "return [None]", "return {}", "return {'score': 'x'}", "return {'score': 1, 1: 2}",
    "return float('nan')", "return 10 ** 400", "return (x for x in [1])", "return [[1.0]]", "return object()", "return 1j", "return b'1'",
    "raise RuntimeError('x' * 10 ** 6)", "raise SystemExit(3)", "import os; os._exit(3)", "1 / 0", "yield 1.0",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "import sys; sys.setrecursionlimit(50); return f()",
    "print('x' * 10 ** 5); return [1.0]", "import time; time.sleep(100)", "while True: pass", "import os; os.kill(os.getpid(), 11)",
    "return f(**locals())", "global f; f = None; return 1.0", "import os; os.closerange(3, 100); return 1.0", "return __import__('numpy').ones(1)",
]  # fmt: skip
_PARAMETERS = [
    "completions, **columns", "completions, answer", "solution_str, ground_truth", "data_source, solution_str, ground_truth, extra_info=None",
    "", "x", "*completions", "completions, /", "completions, missing", "completions, solution_str", "**columns", "self, completions",
]  # fmt: skip
_HEADS = ["", "", "", "", "import nothing\n", "import sys; sys.exit(0)\n", "raise ValueError\n", "\0", "\ttab\n", "x = (\n", "while 1: break\n", "f = 3\n"]  # fmt: skip


def rewards(rng: random.Random) -> list[str]:
    """A file of a reward function that fails in a way of its own."""
    head, kind = rng.choice(_HEADS), rng.choice(["def", "def", "async def", "class"])
    parameters, body = rng.choice(_PARAMETERS[:4] * 3 + _PARAMETERS), rng.choice(_BODIES)
    Path("r.py").write_text(f"{head}{kind} f({parameters}):\n    {body}\n")
    if rng.random() < 0.1:
        displace(rng, Path("r.py"))
    Path("a.jsonl").write_text(json.dumps(rng.choice(_ROWS[:3])))
    function = rng.choice(
        ["r.py:f"] * 8 + ["r.py:g", "r:f", "r.py:", ":f", "regex", "json:dumps", "os:_exit"]
    )
    kwargs = rng.choice(["{}"] * 6 + ["{x: 1}", "{pattern: '(a'}", "{pattern: 5}", "{missing: []}"])
    words = ["data.train=[a.jsonl]", "reward.timeout_seconds=0.5"]
    return _dry_run(
        "rl", CHATML, [*words, f"reward.functions=[{{function: '{function}', kwargs: {kwargs}}}]"]
    )


def _dry_run(command: str, chat_template: str | None, words: list[str]) -> list[str]:
    """The words of a dry run, whose model and tokenizer are small; `words` come last and count."""
    save_char_tokenizer(Path("tokenizer"), chat_template)
    Path("fresh.json").write_text(json.dumps(FRESH))
    given = [
        "steps=2",
        "model.tokenizer=tokenizer",
        "model.fresh=fresh.json",
        "engine.precision=fp32",
        "batch.tokens_per_device=64",
    ]
    given += [
        "batch.prompts=2",
        "rollout.n=2",
        "rollout.max_response_length=4",
        "tracking.progress=false",
    ]
    if command == "rl":
        given += ["reward.functions=[{function: exact_match}]", "reward.workers=1"]
    return [command, *given, *words, "--dry-run"]
