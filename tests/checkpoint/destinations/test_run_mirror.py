"""The process that copies to a mirror where a write hangs: nothing of it comes late, over what was sent since."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest
from support.services.fault_proxy import Fault

from burnish.checkpoint.destinations.mirror import Mirror
from burnish.checkpoint.destinations.run_mirror import RunMirror, open_mirror
from burnish.config.schema import CheckpointConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.remote import Remote, RetryPolicy

HASTY = RetryPolicy(tries=30, seconds=200, first_pause=0.02, longest_pause=0.05, silence=3)


def test_the_process_that_copies_begins_without_torch():
    program = (
        "import sys, burnish.checkpoint.destinations.mirror;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def settled(mirror):
    while mirror.hear(0.05):
        pass
    return mirror._error


@pytest.mark.nightly
def test_a_write_that_hung_does_not_come_late(s3_server, tmp_path, caplog):
    remote = Remote(f"{s3_server.make_bucket('late')}/run", HASTY)
    remote.put("environment.json", json.dumps({"start": "this"}).encode())
    (tmp_path / "checkpoints").mkdir()
    metrics = tmp_path / "metrics.jsonl"
    mirror = RunMirror(Mirror(tmp_path, remote, None, "this"), Layout())
    try:
        mirror.begin()
        assert settled(mirror) is None  # what libraries take to load is taken here
        process = mirror._process
        metrics.write_text("first\n")
        late = Fault("late", 1, "PUT", "metrics.jsonl")
        s3_server.proxy.faults.append(late)
        mirror.begin()
        assert settled(mirror) is None
        assert "hung" in caplog.text
        assert mirror._process is not process
        metrics.write_text("first and second\n")
        mirror.begin()
        assert settled(mirror) is None
        assert late.times == 0
        late.release.set()
        time.sleep(0.5)
    finally:
        mirror.close()
    assert remote.read("metrics.jsonl", 100) == b"first and second\n"


def test_a_run_does_not_begin_where_its_mirror_is_silent_for_longer_than_it_may(
    tmp_path, monkeypatch
):
    """Whether it answers no bytes, or nobody listens."""
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    settings = CheckpointConfig(mirror="s3://bucket/runs", mirror_patience_seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 9):
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            mirror = open_mirror("s3://bucket/runs", settings, tmp_path, Layout())
            with pytest.raises(BurnishError):
                mirror.paths()
            found, copies = mirror._mirror.remote.policy, mirror._copying.policy
            assert (found.seconds, found.silence) == (1, 1)
            assert copies == RetryPolicy()
