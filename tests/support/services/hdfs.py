"""A real Apache HDFS 2.7.3, one name node and one data node on loopback, that tests may kill and restart.

Its jars come out of the source distribution of pyspark 2.4.8, which carries them, and are kept below
~/.cache. Needs Java 8 to 23; nothing of it is installed, and the processes die with the one that started them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from support.ranks.ports import free_port

Node = Literal["namenode", "datanode"]

CACHE = Path.home() / ".cache" / "burnish-tests" / "hdfs-2.7.3"
SOURCE = "pyspark==2.4.8"
JARS = (
    "hadoop-common-2.7.3",
    "hadoop-hdfs-2.7.3",
    "hadoop-auth-2.7.3",
    "hadoop-annotations-2.7.3",
    "guava-14.0.1",
    "commons-cli-1.2",
    "commons-codec-1.10",
    "commons-collections-3.2.2",
    "commons-configuration-1.6",
    "commons-io-2.4",
    "commons-lang-2.6",
    "commons-logging-1.1.3",
    "htrace-core-3.1.0-incubating",
    "httpclient-4.5.6",
    "httpcore-4.4.10",
    "jackson-core-asl-1.9.13",
    "jackson-mapper-asl-1.9.13",
    "javax.servlet-api-3.1.0",
    "javax.ws.rs-api-2.0.1",
    "jetty-6.1.26",
    "jetty-util-6.1.26",
    "leveldbjni-all-1.8",
    "log4j-1.2.17",
    "slf4j-api-1.7.16",
    "slf4j-log4j12-1.7.16",
    "netty-all-4.1.47.Final",
    "protobuf-java-2.5.0",
    "xmlenc-0.52",
)
CLASSES: Mapping[Node, str] = {
    "namenode": "org.apache.hadoop.hdfs.server.namenode.NameNode",
    "datanode": "org.apache.hadoop.hdfs.server.datanode.DataNode",
}
JVM = (
    "-Xms32m",
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.net.preferIPv4Stack=true",
)
FETCH_SECONDS = 240
START_SECONDS = 60
# Ends when the program ends, and ends it when standard input is closed, which the death of a parent does.
WATCHED = """
exec 3<&0
"$@" </dev/null & program=$!
(read _ <&3; kill -9 $program) 2>/dev/null &
wait $program
"""

# The client's complete() reaches the name node before the data node's report of the block and is tried
# again after 400 ms, for every file. The data node logs between queueing that report and its last
# acknowledgement; a logger that sleeps 4 ms there lets the report win.
DELAY = """
public class AckDelay extends org.apache.log4j.AppenderSkeleton {
  protected void append(org.apache.log4j.spi.LoggingEvent event) {
    try { Thread.sleep(4); } catch (InterruptedException e) { Thread.currentThread().interrupt(); }
  }
  public void close() {}
  public boolean requiresLayout() { return false; }
}
"""
LOGGING = """
log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.SimpleLayout
"""
DELAYED_LOGGING = """
log4j.logger.org.apache.hadoop.hdfs.server.datanode.DataNode.clienttrace=INFO,delay
log4j.additivity.org.apache.hadoop.hdfs.server.datanode.DataNode.clienttrace=false
log4j.appender.delay=AckDelay
"""


class HdfsServer:
    """A cluster of one machine, its data below `root`."""

    def __init__(self, root: Path, jars: Path) -> None:
        self._root = root
        self._classpath = f"{root}/conf:{jars}:{jars}/*"
        self._processes: dict[Node, subprocess.Popen[bytes]] = {}
        self._ports = [free_port() for _ in range(5)]
        self._configure()
        with self._java("namenode", "-format", "-nonInteractive") as formatting:
            formatting.wait(START_SECONDS)

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self._ports[0]}"

    def start(self, *nodes: Node) -> None:
        """Start these nodes, or both, and wait until files can be written."""
        for node in nodes or CLASSES:
            self._processes[node] = self._java(node)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            dead = [node for node, each in self._processes.items() if each.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"HDFS did not come up: {dead}, see {self._root}/*.log")
            time.sleep(0.05)

    def start_later(self, node: Node) -> None:
        """Start it while the caller goes on."""
        threading.Thread(target=self.start, args=(node,), daemon=True).start()

    def ensure_up(self) -> None:
        """Start what is not running."""
        for node in CLASSES:
            if node in self._processes:
                self.resume(node)
        if missing := [node for node in CLASSES if node not in self._processes]:
            self.start(*missing)

    def kill(self, node: Node) -> None:
        """SIGKILL."""
        process = self._processes.pop(node)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def pause(self, node: Node) -> None:
        """Make it silent, as a machine that hangs; returns when it is."""
        leader = self._processes[node].pid
        os.killpg(leader, signal.SIGSTOP)
        program = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()[0]
        while any(_state(task) != "T" for task in Path(f"/proc/{program}/task").iterdir()):
            time.sleep(0.01)

    def resume(self, node: Node) -> None:
        """End `pause`."""
        os.killpg(self._processes[node].pid, signal.SIGCONT)

    def stop(self) -> None:
        """End what runs."""
        for node in list(self._processes):
            self.kill(node)

    def _java(self, node: Node, *arguments: str) -> subprocess.Popen[bytes]:
        places = (f"-Dhadoop.log.dir={self._root}", f"-Djava.io.tmpdir={self._root}")
        command = ["java", *JVM, *places, "-cp", self._classpath]
        with (self._root / f"{node}.log").open("ab") as log:
            return subprocess.Popen(
                ["sh", "-c", WATCHED, "sh", *command, CLASSES[node], *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_up(self) -> bool:
        query = "qry=Hadoop:service=NameNode,name=FSNamesystemState"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._ports[1]}/jmx?{query}", timeout=5) as answer:
                state = json.load(answer)["beans"][0]
        except (OSError, LookupError, ValueError):
            return False
        alive = state["NumLiveDataNodes"] >= 1 and state["CapacityRemaining"] > 0
        return bool(alive and state["FSState"] == "Operational")

    def _configure(self) -> None:
        conf = self._root / "conf"
        for name in ("hdfs", "datanode", "static"):  # the jar has no web pages; empty ones do
            (conf / "webapps" / name).mkdir(parents=True)
        rpc, http, data, data_http, ipc = (f"127.0.0.1:{port}" for port in self._ports)
        core = {"fs.defaultFS": f"hdfs://{rpc}", "hadoop.tmp.dir": f"{self._root}/tmp"}
        site = {
            "dfs.replication": "1",
            "dfs.namenode.name.dir": f"file://{self._root}/names",
            "dfs.datanode.data.dir": f"file://{self._root}/data",
            "dfs.namenode.rpc-address": rpc,
            "dfs.namenode.http-address": http,
            "dfs.datanode.address": data,
            "dfs.datanode.http.address": data_http,
            "dfs.datanode.ipc.address": ipc,
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.edits.noeditlogchannelflush": "true",
            "dfs.webhdfs.enabled": "false",  # needs jars that are not there
            "dfs.heartbeat.interval": "1",
        }
        (conf / "core-site.xml").write_text(_xml(core))
        (conf / "hdfs-site.xml").write_text(_xml(site))
        delayed = DELAYED_LOGGING if _compiled_delay(conf, self._classpath) else ""
        (conf / "log4j.properties").write_text(LOGGING + delayed)


@contextmanager
def running_hdfs() -> Iterator[HdfsServer]:
    """A cluster that runs inside the block; skips the test where there cannot be one."""
    _require_java()
    jars = _fetched(CACHE)
    with tempfile.TemporaryDirectory(prefix="burnish-hdfs-") as root:
        server = HdfsServer(Path(root), jars)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _require_java() -> None:
    if shutil.which("java") is None:
        pytest.skip("needs Java 8 to 23 for a real HDFS: there is no java")
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or not 8 <= int(found[1]) <= 23:
        pytest.skip(f"needs Java 8 to 23 for a real HDFS: {said.splitlines()[:1]}")


def _fetched(directory: Path) -> Path:
    """The directory of jars, fetched by whoever comes first."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
                try:
                    _fetch(Path(scratch))
                except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
                    pytest.skip(f"the jars of HDFS cannot be fetched: {error}")
                Path(scratch, "jars").rename(directory)
    return directory


def _fetch(scratch: Path) -> None:
    """An environment with setuptools that this old a package can be asked by, then its archive."""
    venv.create(scratch / "env", with_pip=True)
    pip = [
        str(scratch / "env" / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
    ]
    _run(*pip, "install", "wheel", "setuptools<70")
    download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "pyspark"]
    _run(*pip, *download, "-d", str(scratch), SOURCE)
    (scratch / "jars").mkdir()
    (archive,) = scratch.glob("pyspark-*.tar.gz")
    wanted = {f"{name}.jar" for name in JARS}
    with tarfile.open(archive) as file:
        for member in file:
            name = member.name.rpartition("/")[2]
            if "/deps/jars/" in member.name and name in wanted:
                (scratch / "jars" / name).write_bytes(file.extractfile(member).read())
    missing = wanted - {path.name for path in (scratch / "jars").iterdir()}
    if missing:
        raise OSError(f"{SOURCE} has no {', '.join(sorted(missing))}")


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
    )
    if done.returncode:
        raise OSError(" ".join(done.stderr.split())[-300:])


def _compiled_delay(conf: Path, classpath: str) -> bool:
    """Whether there is a compiler for `DELAY`; without one, the tests take longer."""
    if shutil.which("javac") is None:
        return False
    (conf / "AckDelay.java").write_text(DELAY)
    command = ["javac", "-nowarn", "-cp", classpath, "-d", str(conf), str(conf / "AckDelay.java")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _state(task: Path) -> str:
    """Of a thread: R, S, T, ..."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def _xml(settings: Mapping[str, str]) -> str:
    properties = (
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    return f"<configuration>{''.join(properties)}</configuration>"


if __name__ == "__main__":
    with running_hdfs() as cluster:
        print(cluster.url, os.getpid(), flush=True)
        sys.stdin.read()
