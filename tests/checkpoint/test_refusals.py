"""What is refused of a step's files (section 4 of the checkpoint format): by whom, in which words, with which exit code.

Each row damages a copy of one sound step. `burnish ckpt verify` says so and ends with the code, and
resuming ends with the same before the engine is asked to load anything; only what is in the data of a
tensor is found while that is read. What is wrong with a sound step for a certain run is in
`tests/runs/test_refusals.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.faults.bit_flips import flip, load_all, make_step, reseal, seal

from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.manifest import COMMIT, MANIFEST, MANIFEST_LIMIT, STATE
from burnish.checkpoint.steps import open_step
from burnish.cli.main import main
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError
from burnish.files.storage import LocalStorage

MODEL, SLOT = "model/model.safetensors", "training/exp_avg.safetensors"


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path(OWNED),))


OWNED = "/tmp/burnish-unpickled"  # must never be there
PICKLE = pickle.dumps(Payload())


def put(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        (step / name).write_bytes(data)

    return damage


def of_same_size(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        size = (step / name).stat().st_size
        (step / name).write_bytes((data + bytes(size))[:size])

    return damage


def resealed(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The damage, and a manifest and a COMMIT that fit it."""

    def forge(step: Path) -> None:
        damage(step)
        reseal(step)

    return forge


def in_manifest(path: str) -> Callable[[Path], None]:
    """A forged manifest that names a file by another path."""

    def forge(step: Path) -> None:
        manifest = open_step(step, LocalStorage()).manifest
        files = dict(manifest.files)
        files[path] = files.pop("model/config.json")
        seal(step, replace(manifest, files=files))

    return forge


def as_link(name: str) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        elsewhere = step.parent.parent / "elsewhere"
        shutil.move(step / name, elsewhere)
        (step / name).symlink_to(elsewhere)

    return damage


def as_fifo(step: Path) -> None:
    (step / STATE).unlink()
    os.mkfifo(step / STATE)


def as_socket(step: Path) -> None:
    (step / STATE).unlink()
    here = Path.cwd()
    os.chdir(step)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(STATE)
    finally:
        os.chdir(here)


def truncated(step: Path) -> None:
    os.truncate(step / SLOT, (step / SLOT).stat().st_size - 1)


def flipped(step: Path) -> None:
    flip(step / SLOT)


def swapped(step: Path) -> None:
    other = step / "training/exp_avg_sq.safetensors"
    first, second = (step / SLOT).read_bytes(), other.read_bytes()
    (step / SLOT).write_bytes(second)
    other.write_bytes(first)


def header(
    change: Callable[[dict], object], *, length: int | None = None
) -> Callable[[Path], None]:
    """A tensor file with its header changed, and a seal that fits."""

    def damage(step: Path) -> None:
        data = (step / SLOT).read_bytes()
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        text = change(table)
        text = text if isinstance(text, bytes) else json.dumps(table).encode()
        head = struct.pack("<Q", len(text) if length is None else length) + text
        (step / SLOT).write_bytes(head + data[8 + size :])

    return resealed(damage)


def offsets(begin: int, end: int) -> Callable[[dict], object]:
    return lambda table: table["embed.weight"].update(data_offsets=[begin, end])


def twice(table: dict) -> bytes:
    text = json.dumps(table)[1:-1]
    return ("{" + text + "," + text + "}").encode()


def nan_offsets(table: dict) -> bytes:
    return json.dumps(table).replace('"data_offsets": [0', '"data_offsets": [NaN').encode()


def too_long(name: str, size: int) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / name, size)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a pickle beside the files": (put("training/optimizer.pt", PICKLE), ["optimizer.pt is in no manifest"]),
    "a pickle for the weights": (of_same_size(MODEL, PICKLE), [MODEL, "damaged"]),
    "a pickle for the weights, sealed": (resealed(put(MODEL, PICKLE)), [MODEL, "truncated"]),
    "a pickle for the state": (put(STATE, PICKLE), [STATE]),
    "a pickle for the state, sealed": (resealed(put(STATE, PICKLE)), [STATE, "not valid JSON"]),
    "a pickle for COMMIT": (put(COMMIT, PICKLE), [COMMIT, "not valid JSON"]),
    "a pickle for the manifest": (put(MANIFEST, PICKLE), [MANIFEST, "not the one that was committed"]),
    "a path that leaves the step": (in_manifest("../config.json"), ["path outside", "../config.json"]),
    "an absolute path": (in_manifest("/etc/passwd"), ["path outside", "/etc/passwd"]),
    "a link to a file": (as_link(MODEL), ["model.safetensors is not a regular file"]),
    "a link to a directory": (as_link("training"), ["training is not a regular file"]),
    "a pipe": (as_fifo, ["state.json is not a regular file"]),
    "a socket": (as_socket, ["state.json is not a regular file"]),
    "a truncated file": (truncated, [SLOT, "another size"]),
    "a flipped bit": (flipped, [SLOT, "damaged", "they hold"]),
    "swapped files": (swapped, [SLOT, "damaged"]),
    "an empty file": (put(SLOT, b""), [SLOT, "another size"]),
    "an empty COMMIT": (put(COMMIT, b""), [COMMIT, "not valid JSON"]),
    "a huge header": (header(lambda table: None, length=1 << 40), [SLOT, "truncated"]),
    "tensors that overlap": (header(offsets(4, 2372)), [SLOT, "embed.weight"]),
    "a hole": (header(lambda table: table.pop("embed.weight") and None), [SLOT, "hole"]),
    "a name twice": (header(twice), [SLOT, "twice"]),
    "a lying dtype": (header(lambda table: table["embed.weight"].update(dtype="F64")), [SLOT, "embed.weight", "size"]),
    "an unknown dtype": (header(lambda table: table["embed.weight"].update(dtype="Q9")), [SLOT, "unknown dtype"]),
    "an offset that is no number": (header(nan_offsets), [SLOT, "NaN is not a JSON number"]),
    "a shape beyond 2^63": (header(lambda table: table["embed.weight"].update(shape=[1 << 62, 4])), [SLOT, "impossible shape"]),
    "a COMMIT over its limit": (too_long(COMMIT, (64 << 10) + 1), [COMMIT, "more than"]),
    "a state over its limit": (too_long(STATE, (16 << 20) + 1), [STATE]),
    "a manifest over its limit": (too_long(MANIFEST, MANIFEST_LIMIT + 1), [MANIFEST, "more than"]),
    "a missing shard": (lambda step: (step / SLOT).unlink(), [SLOT, "missing"]),
    "an extra shard": (put("model/model-00002-of-00002.safetensors", b""), ["model-00002-of-00002", "in no manifest"]),
    "no COMMIT": (lambda step: (step / COMMIT).unlink(), ["no COMMIT"]),
    "another step's name": (lambda step: step.rename(step.with_name("step-00000002")), ["seals another step"]),
}  # fmt: skip
"""By name: the damage, and what the refusal says."""

WHILE_READING = {"a pickle for the weights", "a flipped bit", "swapped files"}
"""Damage to the data of tensors: found when that is read, which comes after all else is known to be in order."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_step(tmp_path_factory.mktemp("sound"))


@pytest.fixture(params=DAMAGES)
def damaged(request, sound, tmp_path):
    """A run's directory with one step, which is damaged; the damage's name and what is to be said of it."""
    step = shutil.copytree(sound, tmp_path / "run/checkpoints" / sound.name)
    damage, words = DAMAGES[request.param]
    damage(step)
    return tmp_path / "run", request.param, words


def assert_said(text, words):
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert not Path(OWNED).exists()


def test_verify_says_so_and_ends_with_3(damaged, capsys):
    run, _, words = damaged
    assert main(["ckpt", "verify", str(run)]) == 3
    written = capsys.readouterr()
    assert_said(written.out + written.err, words)
    assert "do: " in written.err


def test_resuming_ends_with_3_and_leaves_the_model_as_it_is(damaged):
    run, name, words = damaged

    def load(step, source):
        assert name in WHILE_READING, "the engine was asked to load"
        load_all(source)

    said = []
    for _ in range(2):  # never from the beginning, however often
        with Checkpoints(run / "checkpoints", Layout()) as checkpoints:
            with pytest.raises(CorruptError) as caught:
                checkpoints.resume(load)
            said.append(str(caught.value))
    assert CorruptError.exit_code == 3
    assert_said(said[0], words)
    assert str(run / "checkpoints") in said[1]
