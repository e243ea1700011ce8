"""`burnish ckpt push`: send the model of a step to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.steps import CommittedStep, verify_files
from burnish.checkpoint.write_plan import MODEL
from burnish.cli.ckpt import Report, Say, one_step
from burnish.errors import MissingError, UsageError, bytes_text
from burnish.files.hub_files import push
from burnish.version import __version__


def push_step(
    say: Say, path: PurePath, repo: str, *, public: bool, branch: str | None, **which: Any
) -> Report:
    """Send a step's model to OWNER/NAME, after a check of its hashes."""
    step = one_step(path)
    if not isinstance(step.path, Path):
        raise UsageError(
            f"{step.path} is not on this machine",
            want="a step in a local directory",
            do="write it to one with burnish ckpt export, then run hf upload",
        )
    directory = f"{which['role']}/{MODEL}" if which["role"] else MODEL
    names = [name for name in step.manifest.files if name.startswith(f"{directory}/")]
    if not names:
        raise MissingError(f"{step.path} has no {directory}", do="correct --role, or leave it out")
    for damage in verify_files(step, names):
        raise damage
    with _folder(step, directory, which) as folder:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        say(f"sending {step.path / directory}, {bytes_text(size)}, to {repo}")
        message = f"Step {step.step}, trained with Burnish {__version__}"
        address = push(folder, repo, message, private=not public, branch=branch)
    say(address)
    return {"path": str(step.path), "repo": repo, "commit": address, "bytes": size}


@contextmanager
def _folder(step: CommittedStep, directory: str, which: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the step's model directory, or a temporary one with the merged model."""
    if not which["merged"] and which["base"] is None:
        yield Path(step.path, directory)
        return
    from burnish.checkpoint.tools.export import export
    from burnish.cli.ckpt_tensors import DTYPES, FILE_BYTES, exportable

    with (
        exportable(step, **which) as model,
        tempfile.TemporaryDirectory(prefix=".push-", dir=step.path.parent.parent) as parent,
    ):
        folder = Path(parent, MODEL)
        export(model, folder, DTYPES["bf16"], FILE_BYTES)
        yield folder
