"""The escape suite: programs try to leave the sandbox, and the same programs succeed where there is none.

Each prints "escaped" if it succeeds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burnish.sandbox.sandbox import Limits, Sandbox, SandboxError

READS = {
    "a file": "print(open(secret).read())",
    "a file by a link": "os.symlink(secret, scratch + '/link'); print(open(scratch + '/link').read())",
    "a file by dots": "print(open('/tmp/../../..' + secret).read())",
    "a file by /proc": "print(open('/proc/self/root' + secret).read())",
    "a file by the root of another process": """
for process in filter(str.isdigit, os.listdir('/proc')):
    try:
        print(open(f'/proc/{process}/root{secret}').read())
    except OSError:
        pass
""",
    "a file by a descriptor that was left open": """
for descriptor in [*range(1000), os.open('/', os.O_PATH)]:
    for path in (secret, '../../../..' + secret):
        try:
            print(os.read(os.open(path, os.O_RDONLY, dir_fd=descriptor), 100).decode())
        except OSError:
            pass
""",
    "variables of the training process": """
texts = [str(os.environ)]
for process in ('self', pid, os.getppid(), *filter(str.isdigit, os.listdir('/proc'))):
    try:
        texts.append(open(f'/proc/{process}/environ').read())
    except OSError:
        pass
print('escaped' * any('escaped' in text for text in texts))
""",
    "the command of the training process": "open(f'/proc/{pid}/cmdline').read() and print('escaped')",
}
"""Attempts to read what says "escaped"."""

CALLS = {
    "the network": "socket.create_connection(('127.0.0.1', port), 5); print('escaped')",
    "the network by UDP": """
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))
print('escaped')
""",
    "a socket in a file": """
client = socket.socket(socket.AF_UNIX)
client.connect(unix_socket)
print('escaped')
""",
    "a socket with an abstract name": """
client = socket.socket(socket.AF_UNIX)
client.connect('\\0' + unix_socket)
print('escaped')
""",
    "a signal to the training process": "os.kill(pid, 0); print('escaped')",
    "tracing another process": """
child = os.fork() if can_fork else 0
if can_fork and child == 0:
    time.sleep(20)
    os._exit(0)
if libc.ptrace(16, child or os.getppid(), 0, 0) == 0:
    print('escaped')
child and os.kill(child, 9)
""",
    "the memory of another process": """
text = ctypes.create_string_buffer(b'escaped')
target = ctypes.create_string_buffer(8)
ends = [(ctypes.c_size_t * 2)(ctypes.addressof(each), 8) for each in (target, text)]
child = os.fork() if can_fork else 0
if can_fork and child == 0:
    time.sleep(20)
    os._exit(0)
libc.process_vm_readv(child or os.getppid(), ends[0], 1, ends[1], 1, 0)
print(target.value.decode())
child and os.kill(child, 9)
""",
    "writing outside": "open(outside, 'w').write('x'); print('escaped')",
    "writing outside by a link": """
os.symlink(outside, scratch + '/link2')
open(scratch + '/link2', 'w').write('x')
print('escaped')
""",
    "making a directory outside": "os.mkdir(outside + '.d'); print('escaped')",
    "a user namespace": "libc.unshare(0x10000000) == 0 and print('escaped')",
    "a user namespace by clone": """
child = libc.syscall(56 if machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
child > 0 and print('escaped')
""",
    "many processes": """
made = 0
for _ in range(100):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    made += 1
print('escaped')
""",
    "memory that no limit counts": "os.memfd_create('x'); print('escaped')",
    "shared memory of System V": "libc.shmget(0, 4096, 0o1600) >= 0 and print('escaped')",
    "io_uring or bpf": """
for call, arguments in ((425, (1, bytes(120))), (321 if machine == 'x86_64' else 280, (0, bytes(72), 72))):
    if libc.syscall(call, *arguments) >= 0:
        print('escaped')
""",
}
"""Other attempts."""
ROOT_ONLY = {
    "becoming root": "os.setuid(0); os.setgid(0); print('escaped')",
    "a device": "os.mknod(scratch + '/device', 0o60600, os.makedev(1, 1)); print('escaped')",
    "another root directory": "os.chroot(scratch); print('escaped')",
    "another name of the machine": "socket.sethostname(socket.gethostname()); print('escaped')",
}
"""Attempts that succeed without a sandbox only if root makes them."""
HARMFUL = {
    "mounting": "libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0 and print('escaped')",
    "writing over Python": "open(os.__file__, 'a').write('x'); print('escaped')",
    "making a program of root": """
import shutil
shutil.copy('/usr/bin/id', '/tmp/id')
os.chmod('/tmp/id', 0o4755)
os.chown('/tmp/id', 0, 0)
print('escaped')
""",
    "calls of another kind of program": "libc.syscall(0x40000000 + 39) > 0 and print('escaped')",
    "unlimited memory": "data = bytearray(3 << 30); print('escaped')",
    "unlimited shared memory": """
import mmap
data = [mmap.mmap(-1, 256 << 20) for _ in range(12)]
print('escaped')
""",
    "higher limits": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print('escaped')
""",
    "a full disk": """
for number in range(1000):
    open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))
print('escaped')
""",
    "many files": """
for number in range(100_000):
    open(f'/tmp/{number}', 'w').close()
print('escaped')
""",
    "many open files": "files = [os.dup(0) for _ in range(1000)]; print('escaped')",
}
"""Attempts that are made in a sandbox only."""

START = """
import ctypes, json, os, platform, socket, time
libc = ctypes.CDLL(None)
machine = platform.machine()
globals().update(json.loads({facts!r}))
"""
"""What a program would have to find out first stands before each: names of files, processes, ports."""
RUN_ALL = """
import json, os, signal, sys
answers = {}
for name, code in json.load(sys.stdin).items():
    end, other = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(end)
        os.dup2(other, 1)
        try:
            exec(code, {})
        except BaseException as error:
            print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    os.close(other)
    os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    answers[name] = open(end, errors="replace").read()
json.dump(answers, sys.stdout)
"""
"""A program that makes all attempts without a sandbox, each in a process of its own."""
LIMITS = Limits(seconds=60.0, cpu_seconds=20, memory_mb=512, disk_mb=16, processes=16)
"""The time is long, because other tests run beside these."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Things that a program must not reach."""
    root = tmp_path_factory.mktemp("home")
    (root / ".ssh").mkdir()
    secret = root / ".ssh" / "id"
    secret.write_text("escaped")
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as server:
        patch.setenv("HF_TOKEN", "escaped")
        named = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for each, prefix in zip(named, ("", "\0"), strict=True):
            each.bind(f"{prefix}{root}/socket")
            each.listen()
        yield {
            "secret": str(secret),
            "outside": str(root / "outside"),
            "scratch": str(root),
            "unix_socket": f"{root}/socket",
            "port": server.getsockname()[1],
            "pid": os.getpid(),
            "can_fork": True,
        }
        for each in named:
            each.close()


def program(attack: str, facts: Mapping[str, Any]) -> str:
    return START.format(facts=json.dumps(facts)) + attack


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox(LIMITS)
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def limited() -> Iterator[Sandbox]:
    """A process without namespaces, where the kernel has Landlock."""
    with Sandbox(replace(LIMITS, isolation="limits")) as made:
        if "False" in made.run("print(open('/etc/hostname').read())").stdout:
            pytest.skip("this kernel has no Landlock")
        yield made


def test_without_a_sandbox_the_attempts_succeed(facts):
    attacks = READS | CALLS | (ROOT_ONLY if os.getuid() == 0 else {})
    programs = {name: program(attack, facts) for name, attack in attacks.items()}
    text = json.dumps(programs)
    argv = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    failed = {name: text for name, text in answers.items() if "escaped" not in text}
    assert failed.keys() & READS.keys() == set(), failed
    # A container may forbid some calls by itself.
    assert len(failed) < len(answers) // 3, failed
    os.remove(facts["outside"])
    os.rmdir(facts["outside"] + ".d")


@pytest.mark.parametrize("name", [*READS, *CALLS, *ROOT_ONLY, *HARMFUL])
def test_a_program_does_not_escape(sandbox, facts, name):
    attack = (READS | CALLS | ROOT_ONLY | HARMFUL)[name]
    finished = sandbox.run(program(attack, facts | {"scratch": "/tmp"}))
    assert "escaped" not in finished.stdout, finished
    assert finished.stopped is None, finished
    assert not Path(facts["outside"]).exists()
    assert sandbox.run("print(1)").stdout == "1\n"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*READS, *CALLS, *ROOT_ONLY, *HARMFUL])
def test_limits_alone_hold_what_they_say(limited, facts, name):
    attack = (READS | CALLS | ROOT_ONLY | HARMFUL)[name]
    finished = limited.run(program(attack, facts | {"can_fork": False}))
    assert "escaped" not in finished.stdout, finished
    assert finished.stopped is None, finished
    assert not Path(facts["outside"]).exists()
