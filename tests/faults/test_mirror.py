"""A mirror and its run when machines, services and connections fail: no mirrored step is lost, nothing half there is loaded."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from support.checkpoints.states import BIG_SHAPES, committed, fill_and_compare, make_state
from support.faults.mirror_crashes import mirror_at, save, sync, try_kills, try_moment
from support.services.fault_proxy import Fault

from burnish.checkpoint.destinations.mirror import Sync
from burnish.checkpoint.destinations.run_mirror import RunMirror
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import newest, verify
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.remote import Remote, RetryPolicy

number = itertools.count()
HASTY = RetryPolicy(tries=200, seconds=90, first_pause=0.05, longest_pause=1.0, silence=10)


# `make faults` runs all others.
SAMPLE = [
    ("upload, mid-object", "kill"),
    pytest.param("upload, data without COMMIT", "kill", marks=pytest.mark.nightly),
    ("upload, COMMIT not read back", "kill"),
    pytest.param("mirror, the old step's COMMIT is gone", "kill", marks=pytest.mark.nightly),
    ("upload, mid-object", "EIO"),
    pytest.param("upload, data without COMMIT", "ENOSPC", marks=pytest.mark.nightly),
    pytest.param("upload, mid-object", "hang", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("moment", "fault"), SAMPLE)
def test_a_machine_that_dies_and_a_service_that_fails_at_a_moment(tmp_path, moment, fault):
    verdict = try_moment(f"file://{tmp_path}/far", moment, tmp_path, fault)
    assert verdict.struck, verdict
    assert verdict.is_good, verdict


def test_a_machine_that_dies_again_and_again(tmp_path):
    verdicts = list(try_kills(f"file://{tmp_path}/far", tmp_path, random.Random(3), kills=2))
    assert all(verdict.is_good for verdict in verdicts), verdicts


def check(mirror, step):
    """Whole on the mirror, and as it was when an empty machine loads it."""
    steps = mirror.steps()
    found = newest(steps.root, steps)
    assert found.step == step
    assert list(verify(found.path, steps)) == []
    source = CheckpointSource(found, Layout())
    fill_and_compare(source, *make_state(step, BIG_SHAPES), Layout())


FAULTS = {
    "503": lambda: [Fault("status", 6), Fault("status", 3, contains="COMMIT")],
    "cuts": lambda: [
        Fault("cut request", 4, method="PUT", contains="step-", after=100_000),
        Fault("cut answer", 6, method="GET", after=1000),
    ],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_s3_that_fails_for_a_while(s3_server, tmp_path, name):
    url = s3_server.make_bucket(f"mirror-{next(number)}")
    mirror = mirror_at(tmp_path / "run", Remote(f"{url}/run", HASTY))
    save(mirror, 1, BIG_SHAPES)
    s3_server.proxy.faults.extend(FAULTS[name]())
    sync(mirror)
    assert not any(fault.times for fault in s3_server.proxy.faults)  # all of them came
    s3_server.proxy.faults.append(Fault("cut answer", 4, method="GET", after=1000))
    check(mirror, 1)


@pytest.mark.nightly
def test_s3_that_stays_away_leaves_nothing_that_is_listed(s3_server, tmp_path):
    url = s3_server.make_bucket(f"mirror-{next(number)}")
    hasty = RetryPolicy(tries=2, seconds=1, first_pause=0.01)
    mirror = mirror_at(tmp_path / "run", Remote(f"{url}/run", hasty))
    save(mirror, 1, BIG_SHAPES)
    s3_server.proxy.faults.append(Fault("status", 10_000, method="PUT", contains="manifest.json"))
    with pytest.raises(BurnishError):
        sync(mirror)
    steps = mirror.steps()
    assert committed(steps.root, steps) == []
    s3_server.proxy.reset()
    sync(mirror)
    sent = {each.path for each in s3_server.proxy.asked if each.method in ("PUT", "POST")}
    assert not any("safetensors" in path for path in sent)  # what was there was read back, not sent
    check(mirror, 1)


class Break:
    """Kills a node of HDFS once, when so many bytes have moved, and has it started again soon."""

    def __init__(self, server, node, after):
        self.server, self.node, self.left, self.came = server, node, after, False
        self.lock = threading.Lock()

    def hear(self, count):
        with self.lock:
            self.left -= count
            now, self.came = self.left <= 0 and not self.came, self.came or self.left <= 0
        if now:
            self.server.kill(self.node)
            self.server.start_later(self.node)


class Heard(Remote):
    """Tells of what is read."""

    hear = None

    def below(self, name):
        below = Heard(self.url.below(name), self.policy)
        below.hear = self.hear
        return below

    def read_into(self, name, buffer, offset=0):
        super().read_into(name, buffer, offset)
        self.hear(len(buffer))


@pytest.mark.parametrize("node", ["datanode", "namenode"])
@pytest.mark.nightly
def test_hdfs_killed_and_restarted_in_the_middle(hdfs_server, tmp_path, node):
    """Once while a step goes up, once while it is read."""
    remote = Heard(f"{hdfs_server.url}/mirror {next(number)}/run", HASTY)
    remote.hear = lambda count: None
    mirror = mirror_at(tmp_path / "run", remote)
    save(mirror, 1, BIG_SHAPES)
    sending = Break(hdfs_server, node, 1 << 20)
    sync = Sync(mirror)
    sync._moved = sending.hear
    sync.run()
    assert sending.came
    reading = Break(hdfs_server, node, 5 << 20)
    remote.hear = reading.hear
    check(mirror, 1)
    assert reading.came
    with Checkpoints(tmp_path / "empty", Layout()) as checkpoints:
        checkpoints.mirror_to(RunMirror(mirror, Layout()))
        resumed = checkpoints.resume(lambda step, source: None)
    assert str(resumed.step.path).startswith("hdfs://")
