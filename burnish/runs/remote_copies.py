"""Copy one input from a URL or the hub to this machine."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from burnish.errors import of_setting
from burnish.files.hub import HubPlace
from burnish.files.urls import is_url

if TYPE_CHECKING:
    from burnish.files.remote_copy import Watch

_SMALL_FILE = 256 << 20
"""Most bytes of a data set's file that a dry run downloads."""
_WEIGHTS = ".safetensors"
_MODEL_SUFFIXES = frozenset({".json", _WEIGHTS, ".model", ".txt", ".jinja", ".py", ".tiktoken"})
_log = logging.getLogger(__name__)


def local_directory(place: str, watch: Watch | None = None, *, weights: bool = True) -> Path:
    """Copy a Hugging Face directory, with custom code, to this machine. Raises `MissingError` if it has no files."""
    suffixes = _MODEL_SUFFIXES if weights else _MODEL_SUFFIXES - {_WEIGHTS}

    def wanted(name: str) -> bool:
        return PurePosixPath(name).suffix in suffixes

    hub = HubPlace.of(place, "model")
    if hub is None:
        from burnish.files.remote_copy import local_files

        return local_files(place, wanted, watch)[0].parent
    from burnish.files.hub_files import HubFiles

    files = HubFiles.of(hub)
    folder = PurePosixPath(hub.path)
    names = [str(folder / name) for name in files.names() if wanted(name)]
    return files.fetch(names, shown=watch is not None) / folder


def replace_model(model: dict[str, Any], watch: Watch | None) -> None:
    """Copy config.json and tokenizer alone, and make the model a fresh one."""
    folder = local_directory(model["path"], watch, weights=False)
    model |= {"path": None, "fresh": str(folder / "config.json"), "lora": {}}
    model["tokenizer"] = model["tokenizer"] or str(folder)


def local_data(entry: str, setting: str, watch: Watch | None, *, only_small: bool) -> list[str]:
    """Copy the files of an entry of `data`, with `only_small` the first one if it is small; return their paths."""
    if place := HubPlace.of(entry, "dataset"):
        from burnish.data.splits import split_files
        from burnish.files.hub_files import HubFiles

        with of_setting(setting):
            hub = HubFiles.of(place)
            sizes = split_files(hub, setting)
            names = list(sizes)[:1] if only_small else list(sizes)
            if only_small and sizes[names[0]] > _SMALL_FILE:
                return [entry]
            root = hub.fetch(names, shown=watch is not None)
        return [str(root / name) for name in names]
    if only_small or not is_url(entry):
        return [entry]
    from burnish.data.splits import folder_files
    from burnish.files.remote_copy import copied

    with of_setting(setting):
        selected, notice = folder_files(entry, setting)
    if notice:
        _log.warning(notice)
    root = copied(selected, watch)
    return [str(root / file.name) for file in selected.files]


def local_file(url: str, watch: Watch | None) -> Path:
    """Copy a file."""
    hub = HubPlace.of(url, "model")
    if hub is None:
        from burnish.files.remote_copy import local_files

        return local_files(url, lambda name: False, watch)[0]
    from burnish.files.hub_files import HubFiles

    return HubFiles.of(hub).file("")
