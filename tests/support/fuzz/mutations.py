"""What may stand where something else was: values, texts, bytes, JSON, tensors, and whole files of a directory.

All that makes hostile inputs draws from here, so a new kind of damage reaches every reader.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fuzz.checkpoint_files import damaged, written

WORDS = [
    "", " ", "~", "null", "true", "no", "-", "--", "=", ":", "a: b", "[", "{", "]", "[]", "{}", "[[]]", "{a: 1}", "*a", "&a 1", "<<",
    "!!int abc", "!!float x", "!!bool x", "!!null x", "!!binary ///", "!!set {a}", "!!omap [a: 1]", "!!timestamp x", "!x 1",
    "!!python/name:os.system", "0", "-1", "1e400", "-.inf", ".nan", "1" * 5000, "9223372036854775807", "9223372036854775808",
    "4000000000000000000", "0x1f", "1_000", "x" * 300, "x" * 5000, "../../x", "/dev/null/x", "/dev/zero", "~/x", "s3://", "hf://x",
    "file:///", "gs://b/../c", "a@b:c/d@e", "a/b@", "é", "\u202e", "😀", "\\", "'", '"', "%s {x} $HOME", "a\tb", "a\nb: c", "grpo",
    "\x00y", "\ud800", "numeric", "x.py:y", "a:b:c", "exact_match", "007", "2024-01-01", "<|im_end|>", "<|im_start|>assistant\n",
    "{{ 1 }}", "[1, 2", "llama", "float7", "bfloat16", "LlamaForCausalLM", "config.json",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2, 3, 1.5, 2**31, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**17, 10**30, 1e308, 5e-324, float("nan"), float("inf"),
]  # fmt: skip
_CALL = {"function": {"name": "look", "arguments": {"up": "2"}}}
_STRUCTURES: list[Any] = [
    [], {}, [[]], [None], [{}], ["x"], {"a": {"b": []}}, {"role": "user"}, [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": 5}], [{"from": "x", "value": 1}], [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], _CALL, [0.9, 0.99], {"rope_type": "yarn", "factor": 4.0},
    {"architectures": ["X"], "model_type": "x"}, [1] * 3000,
]  # fmt: skip
PIECES = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\", b'"', b",", b"{", b"}", b"[", b"]", b"\r", b"\n", b"\xef\xbb\xbf", b"NaN", b"-Infinity",
    b"9" * 5000, b"[" * 5000, b'{"a":' * 300, b"1e999", b"// x", b"'", b'"prompt": 1,', b'"messages": [],', b"\n\n\n", b"\n[]\n", b"\n7\n", b"\n{}\n",
]  # fmt: skip
_TEMPLATES = [
    "{{ 1 // 0 }}", "{{ 10 ** 400 * 1.0 }}", "{{ messages[9].x.y }}", "{{ nothing.x }}", "{{ messages | first | last | sum }}", "{% if %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "{{ range(10 ** 9) }}", "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}",
    "{% generation %}", "{% endgeneration %}", "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}", "{{ 'x' * 1000000 }}",
    "{{ messages | tojson }}", "{{ tools | length }}", "{{ strftime_now('%Y') }}", "{% set messages = [] %}", "{{", "}}", "{%", "{#", "\0", "é",
    "{{ messages[0]['content'] | int + 'x' }}", "{{ add_generation_prompt }}", "{{ bos_token }}", "{{ eos_token + 1 }}", "{% break %}", "",
]  # fmt: skip
_CONTENTS = [
    b"", b"", b"\n", b"[]", b"{}", b"null", b"PAR1", b"PK\5\6" + bytes(18), b"\x1f\x8b\x08", gzip.compress(b'{"a": 1}'), b"BZh9", bytes(600),
    b"\xfd7zXZ\0", b"\x80\x04.", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
]  # fmt: skip
"""How a file begins that is something else: an archive, a pickle, a pointer of Git LFS."""
_SPARSE = 1 << 28
"""Bytes of a file that holds zeros alone."""


def nasty(rng: random.Random, depth: int = 0) -> Any:
    """A value where another was."""
    kind = rng.randrange(9 if depth < 4 else 7)
    if kind < 3:
        return rng.choice(WORDS)
    if kind == 3:
        return rng.choice([None, True, False, *NUMBERS])
    if kind == 4:
        return rng.choice(_STRUCTURES)
    if kind < 7:
        return rng.randrange(-5, 100)
    if kind == 7:
        return [nasty(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(WORDS): nasty(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutated(
    rng: random.Random,
    value: Any,
    name: Callable[[random.Random], str] = lambda rng: rng.choice(WORDS),
) -> Any:
    """The value with one thing in it changed, at any depth; `name` is that of a key that is new."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, changed = rng.choice(list(value)), dict(value)
        kind = rng.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.15:
            changed[key[:-1] + rng.choice("xs_.[")] = changed.pop(key)
        elif kind < 0.2:
            changed[name(rng)] = nasty(rng)
        else:
            changed[key] = mutated(rng, value[key], name)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(rng, value[place], name), *value[place + 1 :]]
    return nasty(rng)


def spliced(rng: random.Random, data: bytes, pieces: list[bytes] = PIECES) -> bytes:
    """Bytes with something in them that does not belong there."""
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(pieces) + data[place + rng.randrange(9) :]


def bad_template(rng: random.Random, text: str) -> str:
    """A chat template with something in it that fails, does not end, or writes nonsense."""
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.choice([0, len(text), rng.randrange(len(text) + 1)])
        text = text[:place] + rng.choice(_TEMPLATES) + text[place + rng.choice([0, 0, 0, 1, 20]) :]
    return text


def displace(rng: random.Random, path: Path) -> None:
    """Put something that is no such file in the place of a file or directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = rng.randrange(11)
    if kind < 2:
        return
    if kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to("none")
    elif kind == 5:
        path.symlink_to(rng.choice([".", "/dev/zero", "/dev/null", "/etc"]))
    elif kind == 6:
        path.mkdir()
    elif kind == 7:
        (path / "x").mkdir(parents=True)
        (path / "x/config.json").write_text("{}")
    elif kind == 8:
        path.touch()
        os.truncate(path, _SPARSE)
    else:
        path.write_bytes(rng.choice(_CONTENTS) + rng.choice([b"", rng.randbytes(500)]))


def damage(rng: random.Random, directory: Path) -> None:
    """Change one thing in a directory: one of its files, something in the place of one, or a file too many."""
    below = directory.iterdir() if rng.random() < 0.5 else directory.rglob("*")
    found = sorted(path for path in below if not path.is_symlink())
    files = [path for path in found if path.is_file()]
    kind = rng.random()
    if kind < 0.1 or not files:
        _add(rng, rng.choice([directory, *(path for path in found if path.is_dir())]))
    elif kind < 0.35:
        displace(rng, rng.choice(found))
    else:
        _change(rng, rng.choice(files))


def _add(rng: random.Random, directory: Path) -> None:
    """Put a file where none belongs, or one of the directory's own under another name."""
    names = ["x", ".x", "x.py", "é", "x" * 250, "a b", "\\", "*.json", "model.safetensors", "chat_template.jinja", "generation_config.json",
             "tokenizer.json", "step-00000009", "step-00000001", ".inflight-00000009.x", "trash", "quarantine", "COMMIT", "config.yaml"]  # fmt: skip
    path = directory / rng.choice(names)
    others = [each for each in directory.iterdir() if each != path]
    if rng.random() < 0.2:
        path = directory / os.fsdecode(b"\xff\xfe")  # a name that is no text
    if rng.random() < 0.3 and others:
        other = rng.choice(others)
        if not os.path.lexists(path):
            path.symlink_to(other.name)
    elif rng.random() < 0.3 and any(each.is_file() for each in others):
        shutil.copyfile(rng.choice([each for each in others if each.is_file()]), _free(path))
    else:
        displace(rng, path)


def _free(path: Path) -> Path:
    return path if not os.path.lexists(path) else path.with_name("y.json")


def _change(rng: random.Random, path: Path) -> None:
    """Change the content of a file, as what it is or as bytes."""
    data = path.read_bytes()
    kind = rng.random()
    if path.suffix == ".safetensors" and kind < 0.8:
        path.write_bytes(_bad_tensors(rng, data))
    elif path.suffix == ".jinja":
        path.write_bytes(bad_template(rng, data.decode()).encode())
    elif kind < 0.15:
        path.write_bytes(damaged(rng, data))
    elif kind < 0.3:
        path.write_bytes(spliced(rng, data))
    elif (value := _parsed(data)) is not None:
        for _ in range(rng.choice([1, 1, 2])):
            value = mutated(rng, value)
        path.write_bytes(_as_json(rng, value))
    else:
        path.write_bytes(damaged(rng, data))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _as_json(rng: random.Random, value: Any) -> bytes:
    """JSON as somebody would write it, rarely with what is none."""
    if rng.random() < 0.7:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    try:
        return written(rng, value)
    except ValueError:  # NaN, a lone surrogate
        return json.dumps(value).encode()


def _bad_tensors(rng: random.Random, data: bytes) -> bytes:
    """A file of tensors with another header, or with a length that is not its own."""
    length = int.from_bytes(data[:8], "little")
    header, body = _parsed(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if isinstance(header[name], dict) and "shape" in header[name]] if isinstance(header, dict) else []  # fmt: skip
    if not names:
        return damaged(rng, data)
    name, kind = rng.choice(names), rng.randrange(6)
    if kind == 0:
        header[name]["shape"] = rng.choice([[], [1], [0], [-1, 2], [2**62, 4], [*header[name]["shape"], 1], header[name]["shape"][::-1]])  # fmt: skip
    elif kind == 1:
        header[name]["dtype"] = rng.choice(["F32", "F64", "F8_E4M3", "I8", "BOOL", "x", 7])
    elif kind == 2:
        header[name + rng.choice(["x", ".weight_scale", "\ud800"])] = header.pop(name)
    elif kind == 3:
        del header[name]
    else:
        header = mutated(rng, header)
    text = _as_json(rng, header)
    length = len(text)
    if rng.random() < 0.15:
        length = rng.choice([0, 1, length - 1, length + 1, 1 << 20, 1 << 31, (1 << 64) - 1])
    if rng.random() < 0.1:  # numbers that are none
        body = b"\xff" * len(body)
    return struct.pack("<Q", length) + text + body[: rng.choice([len(body)] * 5 + [len(body) // 2])]
