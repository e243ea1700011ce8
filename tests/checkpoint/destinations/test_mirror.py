"""A mirror beside a directory of steps: what goes up, what is compared, what stays, whose it is."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import replace

import pytest
from support.checkpoints.states import (
    committed,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
)
from support.faults.bit_flips import flip

from burnish.checkpoint.destinations.mirror import Mirror, Sync
from burnish.checkpoint.destinations.remote_steps import DAMAGED, RemotePath
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import MIRRORED, Retention, holding_pins, read_mirrored
from burnish.checkpoint.steps import newest, open_step, read_commit, verify
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError
from burnish.files.remote import Remote, RetryPolicy
from burnish.files.storage import LocalStorage
from burnish.files.urls import Url

LOCAL = LocalStorage()
QUICK = RetryPolicy(tries=2, seconds=1, first_pause=0.01)


class Counting(Remote):
    """A remote that writes down what is done to it, and fails where it is told to."""

    def __init__(self, url, policy=None):
        super().__init__(url, policy)
        self.calls, self.fail = [], lambda call, name: False

    def below(self, name):
        below = Counting(self.url.below(name), self.policy)
        below.calls, below._connection = self.calls, self._connection
        below.fail = self.fail
        return below

    def note(self, call, name):
        path = str(self.url.below(name)).rpartition("checkpoints/")[2]
        self.calls.append((call, path))
        if self.fail(call, path):
            raise BurnishError(f"no {call} of {path}")

    def put(self, name, data):
        self.note("put", name)
        super().put(name, data)

    def put_file(self, name, source, advance=None):
        self.note("put", name)
        super().put_file(name, source, advance)

    def read_into(self, name, buffer, offset=0):
        self.note("read", name)
        super().read_into(name, buffer, offset)

    def remove(self, name):
        self.note("remove", name)
        super().remove(name)

    def remove_below(self, name):
        self.note("remove all", name)
        super().remove_below(name)

    def done(self, call):
        return [name for what, name in self.calls if what == call]


@pytest.fixture(params=["memory", "file"])
def mirror(request, tmp_path):
    """Of a run with an empty directory of steps."""
    url = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/far"
    return mirror_at(url, tmp_path)


def mirror_at(url, tmp_path, keep=None):
    remote = Counting(url, QUICK)
    remote.put("environment.json", json.dumps({"start": "this"}).encode())
    remote.calls.clear()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Mirror(tmp_path / "run", remote, Retention(keep) if keep else None, "this")


def sync(mirror):
    return Sync(mirror).run()


def on_mirror(mirror):
    steps = mirror.steps()
    return [step.step for step in committed(steps.root, steps)]


def test_everything_goes_up_and_commit_comes_last(mirror):
    path = save_once(mirror.root, 1, seed=1)
    assert sync(mirror) == [1]
    puts = [name for name in mirror.remote.done("put") if name.startswith("step-")]
    assert sorted(puts) == sorted(
        f"{path.name}/{each.relative_to(path)}" for each in path.rglob("*") if each.is_file()
    )
    assert puts[-2:] == [f"{path.name}/manifest.json", f"{path.name}/COMMIT"]
    steps = mirror.steps()
    step = newest(steps.root, steps)
    assert str(step.path) == f"{mirror.remote}/checkpoints/step-00000001"
    assert step.commit == open_step(path, LOCAL).commit
    assert list(verify(step.path, steps)) == list(verify(step.path, steps, fast=True)) == []
    fill_and_compare(CheckpointSource(step, Layout()), *make_state(1), Layout())


def test_what_is_there_is_not_sent_again(mirror):
    save_once(mirror.root, 1)
    sync(mirror)
    mirror.remote.calls.clear()
    assert sync(mirror) == []
    assert [name for name in mirror.remote.done("put") if name.startswith("step-")] == []


def test_the_newest_goes_first(mirror):
    for step in (1, 2, 3):
        save_once(mirror.root, step)
    assert sync(mirror) == [3, 2, 1]
    assert on_mirror(mirror) == [1, 2, 3]


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_an_upload_that_was_cut_goes_on_where_it_was(mirror, kept):
    """After `kept` files a fault; the next time those are compared and not sent."""
    path = save_once(mirror.root, 1, seed=1)
    sent = []

    def fail(call, name):
        if call == "put" and name.startswith("step-"):
            sent.append(name)
            return len(sent) > kept
        return False

    mirror.remote.fail = fail
    with pytest.raises(BurnishError):
        sync(mirror)
    assert on_mirror(mirror) == []
    first, mirror.remote.fail = sent[:kept], lambda call, name: False
    mirror.remote.calls.clear()
    assert sync(mirror) == [1]
    assert not set(first) & set(mirror.remote.done("put"))
    assert list(verify(mirror.steps().root / path.name, mirror.steps())) == []


def test_a_file_of_the_right_size_with_other_bytes_is_sent_again(mirror):
    path = save_once(mirror.root, 1, seed=1)
    name = f"checkpoints/{path.name}/training/exp_avg.safetensors"
    wrong = bytearray((path / "training" / "exp_avg.safetensors").read_bytes())
    wrong[-5] ^= 1
    mirror.remote.put(name, wrong)
    assert sync(mirror) == [1]
    assert list(verify(mirror.steps().root / path.name, mirror.steps())) == []


def test_another_writing_of_a_step_replaces_it(mirror):
    """The number is the same, the uuid is not: COMMIT goes first, and files of it alone go too."""
    save_once(mirror.root, 1, seed=1)
    sync(mirror)
    mirror.remote.put("checkpoints/step-00000001/model/more.json", b"{}")
    LOCAL.remove(mirror.root / "step-00000001")
    path = save_once(mirror.root, 1, seed=2)
    mirror.remote.calls.clear()
    assert sync(mirror) == [1]
    steps = mirror.steps()
    assert newest(steps.root, steps).commit == open_step(path, LOCAL).commit
    first = next(c for c in mirror.remote.calls if c[0] != "read" and c[1].startswith("step-"))
    assert first == ("remove", "step-00000001/COMMIT")


def test_what_is_damaged_here_does_not_get_there_and_keeps_no_other_back(mirror):
    for step in (1, 2):
        path = save_once(mirror.root, step)
    damaged = path / "training" / "exp_avg.safetensors"
    flip(damaged, -5)
    with pytest.raises(CorruptError):
        sync(mirror)
    assert on_mirror(mirror) == [1]


def test_data_without_commit_is_not_listed_and_is_cleared(mirror):
    mirror.remote.put("checkpoints/step-00000007/model/config.json", b"{}")
    mirror.remote.put("checkpoints/notes/why.txt", b"by hand")
    steps = mirror.steps()
    assert committed(steps.root, steps) == []
    assert newest(steps.root, steps) is None
    save_once(mirror.root, 8)
    sync(mirror)
    names = [file.name for file in mirror.remote.files("checkpoints")]
    assert not any("step-00000007" in name for name in names)
    assert "checkpoints/notes/why.txt" in names


def test_a_listing_that_lacks_a_seal_costs_no_step(mirror, monkeypatch):
    save_once(mirror.root, 3)
    sync(mirror)
    listed = type(mirror.remote).files

    def lacking(self, *arguments):
        return [each for each in listed(self, *arguments) if not each.name.endswith("00003/COMMIT")]

    monkeypatch.setattr(type(mirror.remote), "files", lacking)
    mirror.steps().clear(mirror.check)
    monkeypatch.undo()
    assert on_mirror(mirror) == [3]


def test_the_mirror_has_a_retention_of_its_own(tmp_path):
    mirror = mirror_at(f"memory://{uuid.uuid4().hex}", tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save_once(mirror.root, step)
    with holding_pins(mirror.root, LOCAL) as pins:
        pins[1] = "the paper"
    assert sync(mirror) == [4, 3, 1]  # 2 would have gone at once
    save_once(mirror.root, 5)
    mirror.remote.calls.clear()
    assert sync(mirror) == [5]
    assert on_mirror(mirror) == [1, 4, 5]
    removed = [call for call in mirror.remote.calls if call[1].startswith("step-00000003")]
    assert [call for call in removed if call[0] != "read"] == [
        ("remove", "step-00000003/COMMIT"),
        ("remove all", "step-00000003"),
    ]
    settled = read_mirrored(mirror.root, str(mirror.remote), LOCAL)
    assert list(settled) == [1, 2, 3, 4, 5]  # 2 and 3 are not awaited


def test_nothing_goes_from_the_mirror_while_uploads_fail(tmp_path):
    mirror = mirror_at(f"memory://{uuid.uuid4().hex}", tmp_path, keep=1)
    save_once(mirror.root, 1)
    sync(mirror)
    save_once(mirror.root, 2)
    mirror.remote.fail = lambda call, name: call == "put" and name.startswith("step-00000002")
    with pytest.raises(BurnishError):
        sync(mirror)
    assert on_mirror(mirror) == [1]


def test_pins_that_cannot_be_read_keep_all_there(tmp_path):
    mirror = mirror_at(f"memory://{uuid.uuid4().hex}", tmp_path, keep=1)
    for step in (1, 2):
        save_once(mirror.root, step)
    (mirror.root / "pins.json").write_text("{")
    assert sync(mirror) == [2, 1]
    assert on_mirror(mirror) == [1, 2]


class Disk(LocalStorage):
    """One with so much room."""

    def __init__(self, free):
        self.free = free

    def free_bytes(self, path):
        return self.free


def test_a_local_step_goes_only_when_the_mirror_has_it(mirror):
    retention = Retention(1, mirror=str(mirror.remote))
    for step in (1, 2, 3):
        save_once(mirror.root, step)
    for policy in (retention, Retention(1, mirror="memory://elsewhere")):
        assert policy.apply(mirror.root, LOCAL) is None
        assert [step.step for step in committed(mirror.root)] == [1, 2, 3]
        sync(mirror)
    assert retention.apply(mirror.root, LOCAL) is None
    assert [step.step for step in committed(mirror.root)] == [3]


def test_a_full_disk_takes_no_step_that_is_not_on_the_mirror(mirror):
    retention = Retention(1, mirror=str(mirror.remote))
    disk = Disk(10**9)
    with Checkpoints(mirror.root, Layout(), retention=retention, storage=disk) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, contents_of(*make_state(step)))
        disk.free = 5
        with pytest.raises(BurnishError) as caught:
            checkpoints.save(4, contents_of(*make_state(4)))
        assert str(mirror.remote) in caught.value.do
        assert [step.step for step in committed(mirror.root)] == [1, 2, 3]

        sync(mirror)
        retention.apply(mirror.root, disk)
        with pytest.raises(BurnishError) as caught:
            checkpoints.save(4, contents_of(*make_state(4)))
        assert str(mirror.remote) not in str(caught.value)
    assert [step.step for step in committed(mirror.root)] == [3]


def test_a_damaged_note_keeps_all(mirror):
    save_once(mirror.root, 1)
    sync(mirror)
    save_once(mirror.root, 2)
    (mirror.root / MIRRORED).write_text('{"format": 1, "url": 3}')
    assert Retention(1, mirror=str(mirror.remote)).apply(mirror.root, LOCAL) is None
    assert [step.step for step in committed(mirror.root)] == [1, 2]


def test_who_lost_the_mirror_changes_nothing_there(mirror):
    save_once(mirror.root, 1)
    mirror.remote.put("environment.json", b'{"start": "that"}')
    with pytest.raises(BurnishError):
        sync(mirror)
    assert on_mirror(mirror) == []


def test_the_mirror_is_lost_before_the_seal(mirror):
    save_once(mirror.root, 1)

    def lose(call, name):
        if call == "put" and name.endswith("manifest.json"):
            Remote(mirror.remote.url).put("environment.json", b"{}")
        return False

    mirror.remote.fail = lose
    with pytest.raises(BurnishError):
        sync(mirror)
    assert on_mirror(mirror) == []


def test_the_files_of_a_run_go_along(mirror):
    run = mirror.directory
    (run / "rollouts").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "report.html", "rollouts/step-1.jsonl", ".tmp"):
        (run / name).write_text(f"this is {name}")
    both = Sync(mirror)
    both.run()
    assert mirror.remote.read("rollouts/step-1.jsonl", 100) == b"this is rollouts/step-1.jsonl"
    mirror.remote.calls.clear()
    (run / "metrics.jsonl").write_text("THIS IS metrics.jsonl")
    os.utime(run / "metrics.jsonl", (1, 1))  # clocks are coarse
    both.run()
    assert mirror.remote.read("metrics.jsonl", 100) == b"THIS IS metrics.jsonl"
    put = {name.rpartition("/")[2] for name in mirror.remote.done("put")}
    assert put == {"metrics.jsonl"}


def test_files_that_were_thinned_go_from_the_mirror_too(mirror):
    run = mirror.directory
    for kept in ("rollouts", "traces", "logs"):
        (run / kept).mkdir()
        for number in range(3):
            (run / kept / f"{number}.gz").write_text(f"{number}")
    first = Sync(mirror)
    first.run()
    (run / "rollouts" / "0.gz").unlink()
    first.run()
    names = [file.name for file in mirror.remote.files("rollouts")]
    assert names == ["rollouts/1.gz", "rollouts/2.gz"]
    for kept in ("rollouts", "traces", "logs"):
        (run / kept / "1.gz").unlink()
    sync(mirror)  # of another process, which finds them gone
    for kept, wanted in (("rollouts", "2"), ("traces", "02"), ("logs", "012")):
        names = [file.name for file in mirror.remote.files(kept)]
        assert names == [f"{kept}/{number}.gz" for number in wanted]


def test_a_directory_that_was_lost_loses_nothing_on_the_mirror(mirror):
    run = mirror.directory
    (run / "rollouts").mkdir()
    (run / "rollouts" / "1.gz").write_text("1")
    sync(mirror)
    (run / "rollouts" / "1.gz").unlink()
    sync(mirror)
    assert mirror.remote.read("rollouts/1.gz", 10) == b"1"


def test_a_log_that_grows_or_rotates_goes_along_and_nothing_is_listed_again(mirror):
    logs = mirror.directory / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("one\n")
    both = Sync(mirror)
    both.run()
    (logs / "rank-0.log").rename(logs / "rank-0.log.1")
    (logs / "rank-0.log").write_text("two\n")
    os.utime(logs / "rank-0.log", (1, 1))
    mirror.remote.calls.clear()
    listed = []
    files = mirror.remote.files
    mirror.remote.files = lambda name="", **more: listed.append(name) or files(name, **more)
    both.run()
    assert listed == []
    mirror.remote.calls.clear()
    both.run()
    assert mirror.remote.done("put") == []
    assert mirror.remote.read("logs/rank-0.log", 10) == b"two\n"
    assert mirror.remote.read("logs/rank-0.log.1", 10) == b"one\n"


def test_progress_counts_every_byte_twice(mirror):
    save_once(mirror.root, 1)
    shown = []
    process = Sync(mirror)
    process.run(shown.append)
    assert process._total == 2 * committed(mirror.root)[0].manifest.total_bytes
    assert shown == sorted(shown)
    assert 0.4 < shown[-1] <= 1  # fsspec's memory tells nothing of what it puts


def test_only_blocks_that_are_wanted_are_read(mirror):
    save_once(mirror.root, 1, seed=1)
    sync(mirror)
    mirror.remote.calls.clear()
    steps = mirror.steps()
    source = CheckpointSource(newest(steps.root, steps), Layout())
    weights, _ = make_state(1)
    fill_and_compare(source, weights, {}, Layout())
    reads = [name.rpartition("/")[2] for name in mirror.remote.done("read")]
    assert reads.count("exp_avg.safetensors") == 1  # its header


def test_a_step_marked_as_damaged_is_not_listed_and_not_cleared(mirror):
    for step in (1, 2):
        save_once(mirror.root, step)
    sync(mirror)
    steps = mirror.steps()
    steps.mark_damaged(steps.root / "step-00000002", "a flipped bit")
    assert on_mirror(mirror) == [1]
    LOCAL.remove(mirror.root / "step-00000002")
    sync(mirror)
    name = f"checkpoints/step-00000002/{DAMAGED}"
    assert mirror.remote.read(name, 100) == b"a flipped bit\n"
    save_once(mirror.root, 2, seed=5)  # trained again
    assert sync(mirror) == [2]
    assert list(verify(mirror.steps().root / "step-00000002", mirror.steps())) == []


def test_a_remote_path_is_shown_as_its_url_and_is_no_local_file():
    path = RemotePath.of(Url.parse("s3://bucket/runs/a b")) / "step-00000001"
    assert str(path) == "s3://bucket/runs/a b/step-00000001"
    assert str(path.parent) == "s3://bucket/runs/a b"
    urls = ("s3://b", "hdfs://nn:8020/a/b", "hdfs:///user/me", "file:///tmp/x", "memory://a/b")
    for url in urls:
        assert str(RemotePath.of(Url.parse(url))) == url
        assert str(RemotePath.of(Url.parse(url)) / "step") == str(Url.parse(url).below("step"))
    with pytest.raises(TypeError):
        os.fspath(path)


def test_a_step_that_goes_from_here_meanwhile_stops_nothing(mirror, caplog):
    for step in (1, 2):
        save_once(mirror.root, step)

    def remove(call, name):
        if call == "put" and name.startswith("step-00000002") and (mirror.root / name).exists():
            LOCAL.remove(mirror.root / "step-00000002")
        return False

    mirror.remote.fail = remove
    assert sync(mirror) == [1]
    assert "step-00000002" in caplog.text
    assert on_mirror(mirror) == [1]
    assert not any("step-00000002" in file.name for file in mirror.remote.files())


def test_a_seal_that_reads_back_otherwise_is_said(mirror, monkeypatch):
    save_once(mirror.root, 1)
    read = Remote.read
    monkeypatch.setattr(
        Counting, "read", lambda self, name, limit: read(self, name, limit) + b" ", raising=False
    )
    with pytest.raises(BurnishError) as caught:
        sync(mirror)
    assert caught.value.want
    assert caught.value.do
    assert on_mirror(mirror) == []


def test_what_lies_at_a_path_of_a_mirror(mirror):
    """As the listing of its directory has it; and only what lies there is listed."""
    path = save_once(mirror.root, 1)
    sync(mirror)
    mirror.remote.put("checkpoints/step-00000002/model/config.json", b"{}")
    steps = mirror.steps()
    kinds = {
        name: steps.kind(steps.root / name)
        for name in (path.name, f"{path.name}/COMMIT", f"{path.name}/model", "step-00000002", "x")
    }
    assert list(kinds.values()) == ["directory", "file", "directory", None, None]
    listed = []
    files = steps.remote.files
    steps.remote.files = lambda name: listed.append(name) or files(name)
    steps.refresh()
    open_step(steps.root / path.name, steps)
    assert listed == [path.name]


def test_what_a_process_has_seen_it_does_not_ask_for_again(mirror):
    mirror = replace(mirror, retention=Retention(9))
    for step in (1, 2):
        save_once(mirror.root, step)
    sync(mirror)
    LOCAL.remove(mirror.root / "step-00000001")  # its facts are on the mirror alone
    process = Sync(mirror)
    process.run()
    mirror.remote.calls.clear()
    save_once(mirror.root, 3)
    assert process.run() == [3]
    read = mirror.remote.done("read")
    assert any(name.startswith("step-00000003/") for name in read)
    assert [name for name in read if name.startswith("step-00000002/")] == ["step-00000002/COMMIT"]
    assert not any(name.startswith("step-00000001/") for name in read)
    steps = mirror.steps()
    steps.remove(steps.root / "step-00000001")
    assert process.run() == []
    assert {*process._remote} == {*process._facts} == {2, 3}


def test_what_comes_late_from_a_start_before_is_noticed(mirror):
    """The mirror's seals decide which local steps may go, so those are read each time."""
    process = Sync(mirror)
    path = save_once(mirror.root, 1, seed=2)
    other = save_once(mirror.root.with_name("other"), 1, seed=1)
    assert process.run() == [1]
    mirror.remote.put(f"checkpoints/{path.name}/COMMIT", (other / "COMMIT").read_bytes())
    assert process.run() == [1]
    assert process.run() == []
    steps = mirror.steps()
    assert read_commit(steps.root / path.name, steps) == open_step(path, LOCAL).commit


def test_metrics_may_grow_while_they_are_sent(mirror, monkeypatch):
    metrics = mirror.directory / "metrics.jsonl"
    metrics.write_text("one\n")
    send = mirror.remote.put_file

    def late(name, source, *others):
        with metrics.open("a") as file:
            file.write("more\n")
        send(name, source, *others)

    monkeypatch.setattr(mirror.remote, "put_file", late)
    process = Sync(mirror)
    process.run()
    assert mirror.remote.read("metrics.jsonl", 100) == b"one\n"
    process.run()
    assert mirror.remote.read("metrics.jsonl", 100) == b"one\nmore\n"
