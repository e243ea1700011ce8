"""`burnish view` as it is typed, and the copies of runs that are elsewhere."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.runs.rollout_files import row, write
from support.services.hub import hub_variables, running_hub

pytest.importorskip("uvicorn", reason="the extra view is not installed")

from view.served import viewer

from bench.view_runs import make_run
from burnish.cli.main import main
from burnish.errors import BurnishError
from burnish.files.remote import Remote
from burnish.tracking.rundir import RunDirectory
from burnish.view.remote_runs import RunCopies


@contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it prints."""
    command = [sys.executable, "-m", "burnish", "view", *arguments, "--port", "0"]
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def ask(address: str, path: str) -> int:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    make_run(tmp_path / "runs" / "a", steps=2, prompts=1, tokens=3)
    with started(cwd=tmp_path) as (process, address):
        assert urlsplit(address).hostname == "127.0.0.1"
        assert ask(address, "/api/rollouts?run=a") == 200
        with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0)) as listener:
            listener.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert listener.recv(12) == b"HTTP/1.1 200"
            process.send_signal(number)
            output = process.communicate(timeout=60)
        assert output == ("", "")
        assert process.returncode in (0, -number)


def test_others_need_the_token(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with started("--host", "0.0.0.0", cwd=tmp_path) as (_, address):
        parts = urlsplit(address)
        assert len(parts.query) > 30
        assert ask(address, "/api/runs") == 401
        assert ask(address, f"/api/runs?{parts.query}") == 303


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 5
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", "--port", str(taken.getsockname()[1])]) == 2
    for wrong in (
        ["--port", "99999"],
        ["--port", "-1"],
        ["--host", "192.0.2.1"],
        ["--host", "no such host"],
    ):
        assert main(["view", *wrong]) == 2
    assert main(["view", "what://x", "--port", "0"]) == 2


def test_a_missing_server_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from burnish.cli.main import main; sys.exit(main(['view', '.']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 5
    assert '".[view]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_it_loads_no_torch() -> None:
    program = (
        "import sys, burnish.view.server, burnish.view.remote_runs, burnish.cli.view\n"
        "sys.exit(str([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_runs_behind_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("burnish.view.remote_runs._SECONDS", 0.05)
    remote = Remote(f"memory://{tmp_path.name}/runs")
    run = make_run(tmp_path / "a", steps=3)
    write(run / "rollouts", 1, [row(completion="old")])
    write(run / "rollouts", 3, [row(completion="far")])

    def send() -> None:
        for path in filter(Path.is_file, run.rglob("*")):
            remote.put_file(f"a/{path.relative_to(run)}", path)

    send()
    remote.put("a/checkpoints/step-00000003/model/model.safetensors", b"large")
    with RunCopies(str(remote)) as copies, viewer(copies.root, url=str(remote)) as found:
        assert not list(copies.root.rglob("*.safetensors"))
        (listed,) = found.get("runs")["runs"]
        assert (listed["run"], listed["step"]) == ("a", 3)
        while len(found.get("rollouts", run="a")["rows"]) < 2:
            time.sleep(0.05)
        assert found.get("checkpoints", run="a")["steps"] == []
        remote.remove("a/rollouts/step-00000001.jsonl.gz")
        write(run / "rollouts", 3, [row(completion="new")])
        (run / "rollouts" / "step-00000001.jsonl.gz").unlink()
        send()
        while [each["completion"] for each in found.get("rollouts", run="a")["rows"]] != ["new"]:
            time.sleep(0.05)
        assert found.get("config", run="a")["text"]["a"].startswith("name: a")


def test_a_silent_run_behind_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    run = RunDirectory(make_run(tmp_path / "runs" / "a", steps=3, prompts=1, tokens=3))
    run.write_status(9, "running")
    for path in filter(Path.is_file, run.root.rglob("*")):
        os.utime(path, (1e9, 1e9))
    url = (tmp_path / "runs").as_uri()
    with RunCopies(url) as copies, viewer(copies.root, url=url) as found:
        (listed,) = found.get("runs")["runs"]
        assert (listed["state"], listed["updated"]) == ("silent", 1e9)


@pytest.mark.nightly
def test_runs_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    run = make_run(tmp_path / "a", steps=3, prompts=1, tokens=3)
    files = {f"b/a/{p.relative_to(run)}": p.read_bytes() for p in run.rglob("*") if p.is_file()}
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    with (
        running_hub({"datasets/me/runs": {**files, "README.md": b"", "elsewhere": b""}}) as hub,
        hub_variables(HF_ENDPOINT=hub.url, **variables),
        RunCopies(url := "hf://datasets/me/runs/b") as copies,
        viewer(copies.root, url=url) as found,
    ):
        assert [each["step"] for each in found.get("runs")["runs"]] == [3]
        while len(found.get("rollouts", run="a")["rows"]) < 24:
            time.sleep(0.05)
        assert found.get("checkpoints", run="a")["steps"] == []


@pytest.mark.parametrize("url", ["s3://", "hf://x", "http://localhost/x"])
def test_a_url_that_is_none(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    with pytest.raises(BurnishError), RunCopies(url):
        pass
    assert os.listdir(tmp_path) == []
