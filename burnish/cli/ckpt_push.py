"""`burnish ckpt push`: send the model of a step to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path, PurePath

from burnish import __version__
from burnish.checkpoint.layout import MODEL
from burnish.checkpoint.steps import verify_files
from burnish.cli.ckpt import Outcome, Say, one_step
from burnish.errors import MissingError, UsageError, bytes_text
from burnish.files.hub import push


def push_step(say: Say, path: PurePath, repo: str, *, role: str, public: bool) -> Outcome:
    """Send a step's model, or its adapter, to OWNER/NAME, after a check of its hashes."""
    step = one_step(path)
    if not isinstance(step.path, Path):
        raise UsageError(
            f"{step.path} is not on this machine",
            want="a step in a local directory",
            do="write it to one with burnish ckpt export, then run hf upload",
        )
    directory = f"{role}/{MODEL}" if role else MODEL
    names = [name for name in step.manifest.files if name.startswith(f"{directory}/")]
    if not names:
        raise MissingError(f"{step.path} has no {directory}", do="correct --role, or leave it out")
    for damage in verify_files(step, names):
        raise damage
    size = sum(step.manifest.files[name].size for name in names)
    say(f"sending {step.path / directory}, {bytes_text(size)}, to {repo}")
    message = f"Step {step.step}, trained with Burnish {__version__}"
    address = push(step.path / directory, repo, message, private=not public)
    say(address)
    return Outcome({"path": str(step.path), "repo": repo, "commit": address, "bytes": size})
