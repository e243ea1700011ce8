"""Weights by broadcast to a process with a device of its own: what NCCL does. On CPUs gloo does it, which proves the tests."""

from __future__ import annotations

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support.models.servers import TOKEN, VOCABULARY
from support.models.tiny import tiny_model

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.rollout import weight_group as group_module
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.client import ServedGenerator, Server
from burnish.rollout.server import GeneratorServer
from burnish.rollout.weight_group import GroupMember, OwnProcess

KINDS = [
    pytest.param("cpu", marks=pytest.mark.nightly),
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ),
]


def serve(kind: str, pipe: Connection) -> None:
    """Serve a generator on the second device until this process is killed."""
    device = torch.device(kind, 1) if kind == "cuda" else torch.device(kind)
    group_module.first_mapped = lambda offers, device, peers: None  # as on another machine
    generator = BuiltinGenerator(
        tiny_model().config,
        layout=Layout(),
        device=device,
        dtype=torch.float32,
        slots=4,
        eos_token_ids=(),
    )
    server = GeneratorServer(
        generator, token=TOKEN, about={}, timeout=60.0, receivers=OwnProcess(device)
    )
    pipe.send(server.url)
    server.run()


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_gets_each_version_and_its_death_holds_nobody_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    context = get_context("spawn")
    here, there = context.Pipe()
    process: Any = context.Process(target=serve, args=(kind, there), daemon=True)
    process.start()
    try:
        server = Server(here.recv(), TOKEN, 60.0, VOCABULARY)
        models = [tiny_model(seed=seed).to(first) for seed in (0, 1, 2)]
        specs = list(dict.fromkeys(shard.spec for shard in model_shards(models[0])))
        generator = ServedGenerator([server], specs, Layout())
        for version, model in enumerate(models):
            generator.load_weights(Publication(model_shards(model)), version)
            wanted = {shard.spec: shard.checksum() for shard in model_shards(model)}
            assert dict(generator.checksums()) == wanted
        assert server._way == ("NCCL" if kind == "cuda" else "gloo")
        began = time.monotonic()
        plain_send = GroupMember.send

        def send(member: GroupMember, buffer: torch.Tensor) -> None:
            process.kill()
            process.join()
            plain_send(member, buffer)

        monkeypatch.setattr(GroupMember, "send", send)
        generator.load_weights(Publication(model_shards(models[0])), 3)
        assert [*generator._lost] == [server]
        assert server._member is None
        if kind == "cuda":
            torch.cuda.synchronize(first)
        assert time.monotonic() - began < 60
    finally:
        process.kill()
        process.join()
