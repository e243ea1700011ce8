"""Weights in memory that both processes map: what is read is what was sent, whoever dies, and nothing is left."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from contracts.generator import assert_same, make_requests
from hypothesis import given
from hypothesis import strategies as st
from support.models.servers import (
    SAMPLING,
    TOKEN,
    VOCABULARY,
    Reader,
    alone,
    feeding,
    loaded,
    mappings,
    own,
    served,
    serving,
    staged,
)
from support.models.tiny import tiny_model
from support.ranks.fork_server import Forked

from burnish.boxes.box import Box
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.models.names import model_shards
from burnish.rollout import messages
from burnish.rollout.client import ServedGenerator, Server
from burnish.rollout.staging import (
    MappedStaging,
    Staging,
    first_mapped,
    index_of,
    make_stagings,
)
from burnish.rollout.weight_group import GroupHost

CPU = torch.device("cpu")


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 3, 130, 700]), st.integers(0, 2)),
        max_size=3,
    ),
    st.integers(0, 3),
)
def test_pieces_are_read_as_they_were_written(
    dtype: torch.dtype, dims: list[tuple[int, int, int]], count: int
) -> None:
    """Also pieces of no elements, scalars, and pieces larger than a buffer."""
    if torch.Size([a + b + c for a, b, c in dims]).numel() > 2_000_000:
        dims = dims[:2]
    shape = tuple(a + b + c for a, b, c in dims)
    box = Box(tuple(a for a, _, _ in dims), tuple(b for _, b, _ in dims))
    [staging] = make_stagings([TensorSpec("w", (1,), dtype)], None)
    mapped = first_mapped([staging.offer], CPU)
    assert mapped is not None
    reader = MappedStaging(mapped[1])
    for number in range(count):
        whole = torch.randn(shape).to(dtype)
        piece = Shard(
            TensorSpec(f"w{number}", shape, dtype), box, whole[box.slices] if dims else whole
        )
        found = torch.full(shape, torch.nan, dtype=dtype)
        for part in staging.parts(piece):
            if not staging.has_room(part):
                read_into(found, staging, reader)
            staging.write(part)
        read_into(found, staging, reader)
        torch.testing.assert_close(found[box.slices], piece.tensor, rtol=0, atol=0)
        if box.elements < found.numel():
            assert found.isnan().sum() == found.numel() - box.elements


def read_into(found: torch.Tensor, staging: Staging, reader: MappedStaging) -> None:
    message = b"".join([*staging.turn(), *messages.LAST])
    for piece in messages.read_shards(BytesIO(message), reader.read):
        found[piece.box.slices] = piece.tensor


def test_a_buffer_is_not_written_before_it_has_been_read() -> None:
    """The receiver is slow, and the sender is at most two buffers ahead."""
    reader = Reader(lambda number: time.sleep(0.005))
    with serving(reader) as server:
        generator = feeding(server, staged(12, 0))
        for version in (1, 2):
            generator.load_weights(Publication(staged(12, version)), version)
            found = [(name, float(x.min()), float(x.max())) for name, _, x in reader.got]
            wanted = [(f"w{n}", 1000.0 * version + n) for n in range(12)]
            assert found == [(name, value, value) for name, value in wanted]
            assert server.about()["version"] == version
        generator.close()


def test_every_way_brings_the_same_weights_and_says_which_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through memory, to another machine, where memory cannot be mapped, and where no group can be made either."""
    sent: list[int] = []
    plain_send = Server.send

    def send(server: Server, upload: Any, message: messages.Parts) -> None:
        sent[-1] += sum(map(len, message))
        plain_send(server, upload, message)

    def refuse(*given: Any) -> None:
        raise ValueError("no group here")

    monkeypatch.setattr(Server, "send", send)
    requests = make_requests()
    digests = []
    for way in ("shared memory (cpu)", "gloo", "HTTP"):
        with monkeypatch.context() as patch, serving(own(tiny_model())) as server:
            if way != "shared memory (cpu)":
                patch.setattr(
                    "burnish.rollout.weight_group.first_mapped", lambda offers, device, peers: None
                )
            if way == "HTTP":
                patch.setattr(GroupHost, "invite", refuse)
            sent.append(0)
            generator = loaded([server])
            assert_same(generator.generate(requests, SAMPLING), alone(requests))
            digests.append(dict(generator.checksums()))
            assert server._way == way
            warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
            assert any(server.url in each.getMessage() for each in warned) == (way == "HTTP")
    assert digests[0] == digests[1] == digests[2]
    weights = sum(shard.tensor.nbytes for shard in model_shards(tiny_model()))
    assert max(sent[:2]) < weights / 4 < weights < sent[2]


def test_memory_of_others_is_not_taken() -> None:
    """Process ids, files and proofs that are not the sender's, and a device that is not here."""
    [staging] = make_stagings([TensorSpec("w", (1,), torch.float32)], None)
    plain = os.memfd_create("burnish-weights")
    os.ftruncate(plain, staging.offer["bytes"])
    other = os.open("/proc/self/status", os.O_RDONLY)
    wrong = [
        {"process": 1 << 22},
        {"file": 1 << 20},
        {"file": plain},
        {"file": other},
        {"bytes": staging.offer["bytes"] + 1},
        {"proof": [0] * 16},
        {"device": {"uuid": "GPU-0", "handle": []}},
    ]
    try:
        offers = [staging.offer | each for each in wrong]
        assert first_mapped(offers, CPU) is None
        found = first_mapped([*offers, staging.offer], CPU)
        assert found is not None
        assert found[0] == len(wrong)
        staging.close()
        assert first_mapped([staging.offer], CPU) is None
    finally:
        os.close(plain)
        os.close(other)


@pytest.mark.parametrize(
    ("uuid", "own", "peers", "wanted"),
    [
        ("GPU-b", 1, (), 1),  # the process's own device, whatever number the sender gives it
        ("GPU-b", 0, (), None),
        ("GPU-b", 0, (2,), None),
        ("GPU-b", 0, (1, 2), 1),
        ("GPU-d", 0, (0, 1, 2), None),
    ],
)
def test_a_device_is_found_by_name_if_it_is_the_own_one_or_one_that_is_read(
    uuid: str, own: int, peers: tuple[int, ...], wanted: int | None
) -> None:
    assert index_of(uuid, ["GPU-a", "GPU-b", "GPU-c"], own, peers.__contains__) == wanted


@pytest.mark.parametrize("fault", ["", "no such device", "does not open", "other memory"])
def test_memory_of_a_device_counts_only_if_the_proof_is_read_there(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next offer is taken. Host memory takes the device's place."""
    [staging] = make_stagings([TensorSpec("w", (1,), torch.float32)], None)
    there = torch.cat([torch.tensor(staging.offer["proof"]), torch.arange(5000)]).to(torch.uint8)

    def open_handle(offer: Any, index: int) -> torch.Tensor:
        assert (offer["handle"], index) == ("handle", 3)
        if fault == "does not open":
            raise RuntimeError("invalid device context")
        return torch.zeros_like(there) if fault == "other memory" else there

    index = None if fault == "no such device" else 3
    monkeypatch.setattr("burnish.rollout.staging._index_to_map", lambda *given: index)
    monkeypatch.setattr("burnish.rollout.staging._mapped_device", open_handle)
    on_device = staging.offer | {"device": {"uuid": "GPU-b", "handle": "handle"}}
    found = first_mapped([on_device, staging.offer], CPU, peers=True)
    assert found is not None
    assert found[0] == bool(fault)
    if not fault:
        torch.testing.assert_close(found[1], there[4096:])


def send_and_wait(pipe: Connection, url: str) -> None:
    """Send weights, and stop in the middle of the next ones."""
    server = Server(url, TOKEN, 60.0, VOCABULARY)
    generator = feeding(server, staged(12, 0))

    def slowly() -> Any:
        yield from staged(12, 2)

    generator.load_weights(Publication(staged(12, 1)), 1)
    [staging] = generator._stagings or []
    plain_write = staging.write

    def write(part: Shard) -> None:
        if part.spec.name == "w8":
            pipe.send(os.fstat(staging.offer["file"]).st_ino)
            time.sleep(60)
        plain_write(part)

    staging.write = write  # type: ignore[method-assign]
    generator.load_weights(Publication(slowly()), 2)


def test_a_sender_that_is_killed_leaves_neither_a_version_nor_memory() -> None:
    reader = Reader()
    with serving(reader) as server:
        sender = Forked(send_and_wait, server.url)
        try:
            inode = sender.recv()
            assert server.about()["version"] is None
            assert mappings(inode) == 1
        finally:
            sender.kill()
        deadline = time.monotonic() + 20
        while mappings(inode):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.about()["version"] is None
        assert [float(x[0]) for _, _, x in reader.got] == [
            2000.0 + n for n in range(len(reader.got))
        ]
        generator = feeding(server, staged(12, 0))
        generator.load_weights(Publication(staged(12, 3)), 3)
        assert server.about()["version"] == 3
        assert len(reader.got) == 12


def serve_until_killed(pipe: Connection) -> None:
    """Serve, and die while a buffer is read."""

    def at(number: int) -> None:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    with serving(Reader(at)) as server:
        pipe.send(server.url)
        threading.Event().wait(60)


def test_a_receiver_that_is_killed_is_lost_and_others_get_all() -> None:
    reader = Reader()
    with ExitStack() as stack:
        dying = Forked(serve_until_killed)
        stack.callback(dying.kill)
        first = Server(dying.recv(), TOKEN, 30.0, VOCABULARY)
        second = stack.enter_context(serving(reader))
        specs = [shard.spec for shard in staged(12, 0)]
        generator = ServedGenerator([first, second], specs, Layout())
        generator.load_weights(Publication(staged(12, 1)), 1)
        assert [*generator._lost] == [first]
        assert [float(x[0]) for _, _, x in reader.got] == [1000.0 + n for n in range(12)]
        [staging] = generator._stagings or []
        inode = os.fstat(staging.offer["file"]).st_ino
        assert mappings(inode) == 1  # the sender's
        generator.close()
        del generator, staging
        assert mappings(inode) == 0


def test_a_receiver_that_fails_says_why_and_keeps_no_memory() -> None:
    def at(number: int) -> None:
        if number == 5:
            raise BurnishError("no room for w5")

    with serving(Reader(at)) as server:
        generator = feeding(server, staged(12, 0))
        generator.load_weights(Publication(staged(12, 1)), 1)
        assert "w5" in generator._lost[server]
        assert server.about()["version"] is None
        [staging] = generator._stagings or []
        inode = os.fstat(staging.offer["file"]).st_ino
        deadline = time.monotonic() + 20
        while mappings(inode) > 1:
            assert time.monotonic() < deadline


def test_two_servers_read_the_same_buffers() -> None:
    model = tiny_model()
    with serving(own(model)) as one, serving(own(model)) as two:
        generator = served([one, two], model)
        generator.load_weights(Publication(model_shards(model)), 1)
        assert len(generator._stagings or ()) == 1
        sums = [dict(server.checksums()) for server in (one, two)]
    assert sums[0] == sums[1] == {shard.spec: shard.checksum() for shard in model_shards(model)}
