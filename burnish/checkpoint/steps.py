"""Which steps a directory holds, and whether each is still what was committed.

Reads only, without torch and without looking into tensors (`burnish.checkpoint.verify` does). A step's name appears by one
rename of a whole directory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

from burnish.checkpoint.manifest import (
    ANOTHER_STEP,
    COMMIT,
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    STATE,
    STATE_LIMIT,
    Commit,
    FileRecord,
    Manifest,
    parse_commit,
    parse_manifest,
    record_of,
)
from burnish.errors import BurnishError, CorruptError, IncompatibleError, UsageError
from burnish.files.durable import Removals, discard, read_whole
from burnish.files.storage import LocalStorage, Source
from burnish.files.strict_json import parse_json

INFLIGHT, PORTION = ".inflight-", ".portion-"
"""Start the names of directories that are being written, and of what one of several disks has of a step."""
SEAL = "SEAL"
"""A partial checkpoint's copy of the COMMIT that the step will have, under a name that makes no step of it."""
TRASH, QUARANTINE = "trash", "quarantine"
"""Where directories go by rename before they are removed, and where steps go that could not be resumed from."""

P = TypeVar("P", bound=PurePath)

_STEP = re.compile(r"step-([0-9]{8,18})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that is whole as far as names, sizes and digests of its small files tell."""

    path: PurePath
    """Its directory; `path / "model"` is a Hugging Face model directory."""
    commit: Commit
    """Its seal."""
    manifest: Manifest
    """Its files and their hashes."""
    state: Mapping[str, Any]
    """What the trainer wrote of its position: the content of state.json."""

    @property
    def step(self) -> int:
        """Steps of training that it holds."""
        return self.commit.step

    @property
    def healthy(self) -> bool:
        """Whether losses and weights were finite."""
        return self.commit.healthy


def step_name(step: int) -> str:
    """The name of a committed step's directory."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The step whose directory has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def require_outside_steps(target: Path, storage: Source) -> None:
    """Refuse to write into a committed step, which would be damaged by it. Raises `UsageError`."""
    for parent in target.resolve().parents:
        if step_number(parent.name) is not None and storage.kind(parent / COMMIT) is not None:
            raise UsageError(
                f"{target} lies in the checkpoint {parent}",
                want="a directory outside of it; a file too many makes a checkpoint a damaged one",
                do="give another place",
            )


def step_paths(root: P, storage: Source) -> dict[int, P]:
    """Return everything with a step's name below `root`, whole or not, oldest first."""
    found: dict[int, P] = {}
    for entry in storage.entries(root):
        step = step_number(entry.name)
        if step is not None:
            found[step] = root / entry.name
    return dict(sorted(found.items()))


def portion_paths(root: Path, storage: LocalStorage) -> dict[Path, int]:
    """Return the partial checkpoints below `root` with their steps, oldest first."""
    names = [entry.name for entry in storage.entries(root) if entry.name.startswith(PORTION)]
    steps = {root / name: name.removeprefix(PORTION).partition(".")[0] for name in names}
    found = {path: int(step) for path, step in steps.items() if step.isdecimal()}
    return dict(sorted(found.items(), key=lambda each: each[1]))


def read_commit(path: PurePath, storage: Source) -> Commit:
    """The seal of the step at `path`. Raises `CorruptError` when it is missing or damaged."""
    _check_directory(path, storage)
    return _commit(path, storage)


def open_step(path: PurePath, storage: Source) -> Committed:
    """Open the step at `path`: check COMMIT, manifest, state and every file's size.

    Raises `CorruptError` naming a file that is damaged, missing, or not in the manifest, and `IncompatibleError` for another format.
    """
    _check_directory(path, storage)
    sizes = dict(files_below(path, "", storage))
    commit = _commit(path, storage)
    manifest = _manifest(path, commit, storage)
    for name in sorted((sizes.keys() - {COMMIT, MANIFEST}) ^ manifest.files.keys()):
        is_there = name in sizes
        raise CorruptError(
            f"{path / name} is {'in no manifest' if is_there else 'missing'}",
            have="a file that was not committed" if is_there else "no such file",
            want="exactly the files of the manifest",
            do=f"move {name} out of the step" if is_there else ANOTHER_STEP,
        )
    for name, record in manifest.files.items():
        _check_size(path / name, sizes[name], record)
    return Committed(path, commit, manifest, _state(path, manifest, storage))


def open_part(path: PurePath, below: str, storage: Source) -> Committed:
    """Open only the files of a step whose names begin with `below`, without its state.

    Other files may be missing, and uncommitted ones may be there. Raises as `open_step` does for the rest.
    """
    _check_directory(path, storage)
    commit = _commit(path, storage)
    manifest = _manifest(path, commit, storage)
    files = {name: record for name, record in manifest.files.items() if name.startswith(below)}
    for name, record in files.items():
        kind = storage.kind(path / name)
        if kind != "file":
            raise CorruptError(
                f"{path / name} is {'missing' if kind is None else 'no regular file'}",
                have="no such file" if kind is None else "a directory, a link or a device",
                want="the file of the manifest",
                do=ANOTHER_STEP
                if kind is None
                else "put the file itself there: links are not followed",
            )
        with storage.open(path / name) as file:
            _check_size(path / name, file.size(), record)
    return Committed(path, commit, replace(manifest, files=files), {})


def require_healthy(step: Committed) -> None:
    """Raise `CorruptError` where losses or weights of the step were not finite."""
    if not step.healthy:
        raise CorruptError(
            f"{step.path} is marked unhealthy",
            have="a loss or weights that are not finite",
            want="a step that training can continue from",
            do="see in metrics.jsonl where it went wrong; an older step can be continued from",
        )


def committed(root: PurePath, storage: Source | None = None) -> list[Committed]:
    """The steps below `root` that open, oldest first; the others are named in the log."""
    return _opened(root, storage or LocalStorage())[0]


def newest(root: PurePath, storage: Source | None = None) -> Committed | None:
    """Return the newest healthy step below `root`, or None if no step was ever committed.

    Raises `CorruptError` if there are steps and none is usable, `IncompatibleError` if all have another format.
    """
    opened, errors = _opened(root, storage or LocalStorage())
    usable = [step for step in opened if step.healthy]
    if usable:
        return usable[-1]
    if not opened and not errors:
        return None
    if not opened and all(isinstance(error, IncompatibleError) for error in errors.values()):
        raise list(errors.values())[-1]
    raise CorruptError(
        f"no checkpoint in {root} can be used",
        have=", ".join(sorted([*errors, *(step.path.name for step in opened)])),
        want="one that is whole and healthy",
        do=f"see what is wrong with each: burnish ckpt verify {root.parent}",
    )


def _opened(root: PurePath, storage: Source) -> tuple[list[Committed], dict[str, BurnishError]]:
    """Return the steps that open, oldest first, and the errors of the others by name; errors are logged."""
    found: list[Committed] = []
    errors: dict[str, BurnishError] = {}
    for path in step_paths(root, storage).values():
        try:
            found.append(open_step(path, storage))
        except (CorruptError, IncompatibleError) as error:
            _log.warning("%s", error)
            errors[path.name] = error
    return found, errors


def read_small(path: PurePath, name: str, limit: int, storage: Source) -> bytes:
    """Read a small file of the step at `path`. Raises `CorruptError` if it is missing or longer than `limit` bytes."""
    try:
        return read_whole(storage, path / name, limit)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{path} has no {name}",
            have="a step that is not committed",
            do="use another step; where this is a copy, copy it again",
        ) from error
    except (ValueError, EOFError) as error:
        raise CorruptError(f"{path / name} cannot be read", have=error, do=ANOTHER_STEP) from error


def _commit(path: PurePath, storage: Source) -> Commit:
    commit = parse_commit(read_small(path, COMMIT, COMMIT_LIMIT, storage), f"{path / COMMIT}")
    if path.name != step_name(commit.step):
        raise CorruptError(
            f"{path / COMMIT} seals another step",
            have=step_name(commit.step),
            want=path.name,
            do=f"give the directory its own name, {step_name(commit.step)}",
        )
    return commit


def _manifest(path: PurePath, commit: Commit, storage: Source) -> Manifest:
    data = read_small(path, MANIFEST, MANIFEST_LIMIT, storage)
    return parse_manifest(data, commit, f"{path / MANIFEST}")


def _check_size(file: PurePath, size: int, record: FileRecord) -> None:
    if size != record.size:
        raise CorruptError(
            f"{file} has another size than when it was committed",
            have=f"{size} bytes",
            want=f"{record.size} bytes",
            do=ANOTHER_STEP,
        )


def _check_directory(path: PurePath, storage: Source) -> None:
    """Refuse a link: its target may change, or be another run's."""
    if storage.kind(path) not in ("directory", None):
        raise CorruptError(
            f"{path} is no directory",
            have="a file, a link or a device",
            do="give the path of the directory itself: links are not followed",
        )


def files_below(path: PurePath, prefix: str, storage: Source) -> Iterator[tuple[str, int]]:
    """Return the sizes of all files below a directory, by path with `prefix`. Raises `CorruptError` for anything else there."""
    for entry in storage.entries(path):
        name = f"{prefix}{entry.name}"
        if entry.kind == "directory":
            yield from files_below(path / entry.name, f"{name}/", storage)
        elif entry.kind == "file":
            yield name, entry.size
        else:
            raise CorruptError(
                f"{path / entry.name} is no regular file",
                have="a link or a device",
                do="put the file itself there: links are not followed",
            )


def _state(path: PurePath, manifest: Manifest, storage: Source) -> Mapping[str, Any]:
    data = read_small(path, STATE, STATE_LIMIT, storage)
    record = manifest.files.get(STATE)
    if record is None or record != record_of(data, record.block_bytes):
        raise CorruptError(f"{path / STATE} is not what was committed", do=ANOTHER_STEP)
    state = parse_json(data, f"{path / STATE}")
    if not isinstance(state, dict):
        raise CorruptError(
            f"{path / STATE} is not a JSON object", have=type(state).__name__, do=ANOTHER_STEP
        )
    return state


def leftovers(root: Path, storage: LocalStorage) -> list[Path]:
    """Return what lies below `root` and is no step; if somebody holds its lease, it is being written or removed."""
    trash = [root / TRASH / entry.name for entry in storage.entries(root / TRASH)]
    names = [entry.name for entry in storage.entries(root)]
    return trash + [root / name for name in names if name.startswith((INFLIGHT, PORTION))]


def clear(root: Path, storage: LocalStorage, removals: Removals) -> None:
    """Remove them, for the holder of the lease; `removals` collects what the disk kept."""
    for path in leftovers(root, storage):
        with removals.trying():
            if path.parent.name == TRASH:
                storage.remove(path)
            else:
                discard(storage, path, root / TRASH)
