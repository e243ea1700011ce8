"""Generators behind sockets: what every generator owes, and what those do that die, hang and lie."""

from __future__ import annotations

import gc
import http.client
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import GeneratorContract, assert_same, make_requests
from hypothesis import given
from hypothesis import strategies as st
from support.models.adapters import LORA, published_beside
from support.models.generators import make_generator
from support.models.servers import (
    SAMPLING,
    TOKEN,
    VOCABULARY,
    alone,
    loaded,
    own,
    served,
    serving,
)
from support.models.tiny import tiny_config, tiny_model
from support.nightly import by_day
from support.ranks.processes import run_ranks
from transformers import PreTrainedModel

from burnish.boxes.box import Box
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.models.names import model_shards
from burnish.records import Completion, Request
from burnish.rollout import messages
from burnish.rollout.base import RunningRequest
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.client import ServedGenerator, Server, ServerLost, Upload
from burnish.rollout.in_flight import PartialCompletions
from burnish.rollout.server import GeneratorServer
from burnish.rollout.staging import Staging

BESIDE = LORA.model_copy(update={"publish": "adapter"})


class Leisurely(BuiltinGenerator):
    """One that is asked how far it is before it is done."""

    def generate(self, requests: Any, sampling: Any, watch: Any = None) -> Any:
        def slowly(ended: int) -> None:
            time.sleep(0.02)
            watch(ended)

        return super().generate(requests, sampling, slowly)


class TestServedGenerator(GeneratorContract):
    @pytest.fixture(autouse=True)
    def _stack(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def make(
        self, model: PreTrainedModel, *, slots: int = 4, eos: Sequence[int] = (), version: int = 1
    ) -> ServedGenerator:
        servers = [self.stack.enter_context(serving(own(model, slots, eos))) for _ in range(2)]
        generator = served(servers, model)
        generator.load_weights(Publication(model_shards(model)), version)
        return generator

    def make_in_flight(self, model: PreTrainedModel) -> ServedGenerator:
        slow = [own(model, kind=Leisurely) for _ in range(2)]
        servers = [self.stack.enter_context(serving(each)) for each in slow]
        generator = served(servers, model, in_flight=True)
        generator.load_weights(Publication(model_shards(model)), 1)
        return generator

    @pytest.mark.parametrize("family", ["qwen3", "mixtral"])
    def test_checksums_are_those_of_the_weights_and_a_tied_head_counts(self, family: str) -> None:
        """Each server tells its own."""
        model = tiny_model(family)
        found = [(spec.name, digest) for spec, digest in self.make(model).checksums()]
        wanted = {shard.spec.name: shard.checksum() for shard in model_shards(model)}
        assert dict(found) == wanted
        assert len(found) == 2 * (len(wanted) + model.config.tie_word_embeddings)


@pytest.mark.nightly
class TestWithBroadcastWeights(TestServedGenerator):
    """No server maps the sender's memory, as on another machine."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "burnish.rollout.weight_group.first_mapped", lambda offers, device, peers: None
        )

    def make(self, model: PreTrainedModel, **options: Any) -> ServedGenerator:
        generator = super().make(model, **options)
        assert {server._way for server in generator._servers} == {"gloo"}
        return generator


@contextmanager
def scripted(*scripts: Callable[[socket.socket], None]) -> Iterator[Server]:
    """What takes weights, and then does to each request for completions what a script does; the last one again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = list(scripts)

        def answer(connection: socket.socket) -> None:
            with connection:
                stream = connection.makefile("rb")
                line = stream.readline()
                if line.startswith(b"PUT"):
                    if b"staging" in line:  # it maps nothing
                        connection.sendall(
                            response(
                                chunk({"mapped": None, "group": None, "why": ""}),
                                b"Transfer-Encoding: chunked\r\n",
                            )
                        )
                    while stream.readline() != b"0\r\n":
                        pass
                    done = chunk({}) if b"staging" in line else [response(messages.encode({}))]
                    connection.sendall(b"".join([*done, b"0\r\n\r\n"]))
                elif line:
                    while stream.readline() != b"\r\n":
                        pass
                    (left.pop(0) if len(left) > 1 else left[0])(connection)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", TOKEN, 1.0, VOCABULARY)
        listening.shutdown(socket.SHUT_RDWR)


def chunk(fields: dict[str, Any]) -> list[bytes]:
    """A message as a chunk of an answer."""
    body = b"".join(messages.encode(fields))
    return [b"%x\r\n" % len(body), body, b"\r\n"]


def response(message: Sequence[bytes], head: bytes = b"", cut: int = 0) -> bytes:
    body = b"".join(message)
    size = b"Content-Length: %d\r\n" % len(body)
    return (b"HTTP/1.1 200 OK\r\n" + (head or size) + b"\r\n" + body)[: -cut or None]


def answers(change: Callable[[list[list[Completion]]], list[list[Completion]]], **how: Any) -> Any:
    """A script that answers with what it makes of the right completions of any request."""

    def script(connection: socket.socket) -> None:
        groups = change(alone(make_requests((1, 5), samples=2)))
        connection.sendall(response(messages.encode_completions(groups), **how))

    return script


def says(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


def each(**change: Callable[[Completion], Any]) -> Any:
    """Change fields of every completion."""

    def changed(groups: list[list[Completion]]) -> list[list[Completion]]:
        return [
            [replace(one, **{name: make(one) for name, make in change.items()}) for one in group]
            for group in groups
        ]

    return answers(changed)


def hangs(connection: socket.socket) -> None:
    connection.recv(1 << 20)
    connection.recv(1)
    time.sleep(30)


def line(text: bytes) -> Callable[[socket.socket], None]:
    return says(response([text + b"\n"]))


def drips(text: bytes) -> Callable[[socket.socket], None]:
    """Send a text byte by byte, each well within the time-out and the whole well beyond it."""

    def script(connection: socket.socket) -> None:
        with suppress(OSError):
            for number in range(len(text)):
                connection.sendall(text[number : number + 1])
                time.sleep(0.1)

    return script


def tells(change: Callable[[dict[str, Any]], Any]) -> Any:
    """A script that answers with the right arrays, and with changed fields of each completion."""

    def script(connection: socket.socket) -> None:
        message = sent(messages.encode_completions(alone(make_requests((1, 5), samples=2))))
        for one in message.fields["completions"]:
            one |= change(one)
        connection.sendall(response(messages.encode(message.fields, message.arrays)))

    return script


def turns(name: str, change: Callable[[Any], Any]) -> Any:
    """A script that answers with the right fields, and with one changed array."""

    def script(connection: socket.socket) -> None:
        message = sent(messages.encode_completions(alone(make_requests((1, 5), samples=2))))
        arrays = {**message.arrays, name: change(message.arrays[name])}
        connection.sendall(response(messages.encode(message.fields, arrays)))

    return script


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
LIES: dict[str, Callable[[socket.socket], None]] = {
    "dies": lambda connection: None,
    "dies in its answer": answers(list, cut=40),
    "dies between chunks": says(
        response([b"1e\r\n" + messages.encode({"ended": 1})[0]], b"Transfer-Encoding: chunked\r\n")
    ),
    "hangs": hangs,
    "is no server": says(b"SSH-2.0-OpenSSH\r\n"),
    "refuses": says(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"),
    "says nothing": says(response([])),
    "says no JSON": line(b"hello"),
    "says a list": line(b"[1]"),
    "says a deep list": line(b"[" * 100_000),
    "says no arrays": line(b'{"completions": []}'),
    "says odd arrays": line(b'{"arrays": {"a": 3}}'),
    "says an odd size": line(b'{"arrays": {"a": ["int64", [2.5]]}}'),
    "says a huge size": line(b'{"arrays": {"a": ["int64", [1000000000000000]]}}'),
    "says a size without end": line(
        b'{"arrays": {"a": ["int64", [1' + b"0" * 40 + b"]]}}" + bytes(64)
    ),
    "says a huge chunk": says(response([b"ffffffffffff\r\n{"], b"Transfer-Encoding: chunked\r\n")),
    "says an odd error": line(b'{"arrays": {}, "error": {"sorry": 1}}'),
    "says that it failed": line(b'{"arrays": {}, "failed": "out of memory"}'),
    "says an odd count": line(b'{"arrays": {}, "ended": null}'),
    "answers with another version": each(weights_version=lambda one: 2),
    "too few": answers(lambda groups: groups[1:]),
    "too few of a prompt": answers(lambda groups: [group[1:] for group in groups]),
    "too long": each(
        token_ids=lambda one: np.repeat(one.token_ids, 2),
        logprobs=lambda one: np.repeat(one.logprobs, 2),
        sampled_logprobs=lambda one: np.repeat(one.sampled_logprobs, 2),
    ),
    "short arrays": each(logprobs=lambda one: one.logprobs[1:]),
    "NaN": each(logprobs=lambda one: one.logprobs * np.float32("nan")),
    "NaN as drawn": each(sampled_logprobs=lambda one: one.sampled_logprobs * np.float32("nan")),
    "no tokens": each(token_ids=lambda one: one.token_ids - 1000),
    "no reason": each(stop_reason=lambda one: "tired"),
    "beyond the vocabulary": each(token_ids=lambda one: one.token_ids + VOCABULARY),
    "one id beyond the vocabulary": each(
        token_ids=lambda one: np.append(one.token_ids[:-1], VOCABULARY)
    ),
    "a huge id": each(token_ids=lambda one: one.token_ids + (1 << 40)),
    "positive log-probs": each(logprobs=lambda one: np.abs(one.logprobs) + 1),
    "positive as drawn": each(sampled_logprobs=lambda one: np.abs(one.sampled_logprobs) + 1),
    "infinite": each(logprobs=lambda one: one.logprobs - np.float32("inf")),
    "cut too early": each(
        token_ids=lambda one: one.token_ids[1:],
        logprobs=lambda one: one.logprobs[1:],
        sampled_logprobs=lambda one: one.sampled_logprobs[1:],
    ),
    "markup as reason": tells(lambda one: {"stop_reason": "<script>"}),
    "a reason missing": tells(lambda one: {"stop_reason": None}),
    "later versions": tells(lambda one: {"later_versions": [[2, 1]]}),
    "a version in words": tells(lambda one: {"weights_version": "one"}),
    "odd times": tells(lambda one: {"times": ["now", 1, 2]}),
    "endless times": tells(lambda one: {"times": [1e300, 1e300, 1e300]}),
    "numbers of tokens in words": tells(lambda one: {"tokens": "6"}),
    "no list of experts": tells(lambda one: {"experts": 9}),
    "ids as fractions": turns("token_ids", lambda ids: ids.astype(np.float32)),
    "log-probs as integers": turns("logprobs", lambda values: values.astype(np.int64)),
    "ids in a table": turns("token_ids", lambda ids: np.stack([ids, ids], axis=1)),
    "says that none have ended": line(b'{"arrays": {}, "ended": -1}'),
    "says that many have ended": line(b'{"arrays": {}, "ended": 1000000000000}'),
    "says that half of one has ended": line(b'{"arrays": {}, "ended": 0.5}'),
    "drips its head": drips(HEAD),
    "drips a message": lambda connection: (
        connection.sendall(HEAD),
        drips(b'{"arrays": {}, "ended": 0' + b" " * 60)(connection),
    )[1],
}


@pytest.mark.parametrize("lie", by_day(LIES, [*LIES][::4]))
def test_another_takes_over_from_one_that(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    requests = make_requests((1, 5, 5, 1), samples=2)
    with scripted(LIES[lie]) as liar, serving(own(tiny_model())) as honest:
        found = loaded([liar, honest]).generate(requests, SAMPLING)
        assert liar.url in caplog.text
        with pytest.raises(BurnishError, match=liar.url):
            loaded([liar]).generate(requests, SAMPLING)
    assert_same(found, alone(requests))
    assert {each.weights_version for group in found for each in group} == {1}


def test_who_is_lost_changes_no_bit() -> None:
    requests = make_requests((1, 5, 23, 2, 40, 7, 3), samples=3)
    drawn = []
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(own(tiny_model()))) for _ in range(2)]
        liar = stack.enter_context(scripted(LIES["dies"]))
        for each_of in (servers, [liar, servers[1]], [servers[0], liar]):
            groups = loaded(each_of).generate(requests, SAMPLING)
            drawn.append([c.logprobs.tobytes() for group in groups for c in group])
    assert drawn[0] == drawn[1] == drawn[2]


@dataclass
class Paced:
    """A generator that ends its first call when `may_end` is set, and sets `last` when so many requests have come to it."""

    inner: BuiltinGenerator
    may_end: threading.Event
    last: threading.Event
    wanted: int
    asked: list[int] = field(default_factory=list)

    def load_weights(self, weights: Publication, version: int) -> None:
        self.inner.load_weights(weights, version)

    def generate(self, requests: Any, sampling: Any, watch: Any) -> list[list[Completion]]:
        self.asked += [request.prompt_key for request in requests]
        if len(self.asked) >= self.wanted:
            self.last.set()
        while not self.may_end.wait(0.01):
            watch(0)
        return self.inner.generate(requests, sampling, watch)


@pytest.mark.parametrize("dies", [False, True])
def test_in_flight_a_slow_server_gets_less_and_what_a_lost_one_had_is_drawn(dies: bool) -> None:
    """The slow one ends its first share after the other has had everything else."""
    requests, over, free = make_requests((3,) * 9, samples=2), threading.Event(), threading.Event()
    free.set()
    quick = Paced(own(tiny_model()), free, over, wanted=6)
    slow = Paced(own(tiny_model()), over, threading.Event(), wanted=9)
    with ExitStack() as stack:
        lost = scripted(LIES["dies"]) if dies else serving(slow)
        servers = [stack.enter_context(each) for each in (lost, serving(quick))]
        found = loaded(servers, in_flight=True).generate(requests, SAMPLING)
    assert_same(found, alone(requests))
    asked = [each.prompt_key for each in requests]
    assert sorted(quick.asked + slow.asked) == asked
    assert len(quick.asked) == (9 if dies else 6)


def test_an_error_of_the_user_is_raised_and_nobody_is_lost() -> None:
    with serving(own(tiny_model())) as server:
        generator = loaded([server])
        with pytest.raises(UsageError, match="positions"):
            generator.generate(make_requests(), replace(SAMPLING, max_tokens=10**6))
        generator.generate(make_requests(), SAMPLING)


def test_weights_of_another_process_are_not_taken_for_ones_own() -> None:
    other = tiny_model("qwen3", attention_bias=False)
    for each_of in model_shards(other):
        each_of.tensor.mul_(2)
    with serving(own(tiny_model())) as server:
        mine = loaded([server])
        theirs = served([server], other)
        theirs.load_weights(Publication(model_shards(other)), 1)
        with pytest.raises(BurnishError, match="another process"):
            mine.generate(make_requests(), SAMPLING)
        theirs.generate(make_requests(), SAMPLING)


def test_what_a_process_before_asked_for_is_not_taken_for_ones_own() -> None:
    """A run that was killed leaves a call under way, and the next one's weights come into its middle."""
    model, requests = tiny_model(), make_requests()
    slow, failed = own(model, 1, kind=Leisurely), []
    with serving(slow) as server:
        before = loaded([server], in_flight=True)

        def ask() -> None:
            with pytest.raises(BurnishError, match="another process"):
                before.generate(requests, replace(SAMPLING, max_tokens=60))
            failed.append(True)

        thread = threading.Thread(target=ask)
        thread.start()
        while not before.so_far():
            time.sleep(0.01)
        after = loaded([server], in_flight=True)
        assert after.so_far() == []
        thread.join(60)
    assert failed


class Late(Leisurely):
    """One that tells how far it is when `may_tell` returns true."""

    may_tell: Callable[[], bool]

    def so_far(self) -> list[RunningRequest]:
        until(self.may_tell)
        return super().so_far()


def test_a_share_that_ends_while_others_tell_how_far_they_are_counts_once() -> None:
    """One server has told the beginning of what is whole when the other has told, too."""
    requests, partial = make_requests((3, 5), samples=2), PartialCompletions({})
    first = own(tiny_model(), 1, kind=Leisurely)
    second: Any = own(tiny_model(), 1, kind=Late)
    with serving(first) as one, serving(second) as two:
        generator = loaded([one, two], in_flight=True)
        second.may_tell = lambda: bool(generator._ended)
        sampling = replace(SAMPLING, max_tokens=12)
        thread = threading.Thread(
            target=lambda: partial.generate(generator, requests, sampling), daemon=True
        )
        thread.start()
        until(lambda: any(len(c.token_ids) for each in first.so_far() for c in each.completions))
        found = partial.so_far(generator)
        thread.join(60)
    wanted = {
        (request.prompt_key, number): each
        for request, group in zip(requests, alone(requests, sampling), strict=True)
        for number, each in enumerate(group)
    }
    assert any(each.stop_reason for each in found.values())
    for key, each in found.items():
        tokens = wanted[key.prompt_key, key.sample].token_ids
        assert each.token_ids.tolist() == tokens[: len(each.token_ids)].tolist()
        assert each.weights_version == 1


def test_a_wrong_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with serving(own(tiny_model())) as server:
        stranger = Server(server.url, "guessed", 5.0)
        for ask in (stranger.about, stranger.checksums, stranger.release):
            with pytest.raises(ServerLost, match="401"):
                ask()
        with pytest.raises(BurnishError, match=server.url):
            loaded([stranger]).generate(make_requests(), SAMPLING)
        assert server.about()["version"] is None


def test_a_server_at_an_address_of_ipv6() -> None:
    with serving(own(tiny_model()), host="::1") as server:
        found = loaded([server]).generate(make_requests(), SAMPLING)
    assert_same(found, alone(make_requests()))


def test_a_lost_server_is_revived_before_the_next_weights() -> None:
    requests, asked = make_requests(), []
    with (
        scripted(LIES["dies"]) as liar,
        serving(own(tiny_model())) as second,
        serving(own(tiny_model())) as third,
    ):

        def revive(lost: Sequence[str], others: Sequence[str]) -> dict[str, tuple[str, str]]:
            asked.append((tuple(lost), tuple(others)))
            return {liar.url: (third.url, TOKEN)}

        generator = loaded([liar, second], revive=revive)
        generator.generate(requests, SAMPLING)
        for version in (2, 3):
            generator.load_weights(Publication(model_shards(tiny_model())), version)
        assert third.about()["version"] == 3
        assert_same(generator.generate(requests, SAMPLING), alone(requests))
    assert asked == [((liar.url,), (second.url,))]


def test_who_takes_the_place_of_another_is_asked_once_it_has_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In flight a thread may ask while weights are on their way."""
    requests, upload = make_requests(), Server.upload
    with (
        serving(own(tiny_model())) as first,
        serving(own(tiny_model())) as second,
        serving(own(tiny_model())) as third,
    ):

        def late(server: Server, version: int, owner: str = "", **how: Any) -> Any:
            assert_same(generator.generate(requests, SAMPLING), alone(requests))
            return upload(server, version, owner, **how)

        revived = {first.url: (third.url, TOKEN)}
        generator = loaded([first, second], in_flight=True, revive=lambda lost, others: revived)
        generator._lose(first, "by this test")
        monkeypatch.setattr(Server, "upload", late)
        generator.load_weights(Publication(model_shards(tiny_model())), 2)
        assert [*generator._lost] == [first]
        assert third.about()["version"] == 2


class Alongside(logging.Handler):
    """Does something when rank 0 first says that a server is lost, as if another thread did it then."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._acts = [act]

    def emit(self, record: logging.LogRecord) -> None:
        if self._acts and "lost" in record.getMessage():
            self._acts.pop()()


def losing_two(layout: Layout, urls: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Rank 1 has lost a server. While it tells, rank 0 loses another, as the thread that draws does."""
    servers, model = [Server(url, TOKEN, 30.0, VOCABULARY) for url in urls[:3]], tiny_model()
    others, told = iter(urls[3:]), list[tuple[str, ...]]()

    def revive(lost: Sequence[str], left: Sequence[str]) -> dict[str, tuple[str, str]]:
        told.append(tuple(lost))
        return {url: (next(others), TOKEN) for url in lost} if layout.is_main else {}

    specs = list(dict.fromkeys(shard.spec for shard in model_shards(model)))
    generator = ServedGenerator(servers, specs, layout, in_flight=True, revive=revive)
    mine = [each for number, each in enumerate(model_shards(model)) if number % 2 == layout.rank]
    handler = Alongside(lambda: generator._lose(servers[2], "by this test"))
    logging.getLogger("burnish").addHandler(handler)
    if layout.rank == 1:
        generator._lose(servers[1], "by this test")
    for version in (1, 2):
        generator.load_weights(Publication(mine), version)
    found = generator.generate(make_requests(), SAMPLING) if layout.is_main else []
    return told, found


def test_a_server_that_one_rank_loses_while_ranks_tell_of_others() -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(own(tiny_model()))).url for _ in range(5)]
        (told, found), (heard, _) = run_ranks(losing_two, 2, urls)
    assert told == heard == [(urls[1],), (urls[2],)]
    assert_same(found, alone(make_requests()))


def test_an_adapter_travels_alone_after_the_weights_that_it_is_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is new gets both; what is drawn is what a generator inside draws. Both servers read the same memory."""
    requests, sent = make_requests(), [0]
    plain_send, plain_write = Server.send, Staging.write

    def send(server: Server, upload: Upload, message: messages.Parts) -> None:
        sent[-1] += sum(map(len, message))
        plain_send(server, upload, message)

    def write(staging: Staging, part: Shard) -> None:
        sent[-1] += part.tensor.nbytes
        plain_write(staging, part)

    monkeypatch.setattr(Server, "send", send)
    monkeypatch.setattr(Staging, "write", write)
    published = [published_beside(tiny_model(), LORA, factor) for factor in (1.0, -1.0, 2.0)]
    changing, fixed = ([shard.spec for shard in side] for side in vars_of(published[0]))
    held = [make_generator(tiny_config(), Layout(), lora=BESIDE) for _ in range(3)]
    oracle = make_generator(tiny_config(), Layout(), lora=BESIDE)
    with serving(held[0]) as first, serving(held[1]) as second, serving(held[2]) as third:
        revived = {first.url: (third.url, TOKEN)}
        generator = ServedGenerator(
            [first, second], changing, Layout(), fixed=fixed, revive=lambda lost, others: revived
        )
        for version, weights in enumerate(published):
            generator.load_weights(weights, version)
            oracle.load_weights(weights, version)
            found = generator.generate(requests, SAMPLING)
            assert_same(found, oracle.generate(requests, SAMPLING))
            if version == 1:
                generator._lose(first, "by this test")
            sent.append(0)
    adapter, model = (sum(shard.tensor.nbytes for shard in s) for s in vars_of(published[0]))
    headers = 200 * (len(changing) + len(fixed))
    for bytes_sent, wanted in zip(sent, (model + adapter, adapter, model + adapter), strict=False):
        assert wanted < bytes_sent < wanted + 2 * headers


def vars_of(weights: Publication) -> tuple[list[Shard], list[Shard]]:
    return list(weights.changing), list(weights.fixed)


@dataclass
class Slow:
    """A generator that works until it may stop, and then only when asked to."""

    watched: threading.Event = field(default_factory=threading.Event)
    left: bool = False
    error: Exception | None = None

    def load_weights(self, weights: Publication, version: int) -> None:
        list(weights.changing)

    def release(self) -> None:
        pass

    def generate(self, requests: Any, sampling: Any, watch: Any) -> list[list[Completion]]:
        if self.error is not None:
            raise self.error
        try:
            while True:
                watch(1)
                self.watched.set()
                time.sleep(0.01)
        finally:
            self.left = True


def test_each_side_gives_memory_back_before_the_other_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    slow = Slow()
    slow.load_weights = lambda weights, version: did.append("load")  # type: ignore[method-assign]
    slow.release = lambda: did.append("release")  # type: ignore[method-assign]
    monkeypatch.setattr("burnish.rollout.server.empty_cache", lambda: did.append("generator"))
    with serving(slow) as server:
        loaded([server], make_room=lambda: did.append("trainer")).release()
    assert did == ["trainer", "load", "trainer", "release", "generator"]


def test_a_server_that_hangs_does_not_say_what_it_is_until_it_moves() -> None:
    """So it is not found where a run looks for another."""
    slow, moves = Slow(), threading.Event()
    slow.release = moves.wait  # type: ignore[assignment]
    with serving(slow, timeout=0.5) as server:
        thread = threading.Thread(target=server.release)
        thread.start()
        try:
            until(lambda: not is_found(server))
        finally:
            moves.set()
        until(lambda: is_found(server))
        thread.join(30)


def is_found(server: Server) -> bool:
    with suppress(ServerLost):
        return bool(server.about())
    return False


@contextmanager
def uploading(server: Server, pieces: Sequence[Sequence[bytes]]) -> Iterator[Upload]:
    """Begin an upload, and leave it at that."""
    with server.upload(5) as upload:
        for piece in pieces:
            server.send(upload, piece)
        yield upload


def upload_all(server: Server, pieces: Sequence[Sequence[bytes]]) -> None:
    """Upload pieces that may lack the last."""
    with uploading(server, pieces) as upload:
        server.finish(upload)


def pieces() -> list[list[bytes]]:
    return [messages.encode_shard(shard) for shard in model_shards(tiny_model())]


def until(fine: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not fine():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("leaves", [True, False])
def test_an_upload_that_ends_in_the_middle_leaves_no_version(leaves: bool) -> None:
    """Whether the sender is gone, or silent for too long."""
    with serving(own(tiny_model()), timeout=30 if leaves else 3.0) as server:
        generator = loaded([server])
        assert server.about()["version"] == 1
        with uploading(Server(server.url, TOKEN, 30.0), pieces()[:3]) as upload:
            until(lambda: server.about()["version"] is None)
            if leaves:
                upload.connection.close()
            with pytest.raises(BurnishError, match="version"):
                generator.generate(make_requests(), SAMPLING)
        generator = loaded([server], version=6)
        assert_same(generator.generate(make_requests(), SAMPLING), alone(make_requests()))


@pytest.mark.parametrize("what", ["too few", "another shape", "another dtype", "no last", "junk"])
def test_weights_that_are_not_the_models_leave_no_version(what: str) -> None:
    given = pieces()
    name = b"model.embed_tokens.weight"
    wrong = {
        "too few": [*given[1:], messages.LAST],
        "another shape": [[each[0].replace(b"[97, 32]", b"[32, 97]"), each[1]] for each in given]
        + [messages.LAST],
        "another dtype": [[each[0].replace(b"float32", b"load"), each[1]] for each in given],
        "no last": given,
        "junk": [[b"junk\n"]],
    }[what]
    assert any(name in each[0] for each in given)
    with serving(own(tiny_model())) as server:
        loaded([server])
        with pytest.raises((ServerLost, BurnishError)):
            upload_all(server, wrong)
        assert server.about()["version"] is None
        loaded([server]).generate(make_requests(), SAMPLING)


def test_a_client_that_leaves_ends_the_generation() -> None:
    slow = Slow()
    with serving(slow) as server:
        with server.upload(1) as upload:
            server.send(upload, messages.LAST)
            server.finish(upload)

        def watch(count: int) -> None:
            if slow.watched.is_set():
                raise InterruptedError

        generator = served([server], tiny_model())
        generator._version, generator._owner = 1, ""
        with pytest.raises(InterruptedError):
            generator.generate(make_requests(), SAMPLING, watch)
        until(lambda: slow.left)
        assert server.about()["version"] == 1
        assert server not in generator._lost


def test_a_call_that_fails_keeps_nothing_of_what_it_held() -> None:
    """A generation's cache may be most of a device's memory, which the next one needs."""
    caches: list[weakref.ref[Any]] = []

    class Cache:
        pass

    class Failing:
        def forget(self) -> None:
            cache = Cache()
            caches.append(weakref.ref(cache))
            raise OSError("the client has hung up")

    with serving(Failing()) as server:
        gc.disable()
        try:
            with pytest.raises(ServerLost):
                server.forget()
            until(lambda: caches[0]() is None)
        finally:
            gc.enable()


def test_who_waits_in_line_and_leaves_is_in_nobodys_way() -> None:
    slow = Slow()
    with serving(slow) as server:
        with server.upload(1) as upload:
            server.send(upload, messages.LAST)
            server.finish(upload)
        with ExitStack() as stack:
            body = b"".join(messages.encode_requests(make_requests(), SAMPLING, 1, in_flight=False))
            asking = []
            for _ in range(2):
                connection = stack.enter_context(closing(server._connection()))
                connection.request("POST", "/completions", body, server._headers)
                asking.append(connection)
                until(slow.watched.is_set)
        until(lambda: slow.left)
        server.release()  # comes after both


def test_a_generator_that_fails_is_named_and_others_take_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        serving(Slow(error=RuntimeError("no memory left"))) as failing,
        serving(own(tiny_model())) as fine,
    ):
        found = loaded([failing, fine]).generate(make_requests(), SAMPLING)
        assert failing.about()["version"] == 1
    assert_same(found, alone(make_requests()))
    assert "no memory left" in caplog.text


def raw(server: Server, text: bytes) -> bytes:
    """What it answers to anything."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        try:
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                return stream.read()
        except TimeoutError:
            raise
        except OSError:  # it has closed before it read all, and then the system may drop its answer
            return HUNG_UP


HUNG_UP = b"hung up"
POST = b"POST /completions HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
PUT = b"PUT /weights?version=3 HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ODD: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "a long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "no length": POST + b"\r\n",
    "an odd length": POST + b"Content-Length: many\r\n\r\n",
    "a negative length": POST + b"Content-Length: -5\r\n\r\n",
    "a huge length": POST + b"Content-Length: 100000000000000\r\n\r\n{}\n",
    "a negative chunk": POST + CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a huge chunk": POST + CHUNKED + b"ffffffffffff\r\nhello",
    "an odd chunk": POST + CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a huge array": POST + CHUNKED + b'40\r\n{"arrays": {"a": ["int64", [10000000000000000]]}}             \n',
    "no fields": POST + CHUNKED + b'e\r\n{"arrays": {}}\r\n1\r\n\n\r\n0\r\n\r\n',
    "a list": POST + CHUNKED + b"3\r\n[1]\r\n1\r\n\n\r\n0\r\n\r\n",
    "weights of an odd length": PUT + b"Content-Length: many\r\n\r\n",
    "weights in a negative chunk": PUT + CHUNKED + b"-5\r\nhello\r\n",
    "weights without fields": PUT + CHUNKED + b'e\r\n{"arrays": {}}\r\n1\r\n\n\r\n0\r\n\r\n',
    "no version": PUT.replace(b"version=3", b"version=-3") + CHUNKED,
    "nowhere": PUT.replace(b"PUT /weights", b"DELETE /weights") + b"\r\n",
}  # fmt: skip


@pytest.mark.parametrize("what", by_day(ODD, [*ODD][::2]))
def test_an_odd_request_is_answered_and_so_is_the_next(what: str) -> None:
    with serving(own(tiny_model())) as server:
        generator = loaded([server])
        said = raw(server, ODD[what])
        answers = (b" 40", b" 41", b" 501", b'"failed"', HUNG_UP)
        assert any(answer in said for answer in answers), said
        if what.startswith("weights"):
            assert server.about()["version"] is None
            generator = loaded([server])
        assert_same(generator.generate(make_requests(), SAMPLING), alone(make_requests()))


def test_requests_without_fields_are_answered() -> None:
    odd = [{}, {"requests": [[1]]}, {"requests": [], "sampling": {"heat": 3}, "version": 1}]
    with serving(own(tiny_model())) as server:
        loaded([server])
        for fields in odd:
            with closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as asking:
                body = b"".join(messages.encode(fields, {"token_ids": np.zeros(3, np.int64)}))
                asking.request("POST", "/completions", body, server._headers)
                said = messages.read_message(BytesIO(asking.getresponse().read()))
                assert said is not None
                assert "failed" in said.fields


def test_a_port_that_is_taken_is_refused() -> None:
    make = partial(GeneratorServer, own(tiny_model()), token=TOKEN, about={})
    with serving(own(tiny_model())) as server, pytest.raises(UsageError, match="in use"):
        make(port=int(server.url.rpartition(":")[2]))


def sent(message: Sequence[bytes]) -> messages.Message:
    found = messages.read_message(BytesIO(b"".join(message)))
    assert found is not None
    return found


SIZES = st.integers(0, 5)
FLOATS = st.floats(-50, 0, width=32)


@st.composite
def requests_of(draw: st.DrawFn) -> list[Request]:
    ids = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5)
    return [
        Request(draw(st.integers(0, 1 << 62)), np.array(draw(ids), np.int64), draw(SIZES), draw(SIZES), drawn=draw(st.integers(0, 3)))
        for _ in range(draw(SIZES))
    ]  # fmt: skip


@st.composite
def completions_of(draw: st.DrawFn, requests: Sequence[Request]) -> list[list[Completion]]:
    def completion(drawn: int) -> Completion:
        longest = SAMPLING.max_tokens - drawn
        ids = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=longest)
        tokens = np.array(draw(ids), np.int64)
        both = [np.array([draw(FLOATS) for _ in tokens], np.float32) for _ in range(2)]
        reason, rows = (
            draw(st.sampled_from(["stop", "length"][: 1 + (len(tokens) == longest)])),
            draw(st.none() | st.integers(1, 3)),
        )
        kind = np.uint8 if wide else np.int16
        experts = None if rows is None else np.arange(rows * 6, dtype=kind).reshape(rows, 3, 2)
        times = draw(st.none() | st.tuples(*[st.floats(0, 1e10)] * 3))
        return Completion(tokens, *both, reason, 4, experts, times=times)

    wide = draw(st.booleans())
    return [[completion(each.drawn) for _ in range(each.samples)] for each in requests]


@given(st.data())
def test_completions_are_read_as_they_were_sent(data: st.DataObject) -> None:
    requests = data.draw(requests_of())
    groups = data.draw(completions_of(requests))
    message = sent(messages.encode_completions(groups))
    found = messages.read_completions(message, requests, SAMPLING, 4, 1 << 41, in_flight=False)
    assert [len(group) for group in found] == [each.samples for each in requests]
    for one, two in zip(chain(*found), chain(*groups), strict=True):
        assert (one.stop_reason, one.times) == (two.stop_reason, two.times)
        for name in ("token_ids", "logprobs", "sampled_logprobs", "experts"):
            mine, theirs = getattr(one, name), getattr(two, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)


@given(requests_of(), st.integers(0, 1 << 62), st.lists(st.text(), max_size=3))
def test_requests_are_read_as_they_were_sent(
    requests: list[Request], seed: int, stop: list[str]
) -> None:
    sampling = replace(SAMPLING, seed=seed, stop_strings=tuple(stop), top_p=0.3, experts=True)
    found, how, version = messages.read_requests(
        sent(messages.encode_requests(requests, sampling, 9, in_flight=False))
    )
    assert (how, version) == (sampling, 9)
    for one, two in zip(found, requests, strict=True):
        assert one.prompt_key == two.prompt_key
        assert (one.samples, one.first_sample) == (two.samples, two.first_sample)
        assert one.drawn == two.drawn
        np.testing.assert_array_equal(one.token_ids, two.token_ids)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=3),
    st.integers(0, 3),
)
def test_weights_are_read_as_they_were_sent(
    dtype: torch.dtype, dims: list[tuple[int, int, int]], pieces_of: int
) -> None:
    shape, box = tuple(a + b + c for a, b, c in dims), tuple(zip(*dims, strict=True))
    inner = Box(box[0], box[1]) if dims else Box((), ())
    whole = torch.randn(shape).to(dtype)
    shards = [
        Shard(TensorSpec(f"p{n}", shape, dtype), inner, whole[inner.slices] if dims else whole)
        for n in range(pieces_of)
    ]
    body = [part for shard in shards for part in messages.encode_shard(shard)]
    found = list(messages.read_shards(BytesIO(b"".join([*body, *messages.LAST, b"rest"]))))
    assert [(one.spec, one.box) for one in found] == [(two.spec, two.box) for two in shards]
    for one, two in zip(found, shards, strict=True):
        torch.testing.assert_close(one.tensor, two.tensor, rtol=0, atol=0)
    with pytest.raises(messages.NONSENSE):
        list(messages.read_shards(BytesIO(b"".join(body))))


@given(st.binary(max_size=200))
def test_nothing_else_is_raised_for_bytes_that_are_no_message(data: bytes) -> None:
    for read in (messages.read_message, lambda stream: list(messages.read_shards(stream))):
        try:
            read(BytesIO(data))
        except messages.NONSENSE:
            continue


def test_errors_for_people_cross_as_they_are() -> None:
    error = MissingError("no tensor", have=3, want="one", do="look")
    found = messages.error_of(sent(messages.encode_error(error)).fields)
    assert type(found) is MissingError
    assert str(found) == str(error)
