"""Build the pretended device, and lay it where a process finds it as an installed backend of torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = Path(__file__).parent
_PACKAGE = "pretended_npu"


def compiler() -> str | None:
    """The C++ compiler that builds it; None without one."""
    return shutil.which("g++") or shutil.which("clang++")


def install(site: Path) -> Path:
    """Build it into `site`. A process with this directory in PYTHONPATH has two devices of type npu."""
    package = site / _PACKAGE
    package.mkdir(parents=True)
    shutil.copy(SOURCES / "device_module.py", package / "__init__.py")
    about = site / f"{_PACKAGE}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\nnpu = {_PACKAGE}:register\n")
    headers = [f"-isystem{path}" for path in include_paths()]
    libraries = [
        option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    command = [
        compiler(),
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-O1",
        *headers,
        str(SOURCES / "device.cpp"),
    ]
    output = ["-ltorch_cpu", "-lc10", "-o", str(package / "device.so")]
    subprocess.run([*command, *libraries, *output], check=True)
    return site
