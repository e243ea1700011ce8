"""Runs on a Ray cluster of two nodes of this machine: whatever dies in whatever phase, they come to what an undisturbed run comes to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.faults.paused_ranks import PHASES, PausedRank, parent, paused_path, running_ranks
from support.ranks import waiting
from support.ranks.ports import free_port
from support.runs.training_files import done, make_files, outcome

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402 - what is skipped without ray

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

UNMEASURED = ["evaluation.every=0", "data.validation=[]"]
ARGV = ["rl", "rl.yaml", "steps=8", "checkpoint.save_every=1", *UNMEASURED]
REWARDS = """\
import time

def letters(completions, **columns):
    time.sleep(0.05)
    return [sum(c.islower() for c in text) / 4 for text in completions]
"""
PATIENCE_SECONDS = 400


class Nodes:
    """A cluster whose head has no room, and two nodes with room for a process each."""

    def __init__(self) -> None:
        environ = {"RAY_memory_monitor_refresh_ms": "0", "RAY_health_check_failure_threshold": "2"}
        os.environ.update(environ)
        # Jobs and actors run what these tests run.
        binaries = Path(sys.executable).parent
        os.environ["PYTHONPATH"] = paused_path()
        os.environ["PATH"] = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": True,
                "dashboard_port": free_port(),
                "dashboard_agent_listen_port": 0,
            },
        )
        self.nodes = [self.add(), self.add()]

    def add(self) -> Any:
        """Ray gives a node half a minute to start, which is too little on a busy machine; one that comes late is removed."""
        known = set(self.cluster.worker_nodes)
        for _ in range(2):
            with suppress(Exception):
                return self.cluster.add_node(num_cpus=1)
            for late in self.cluster.worker_nodes - known:
                self.cluster.remove_node(late, allow_graceful=False)
        return self.cluster.add_node(num_cpus=1)

    def remove(self) -> None:
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def replace(self, raylet: int) -> None:
        """Kill the node of a raylet, and start another."""
        pids = [node.all_processes["raylet"][0].process.pid for node in self.nodes]
        self.nodes.append(self.nodes.pop(pids.index(raylet)))
        self.remove()
        self.nodes.append(self.add())

    @property
    def address(self) -> str:
        return self.cluster.address


class Driver:
    """A `burnish` command that starts a run on the cluster."""

    def __init__(
        self,
        work: Path,
        nodes: Nodes,
        *argv: str,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._log = work / f"driver-{time.monotonic_ns()}.txt"
        self.argv = list(argv)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "burnish", *argv, "--ray", nodes.address],
                cwd=work,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def require_running(self) -> None:
        assert self.process.poll() is None, self.output

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.output) from None


def processes_of(name: str, command: bytes = b"burnish") -> list[int]:
    """The processes of a run that have a word in their command."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            if command in words and f"name={name}".encode() in words:
                found.append(int(each.name))
    return found


def in_step(run: Path, step: int) -> Callable[[], bool]:
    """Whether rank 0 has begun a step."""
    log = run / "logs" / "rank-0.log"
    return lambda: log.exists() and f" step {step} rollout burnish: begins" in log.read_text()


def until(fine: Callable[[], Any], driver: Driver, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not fine():
        driver.require_running()
        assert time.monotonic() < deadline, driver.output
        time.sleep(0.01)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_files(tmp_path_factory.mktemp("work"))
    (made / "rewards.py").write_text(REWARDS)
    return made


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def calm(work: Path) -> dict[str, Any]:
    return outcome(done(work, *ARGV, "name=calm", world=2))


@pytest.mark.parametrize("victim", ["main", "rank", "actor", "node", "driver"])
def test_a_run_that_dies_in_each_phase_goes_on_by_itself(
    work: Path, nodes: Nodes, calm: dict[str, Any], victim: str
) -> None:
    paused = PausedRank(work, victim, int(victim != "main"))
    argv = [*ARGV, f"name={victim}", "--processes", "2"]
    drivers = [Driver(work, nodes, *argv, environ=paused.environ)]
    for _ in paused.phases(lambda: drivers[-1].require_running()):
        running = running_ranks(victim)
        pid = running[paused.rank]
        if victim == "node":
            nodes.replace(parent(parent(pid)))
        elif victim == "driver":
            drivers[-1].process.kill()
            drivers[-1].process.wait()
            waiting.until(lambda: not running_ranks(victim), seconds=20)
            drivers.append(Driver(work, nodes, *argv, environ=paused.environ))
        else:
            os.kill(parent(pid) if victim == "actor" else pid, signal.SIGKILL)
    assert drivers[-1].wait() == 0, drivers[-1].output
    assert outcome(work / "runs" / victim) == calm, drivers[-1].output
    restarts = sum(each.output.count("starting the run again") for each in drivers)
    assert restarts == (0 if victim == "driver" else len(PHASES))


def test_a_node_that_is_gone_is_done_without_and_taken_back(work: Path, nodes: Nodes) -> None:
    run = work / "runs" / "elastic"
    elastic = ["distributed.min_processes=1", "distributed.replace_seconds=1"]
    argv = [*ARGV, "name=elastic", "steps=1000", "checkpoint.save_every=5", *elastic]
    driver = Driver(work, nodes, *argv, "engine.tensor_parallel=2", "--processes", "2")
    until(in_step(run, 7), driver)
    nodes.remove()
    until(lambda: "going on with 1 of 2" in driver.output, driver)
    log = run / "logs" / "rank-0.log"
    until(lambda: log.read_text().count(" step 6 rollout burnish: begins") == 2, driver)
    nodes.nodes.append(nodes.add())
    for said in ("going on with 2 processes", " is committed in "):
        until(lambda said=said: said in driver.output, driver)
    grown = int(re.findall(r"step (\d+) is committed", driver.output)[-1])
    assert grown % 5 == 0
    assert grown >= 10
    until(lambda: f" step {grown + 2} rollout burnish: begins" in log.read_text(), driver)
    assert log.read_text().count(f" step {grown + 1} rollout burnish: begins") == 1
    driver.process.terminate()
    assert driver.wait() == 128 + signal.SIGTERM, driver.output


def test_one_command_places_trainers_and_servers(work: Path, nodes: Nodes) -> None:
    served = ["rollout.place=servers", "rollout.servers=1"]
    name = "served"
    driver = Driver(work, nodes, *ARGV, f"name={name}", *served, "--processes", "1")
    notes = work / "runs" / name / "servers"
    until(in_step(work / "runs" / name, 3), driver)
    os.kill(processes_of(name, b"serve")[0], signal.SIGKILL)
    assert driver.wait() == 0, driver.output
    assert len(list(notes.glob("*.json"))) <= 1  # that of the killed one
    wanted = outcome(done(work, *ARGV, "name=unserved"))
    assert outcome(work / "runs" / name) == wanted


def test_a_job_is_submitted_and_its_exit_code_comes_back(work: Path, nodes: Nodes) -> None:
    address = f"http://{nodes.cluster.head_node.address_info['webui_url']}"
    made = [sys.executable, "-m", "burnish", "submit", *ARGV, "--address", address]
    found = []
    for name in ("submitted", "steps_wrong"):
        given = [f"name={name}", "--processes", "2"]
        given += ["engine.tensor_parallel=5"] if name == "steps_wrong" else []
        found.append(subprocess.run([*made, *given], cwd=work, capture_output=True, text=True))
    assert found[0].returncode == 0, found[0].stdout + found[0].stderr
    assert found[1].returncode == 2, found[1].stdout + found[1].stderr
    assert outcome(work / "runs" / "submitted") == outcome(done(work, *ARGV, "name=typed", world=2))


def test_a_job_that_is_stopped_leaves_nothing_behind_and_goes_on(
    work: Path, nodes: Nodes, calm: dict[str, Any]
) -> None:
    address = f"http://{nodes.cluster.head_node.address_info['webui_url']}"
    made = [sys.executable, "-m", "burnish", "submit", *ARGV, "name=stopped", "--processes", "2"]
    log = work / "stopped.txt"
    with log.open("w") as out:
        submitted = subprocess.Popen(
            [*made, "--address", address], cwd=work, stdout=out, stderr=out
        )
    waiting.until(in_step(work / "runs" / "stopped", 3))
    job = re.search(r"submitted as (\S+);", log.read_text())[1]
    ray_command = Path(sys.executable).with_name("ray")
    subprocess.run([ray_command, "job", "stop", job, "--address", address], check=True)
    assert submitted.wait(PATIENCE_SECONDS) != 0, log.read_text()
    waiting.until(lambda: not processes_of("stopped"), seconds=20)
    again = subprocess.run([*made, "--address", address], cwd=work, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert not re.search("INFO steps 1 to", again.stdout + again.stderr)
    assert outcome(work / "runs" / "stopped") == calm


def test_doctor_looks_at_all_nodes(work: Path, nodes: Nodes) -> None:
    driver = Driver(work, nodes, "doctor", "--processes", "2")
    assert driver.wait() == 0, driver.output
    assert "all-reduce" in driver.output
    driver = Driver(work, nodes, "doctor", "/proc/x", "--processes", "2")
    assert driver.wait() == 1
    assert "/proc/x" in driver.output


def test_ranks_see_the_accelerators_of_the_run_on_their_node() -> None:
    from burnish.launch.ray_cluster import _ranks

    places = [{"node": node, "devices": [device]} for node, device in ("a3", "a1", "b0")]
    found = _ranks(places, "GPU")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["3,1", "3,1", "0"]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0"]
    assert [each["LOCAL_WORLD_SIZE"] for each in found] == ["2", "2", "1"]
    assert not any("CUDA_VISIBLE_DEVICES" in each for each in _ranks(places, None))
