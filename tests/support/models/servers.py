"""Generators of a tiny model behind servers in threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from burnish.boxes.box import Box
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.records import Completion, Request
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.client import ServedGenerator, Server
from burnish.rollout.server import GeneratorServer
from support.models.tiny import tiny_config, tiny_model

TOKEN, CPU = "secret", torch.device("cpu")
VOCABULARY: int = tiny_config().get_text_config().vocab_size
SAMPLING = Sampling(6, seed=3)


def own(
    model: PreTrainedModel,
    slots: int = 4,
    eos: Sequence[int] = (),
    kind: type[BuiltinGenerator] = BuiltinGenerator,
) -> BuiltinGenerator:
    return kind(
        model.config,
        layout=Layout(),
        device=CPU,
        dtype=torch.float32,
        slots=slots,
        eos_token_ids=eos,
    )


PIECE = 10_000
"""Elements of a piece: more than half of the smallest buffer in fp32."""


def staged(count: int, version: int) -> list[Shard]:
    """Pieces that say which they are."""
    return [
        Shard(
            TensorSpec(f"w{number}", (PIECE,), torch.float32),
            Box((0,), (PIECE,)),
            torch.full((PIECE,), float(1000 * version + number)),
        )
        for number in range(count)
    ]


class Reader:
    """A generator that only keeps what it gets, and does something at each piece."""

    def __init__(self, at: Callable[[int], None] = lambda number: None) -> None:
        self.at = at
        self.got: list[tuple[str, Box, torch.Tensor]] = []

    def load_weights(self, weights: Publication, version: int) -> None:
        self.got = []
        for shard in weights.changing:
            self.at(len(self.got))
            self.got.append((shard.spec.name, shard.box, shard.tensor.clone()))


def mappings(inode: int, process: int | None = None) -> int:
    """How often a process maps a file, by default this one."""
    gc.collect()
    lines = Path(f"/proc/{process or 'self'}/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def feeding(server: Server, shards: Sequence[Shard]) -> ServedGenerator:
    return ServedGenerator([server], [shard.spec for shard in shards], Layout())


@contextmanager
def serving(generator: Any, timeout: float = 30.0, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server in a thread."""
    server = GeneratorServer(
        generator,
        token=TOKEN,
        about={},
        timeout=timeout,
        host=host,
        receivers=getattr(generator, "receivers", None),
    )
    ended = threading.Event()

    def check() -> None:
        if ended.is_set():
            raise InterruptedError

    def run() -> None:
        with suppress(InterruptedError):
            server.run(check)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield Server(server.url, TOKEN, max(timeout, 30.0), VOCABULARY)
    finally:
        ended.set()
        thread.join(30)
        assert not thread.is_alive()


def served(servers: Sequence[Server], model: PreTrainedModel, **more: Any) -> ServedGenerator:
    specs = list(dict.fromkeys(shard.spec for shard in model_shards(model)))
    return ServedGenerator(servers, specs, Layout(), **more)


def loaded(servers: Sequence[Server], version: int = 1, **more: Any) -> ServedGenerator:
    """One with weights."""
    model = tiny_model()
    generator = served(servers, model, **more)
    generator.load_weights(Publication(model_shards(model)), version)
    return generator


def alone(requests: Sequence[Request], sampling: Sampling = SAMPLING) -> list[list[Completion]]:
    """What a generator inside draws."""
    generator = own(tiny_model())
    generator.load_weights(Publication(model_shards(tiny_model())), 1)
    return generator.generate(requests, sampling)
