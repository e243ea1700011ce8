"""A passed proof counts only while everything that a forward pass depends on is the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from burnish.check.proof_key import proof_place

CPU = torch.device("cpu")
PLACE = """
import sys, torch
from transformers import AutoConfig
from burnish.check.proof_key import proof_place
for family in sys.argv[1:]:
    print(proof_place(AutoConfig.for_model(family), torch.device("cpu"), []).name)
"""


def places(*families: str, path: Path | None = None, **variables: str) -> list[str]:
    """The names of proofs in a fresh process, with `path` before other packages."""
    before = [str(path)] if path else []
    known = os.environ.get("PYTHONPATH", "")
    variables["PYTHONPATH"] = os.pathsep.join([*before, known, str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", PLACE, *families]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True)
    return ran.stdout.decode().split()


def installed(root: Path, name: str, version: str) -> None:
    """Write what pip leaves of a distribution."""
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("")


def package(root: Path, name: str, text: str) -> None:
    """Write a package that no distribution describes."""
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "__init__.py").write_text(text)


def removed(root: Path) -> None:
    for entry in root.iterdir():
        shutil.rmtree(entry)


def rebuilt(metadata: Path) -> None:
    (metadata / "RECORD").write_text("kernel.so,sha256=other,1\n")


def upgraded(root: Path, name: str, version: str) -> None:
    removed(root)
    installed(root, name, version)


CHANGES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "a kernel package in a folder": (
        lambda _: None,
        lambda root: package(root, "causal_conv1d", "causal_conv1d_fn = None"),
    ),
    "its code edited": (
        lambda root: package(root, "mamba_ssm", "answer = 1"),
        lambda root: package(root, "mamba_ssm", "answer = 2"),
    ),
    "its code edited in a module below": (
        lambda root: package(root, "fla/ops", "answer = 1"),
        lambda root: package(root, "fla/ops", "answer = 2"),
    ),
    "a package copied beside installed ones": (
        lambda root: installed(root, "other", "1.0"),
        lambda root: package(root, "causal_conv1d", "causal_conv1d_fn = None"),
    ),
    "a package installed": (lambda _: None, lambda root: installed(root, "kernels", "0.15.1")),
    "another version": (
        lambda root: installed(root, "flash_attn", "2.8.0"),
        lambda root: upgraded(root, "flash_attn", "2.8.1"),
    ),
    "another build of the same version": (
        lambda root: installed(root, "liger_kernel", "0.6.4"),
        lambda root: rebuilt(root / "liger_kernel-0.6.4.dist-info"),
    ),
    "a package removed": (lambda root: installed(root, "torchao", "0.15.0"), removed),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.nightly
def test_what_is_installed_changes_the_place_of_a_proof(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = CHANGES[change]
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AutoConfig.for_model("lfm2")
    before(tmp_path)
    first = proof_place(config, CPU, [])
    assert proof_place(config, CPU, []) == first
    after(tmp_path)
    assert proof_place(config, CPU, []) != first


@pytest.mark.parametrize(
    "name", ["USE_HUB_KERNELS", "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", "ONEDNN_VERBOSE"]
)
@pytest.mark.nightly
def test_settings_of_kernels_change_the_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("lfm2")
    first = proof_place(config, CPU, [])
    monkeypatch.setenv(name, "1")
    assert proof_place(config, CPU, []) != first


def test_what_no_forward_pass_reads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("lfm2")
    first = proof_place(config, CPU, [])
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert proof_place(AutoConfig.for_model("lfm2", name_or_path="x"), CPU, []) == first


def test_determinism_changes_the_place() -> None:
    config = AutoConfig.for_model("lfm2")
    first = proof_place(config, CPU, [])
    torch.use_deterministic_algorithms(True)
    try:
        assert proof_place(config, CPU, []) != first
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.nightly
def test_edited_files_of_transformers_change_the_place_of_the_types_that_run_them(
    tmp_path: Path,
) -> None:
    """Of a copy of transformers: the model's own file, one that it imports, and those that all models share."""
    source, copy = Path(str(transformers.__file__)).parent, tmp_path / "transformers"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (metadata,) = source.parent.glob("transformers-*.dist-info")
    shutil.copytree(metadata, tmp_path / metadata.name)
    families = ("lfm2", "qwen3_5_text", "llama")
    known = places(*families, path=tmp_path)
    assert places(*families, path=tmp_path) == known
    for file, changed in (
        ("models/lfm2/modeling_lfm2.py", [True, False, False]),
        ("models/lfm2/modular_lfm2.py", [False, False, False]),
        ("masking_utils.py", [True, True, True]),
        ("integrations/hub_kernels.py", [True, True, True]),
        ("activations.py", [True, True, True]),
    ):
        path = copy / file
        text, times = path.read_text(), path.stat()
        path.write_text(text + "\n# edited\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        found = places(*families, path=tmp_path)
        assert [a != b for a, b in zip(found, known, strict=True)] == changed, json.dumps(file)
        path.write_text(text)
