"""Programs that use too much, that leave things behind, and that end in all ways; against plain Python where there is an oracle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.nightly import by_day
from support.ranks.waiting import until

from burnish.distributed.environment import descendants
from burnish.sandbox.sandbox import Limits, Sandbox, SandboxError

LIMITS = Limits(seconds=60.0, cpu_seconds=20, memory_mb=256, disk_mb=16, processes=8)
ENDS = {
    "output": "print('one'); print('två', end=''); import sys; sys.stderr.write('three')",
    "input": "import sys\nprint(input(), sys.stdin.read().split())",
    "error": "def f():\n    return 1 / 0\nf()",
    "syntax": "print(",
    "status": "raise SystemExit(3)",
    "message": "import sys; sys.exit('why')",
    "at the end": "import atexit; atexit.register(print, 'last')",
    "a thread": "import threading; threading.Timer(0.05, print, ['later']).start()",
    "a signal": "import os; os.kill(os.getpid(), 6)",
    "no end": "import os; print('lost'); os._exit(5)",
    "a program": "import subprocess; print(subprocess.run(['echo', 'x'], capture_output=True))",
    "the main module": "import pickle, sys\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), __name__)",
    "processes": "import multiprocessing\nif __name__ == '__main__':\n    print(multiprocessing.Pool(2).map(abs, [-1, 2]))",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox(LIMITS)
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.parametrize(
    "name", by_day(ENDS, ("input", "error", "status", "a thread", "processes"))
)
def test_a_program_does_what_it_does_elsewhere(sandbox, name, tmp_path):
    given = "first\nsecond third\n"
    (tmp_path / "program.py").write_text(ENDS[name])
    argv = [sys.executable, "program.py"]
    environ = {"PATH": os.environ["PATH"], "PYTHONUTF8": "1"}
    plain = subprocess.run(
        argv, cwd=tmp_path, input=given, capture_output=True, text=True, env=environ
    )
    finished = sandbox.run(ENDS[name], given)
    assert finished.stdout == plain.stdout
    assert finished.status == plain.returncode
    said = plain.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert finished.stderr.splitlines() == said
    assert finished.stopped is None


NEVER_END = {
    "busy": "while True: pass",
    "asleep": "import time; time.sleep(1000)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "deaf": """
import signal
for each in range(1, 65):
    try:
        signal.signal(each, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
    "fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
}


@pytest.mark.parametrize("name", by_day(NEVER_END, ("stopped", "fork bomb")))
def test_a_program_that_does_not_end_is_ended(name):
    with Sandbox(replace(LIMITS, seconds=0.3)) as short:
        assert short.run(NEVER_END[name]).stopped == "time"
        until(lambda: len(descendants(short._process.pid)) == 1)
        short.limits = LIMITS
        assert short.run("print(1)").stdout == "1\n"


@pytest.mark.nightly
def test_processor_time_is_limited_by_itself():
    with Sandbox(replace(LIMITS, cpu_seconds=1)) as short:
        finished = short.run("while True: pass")
    assert finished.stopped == "time"
    assert finished.status == -signal.SIGXCPU


def test_processes_share_their_memory_limit(sandbox):
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(b"x") * (100 << 20)
        time.sleep(60)
time.sleep(60)
"""
    assert sandbox.run(code).stopped == "memory"


def test_nothing_is_left_for_the_next_program(sandbox):
    code = """
import os, time, signal
os.mkdir("left"); open("/tmp/left/file", "w").close()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(1000)
"""
    assert sandbox.run(code).status == 0
    assert len(descendants(sandbox._process.pid)) == 1
    code = "import os; print(os.listdir('/tmp'), sorted(filter(str.isdigit, os.listdir('/proc'))))"
    assert sandbox.run(code).stdout in ("[] ['1', '2']\n", "[] []\n")


def test_killing_all_that_is_in_sight_harms_nobody(sandbox):
    finished = sandbox.run("import os; os.kill(1, 9); os.kill(os.getppid(), 9); os.kill(-1, 9)")
    assert finished.stopped is None
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_flood_is_cut(sandbox):
    finished = sandbox.run("import sys\nwhile True: print('x' * 1000); print('y', file=sys.stderr)")
    assert finished.cut
    assert len(finished.stdout) == LIMITS.output_kb << 10
    assert finished.status != 0
    assert sandbox.run("import os; os.write(1, b'\\xff\\x00')").stdout == "\ufffd\x00"


def test_a_result_has_a_descriptor_of_its_own(sandbox):
    assert sandbox.run("import os; os.write(3, b'kept')").result == "kept"


def test_draws_and_hashes_repeat(sandbox):
    code = "import random; print(random.random(), hash('a'))"
    assert sandbox.run(code).stdout == sandbox.run(code).stdout


@pytest.mark.nightly
def test_the_sandbox_ends_with_its_owner():
    code = """
import os, sys
from burnish.sandbox.sandbox import Limits, Sandbox
sandbox = Sandbox(Limits())
print(sandbox._process.pid, flush=True)
if len(sys.argv) > 1:
    import threading
    threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
    sandbox.run("import time; time.sleep(1000)")
os.kill(os.getpid(), 9)
"""
    for busy in ((), ("busy",)):
        argv = [sys.executable, "-c", code, *busy]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        pid = int(done.stdout)
        until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))


def test_modules_and_files_that_are_asked_for_are_there(tmp_path_factory):
    with Sandbox(replace(LIMITS, preload=["textwrap"], visible=["/etc/hostname"])) as more:
        finished = more.run(
            "import sys; print('textwrap' in sys.modules, open('/etc/hostname').read())"
        )
        assert finished.stdout.startswith("True")


@pytest.mark.parametrize(
    "settings",
    [
        {"preload": ["no_module_of_this_name"]},
        {"visible": ["/tmp/x"]},
        {"seconds": 0},
        {"isolation": "none"},
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings):
    with pytest.raises((SandboxError, ValueError)):
        Sandbox(replace(LIMITS, **settings))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is missing")
def test_where_namespaces_are_forbidden_a_program_runs_only_if_limits_alone_are_asked_for():
    code = """
from burnish.sandbox.sandbox import Limits, Sandbox, SandboxError
try:
    Sandbox()
except SandboxError as error:
    print(str(error).count("\\n"))
with Sandbox(Limits(isolation="limits")) as sandbox:
    print(sandbox.run("print(1)").stdout, end="")
"""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout == "0\n1\n", done.stderr


def test_stricter_limits_of_the_machine_stay():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from burnish.sandbox.sandbox import Sandbox
program = "import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE))"
with Sandbox() as sandbox:
    print(sandbox.run(program).stdout)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["(1048576,", "1048576)"], done.stderr
