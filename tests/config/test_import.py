from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch", "transformers", "datasets", "numpy", "pandas", "pyarrow", "tensorboard", "fsspec",
    "aiohttp", "s3fs", "gcsfs", "hdfs_native",
)  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [
        "burnish",
        "burnish.config.schema",
        "burnish.config.load",
        "burnish.config.constraints",
        "burnish.config.resume",
        "burnish.cli.main",
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
