"""Runs on a Ray cluster of two nodes of this machine: whatever dies in whatever phase, they come to what an undisturbed run comes to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from training_files import done, make_files, outcome

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402 - what is skipped without ray

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

ARGV = ["rl", "rl.yaml", "checkpoint.save_every=1", "evaluation.every=0"]
REWARDS = """\
import time

def letters(completions, **columns):
    time.sleep(0.2)
    return [sum(c.islower() for c in text) / 4 for text in completions]
"""
PATIENCE_SECONDS = 400


class Nodes:
    """A cluster whose head has no room, and two nodes with room for a process each."""

    def __init__(self) -> None:
        environ = {"RAY_memory_monitor_refresh_ms": "0", "RAY_health_check_failure_threshold": "2"}
        os.environ.update(environ)
        # Jobs and actors run what these tests run.
        root, binaries = Path(__file__).parents[2], Path(sys.executable).parent
        os.environ["PYTHONPATH"] = str(root)
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
        return self.cluster.add_node(num_cpus=1)

    def remove(self) -> None:
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    @property
    def address(self) -> str:
        return self.cluster.address


class Driver:
    """A `burnish` command that starts a run on the cluster."""

    def __init__(self, work: Path, nodes: Nodes, *argv: str) -> None:
        self._log = work / f"driver-{time.monotonic_ns()}.txt"
        self.argv = list(argv)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "burnish", *argv, "--ray", nodes.address],
                cwd=work,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.output) from None


def ranks(name: str) -> dict[int, int]:
    """The processes of a run's ranks, by rank."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            environ = (each / "environ").read_bytes()
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environ)
            if rank and b"burnish" in words and f"name={name}".encode() in words:
                found[int(rank[1])] = int(each.name)
    return found


def servers(name: str) -> list[int]:
    """The processes that serve a run."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and f"name={name}".encode() in words:
                found.append(int(each.name))
    return found


def in_step(run: Path, step: int) -> Callable[[], bool]:
    """Whether rank 0 has begun a step."""
    log = run / "logs" / "rank-0.log"
    return lambda: log.exists() and f" step {step} rollout burnish: begins" in log.read_text()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(fine: Callable[[], Any], driver: Driver, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not fine():
        assert driver.process.poll() is None, driver.output
        assert time.monotonic() < deadline, driver.output
        time.sleep(0.01)


def in_phase(run: Path, phase: str) -> Callable[[], bool]:
    """Whether a rank has come to a phase, as its log says; or for `setup`, whether there are ranks."""
    if phase == "setup":
        return lambda: len(ranks(run.name)) == 2
    log = run / "logs" / "rank-1.log"
    return lambda: log.exists() and f" {phase} burnish: begins" in log.read_text()


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


PHASES = {
    "setup": "setup",
    "rollout": "step 2 rollout",
    "update": "step 3 update",
    "save": "step 2 save",
}


@pytest.mark.parametrize("victim", ["rank", "actor", "node", "driver"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_goes_on_by_itself(
    work: Path, nodes: Nodes, calm: dict[str, Any], phase: str, victim: str
) -> None:
    name = f"{phase}_{victim}"
    run = work / "runs" / name
    argv = [*ARGV, f"name={name}", "--processes", "2"]
    driver = Driver(work, nodes, *argv)
    until(in_phase(run, PHASES[phase]), driver)
    running = ranks(name)
    if victim == "rank":
        os.kill(running[1], signal.SIGKILL)
    elif victim == "actor":
        os.kill(parent(running[1]), signal.SIGKILL)
    elif victim == "node":
        nodes.remove()
        nodes.nodes.append(nodes.add())
    else:
        driver.process.kill()
        driver.process.wait()
        deadline = time.monotonic() + 20
        while ranks(name):
            assert time.monotonic() < deadline, "ranks outlive their driver"
            time.sleep(0.1)
        driver = Driver(work, nodes, *argv)
    assert driver.wait() == 0, driver.output
    assert outcome(run) == calm, driver.output
    if victim != "driver":
        assert driver.output.count("starting the run again") == 1


def test_a_node_that_is_gone_is_done_without_and_taken_back(work: Path, nodes: Nodes) -> None:
    run = work / "runs" / "elastic"
    elastic = ["distributed.min_processes=1", "distributed.replace_seconds=1"]
    argv = [*ARGV, "name=elastic", "steps=40", "engine.tensor_parallel=2", *elastic]
    driver = Driver(work, nodes, *argv, "--processes", "2")
    until(in_phase(run, "step 3 update"), driver)
    nodes.remove()
    until(lambda: "going on with 1 of 2" in driver.output, driver)
    log = run / "logs" / "rank-0.log"
    until(lambda: log.read_text().count(" step 6 rollout burnish: begins"), driver)
    nodes.nodes.append(nodes.add())
    assert driver.wait() == 0, driver.output
    grown = int(re.findall(r"step (\d+) is committed", driver.output)[-1])
    assert "going on with 2 processes" in driver.output
    assert 6 <= grown < 40


def test_one_command_places_trainers_and_servers(work: Path, nodes: Nodes) -> None:
    served = ["rollout.place=servers", "rollout.servers=1"]
    name = "served"
    driver = Driver(work, nodes, *ARGV, f"name={name}", *served, "--processes", "1")
    notes = work / "runs" / name / "servers"
    until(in_step(work / "runs" / name, 3), driver)
    os.kill(servers(name)[0], signal.SIGKILL)
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
