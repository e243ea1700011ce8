"""For `make nightly-PART` and `make contract-PART`: which test files are of which part, so that a change can run what it touches.

As a program, print the files of a part.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PARTS = {
    "units": (".",),  # what no other part names
    "commands": ("cli", "test_documents.py", "test_examples.py", "test_release.py"),
    "models": ("models", "check"),
    "listed": ("check/test_listed_models.py",),
    "engines": ("engines",),
    "megatron": ("engines/megatron", "methods/test_megatron.py", "test_demo_with_megatron.py"),
    "layouts": ("engines/megatron/test_layouts.py",),
    "rollout": ("rollout",),
    "runs": ("runs",),
    "methods": ("methods",),
    "served": (
        "methods/test_served.py",
        "methods/test_served_kills.py",
        "methods/test_served_sglang.py",
        "rollout/test_served.py",
        "rollout/test_sglang.py",
    ),
    "checkpoints": ("checkpoint", "files"),
    "kills": ("faults", "launch"),
    "gpu": ("gpu",),
    "pretended": ("gpu/test_pretended_device.py",),
    "trackers": ("tracking/test_otlp.py", "tracking/test_services.py"),
    "vllm": (
        "rollout/test_vllm.py",
        "methods/test_served_vllm.py",
        "gpu/test_vllm.py",
        "models/test_triton.py",
    ),
    "ray": ("launch/test_ray.py",),
    "smollm": ("test_real_model.py",),
    "environments": ("environments", "sandbox", "algorithms/test_trl_losses.py"),
    "verifiers": ("environments/test_verifiers.py",),
    "nemo-gym": ("environments/test_nemo_gym.py",),
}
"""By name, files and folders below tests/. What is named itself is not of the part of its folder."""


def part_of(file: str) -> str:
    """The part of a file below tests/: that which names the file, or the nearest folder around it."""
    owners = {path: part for part, paths in PARTS.items() for path in paths}
    return next(owners[path] for path in (file, *map(str, Path(file).parents)) if path in owners)


def files_with_tests() -> list[str]:
    """All that pytest collects, below tests/."""
    return sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))


if __name__ == "__main__":
    chosen = [f"tests/{file}" for file in files_with_tests() if part_of(file) == sys.argv[1]]
    if not chosen:
        sys.exit(f"no part has the name {sys.argv[1]}; there are: {' '.join(PARTS)}")
    print(*chosen)
