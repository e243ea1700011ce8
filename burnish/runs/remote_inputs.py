"""List inputs behind URLs and on the hub, before torch is loaded. Nothing but small files is copied."""

from __future__ import annotations

from burnish.data.splits import folder_files, split_files
from burnish.errors import few, of_setting
from burnish.files.hub import HubPlace
from burnish.files.hub_files import HubFiles
from burnish.files.remote import Remote, RetryPolicy

_CONFIG_LIMIT = 1 << 24
# A user should see soon that a service is down or a host does not exist.
_PATIENCE = RetryPolicy(seconds=20)


def remote_data_sizes(entry: str, setting: str) -> list[int]:
    """Return the sizes of an entry's files."""
    if hub := HubPlace.of(entry, "dataset"):
        return list(split_files(HubFiles.of(hub), setting).values())
    return [file.size for file in folder_files(entry, setting, _PATIENCE).selected.files]


def remote_small_file(place: str, name: str) -> bytes:
    """Return a small file of a directory; for "" the place itself."""
    if hub := HubPlace.of(place, "model"):
        return HubFiles.of(hub).file(name).read_bytes()
    remote = Remote(f"{place.rstrip('/')}/{name}" if name else place)
    return remote.parent().read(remote.url.name, _CONFIG_LIMIT)


def remote_names(directory: str, setting: str) -> list[str]:
    """Return the names of files directly in a model's directory."""
    if hub := HubPlace.of(directory, "model"):
        with of_setting(setting):
            return HubFiles.of(hub).names()
    return Remote(directory, _PATIENCE).names()


def beside_missing_file(url: str) -> str:
    """Return what lies where a file should be, or "" if it is there."""
    if url.startswith("hf://") and (hub := HubPlace.of(url, "model")):
        names = HubFiles.of(hub).files()
        return "" if hub.path in names else few(list(names))
    remote = Remote(url, _PATIENCE)
    if remote.stat() is not None:
        return ""
    folder = remote.parent()
    return f"{folder} with {few(folder.names()) or 'nothing'}"
