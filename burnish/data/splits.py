"""Choose the files of an entry of `data`: by subset and split, as `datasets` does, or by path.

One rule for data sets of the Hugging Face Hub, folders here and folders behind URLs. `FOLDER:SPLIT` and `FOLDER:SUBSET/SPLIT` name
a split. A folder that `datasets.save_to_disk` wrote says itself which files it has.
"""

from __future__ import annotations

import glob
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from burnish.data.columns import READERS, is_data
from burnish.errors import MissingError, UsageError, few, refusing
from burnish.files.hub import FORMS
from burnish.files.hub_files import HubFiles
from burnish.files.remote import Remote, RetryPolicy
from burnish.files.remote_copy import Selected, matches, select

_CARD = "README.md"
_CONFIGS = re.compile(rb"\A\s*---\s*\n(?:(?!---).*\n)*?configs:")
"""A card that names data files."""
_USUAL_SUBSETS = ("default", "main")
"""Subsets to look for if neither the entry nor the data set's card names one."""
_SPLITS: Mapping[str, Sequence[str]] = {
    "data.train": ("train",),
    "data.validation": ("validation", "test"),
}
"""Splits to look for, in this order, if an entry names none, by setting."""
_DICT = "dataset_dict.json"
_STATE = "state.json"
_INFO = "dataset_info.json"
"""Files that `DatasetDict.save_to_disk` and `Dataset.save_to_disk` write beside the rows."""
_SMALL_FILE = 16 << 20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes after those of data. Such files are not read, and so named."""

_Splits = Mapping[str, Sequence[str]]
"""Names of files, by split."""
_Read = Callable[[str], bytes]
"""Returns a file's content, by name."""


class FolderFiles(NamedTuple):
    """The files of an entry behind a URL."""

    selected: Selected
    notice: str
    """As in `EntryFiles`."""


def local_folder_files(folder: Path, part: str, setting: str) -> tuple[list[Path], str]:
    """Return the files of a local folder, or of its split, and a notice as `EntryFiles` has it."""
    names = sorted(_walk(folder))
    chosen, notice = _in_folder(
        str(folder), part, setting, names, lambda name: (folder / name).read_bytes()
    )
    return [folder / name for name in chosen], notice


def pattern_files(path: str, pattern: Path, setting: str) -> tuple[list[Path], str]:
    """Return the local files that match a pattern, and a notice as `EntryFiles` has it."""
    names = sorted(glob.glob(str(pattern), recursive=True))
    files = [name for name in names if Path(name).is_file()]
    return [Path(name) for name in files], _contrary(path, setting, files)


def folder_files(url: str, setting: str, policy: RetryPolicy | None = None) -> FolderFiles:
    """Select the files of an entry that is a URL, as `entry_files` does for local ones."""
    remote = Remote(url, policy)
    part = ""
    if remote.url.path and remote.stat() is not None:
        return FolderFiles(select(remote, is_data), "")
    listed = remote.files()
    if not listed and ":" in remote.url.path:
        path, _, part = remote.url.path.rpartition(":")
        remote = Remote(replace(remote.url, path=path), policy)
        listed = remote.files()
    if not listed:
        selected = select(Remote(url, policy), is_data)
        names = [file.name for file in selected.files]
        return FolderFiles(selected, _contrary(url, setting, names))
    by_name = {file.name: file for file in listed}
    chosen, notice = _in_folder(
        str(remote), part, setting, list(by_name), lambda name: remote.read(name, _SMALL_FILE)
    )
    if not chosen:
        return FolderFiles(select(remote, is_data), "")
    return FolderFiles(Selected(remote, tuple(by_name[name] for name in chosen)), notice)


def split_files(hub: HubFiles, setting: str) -> dict[str, int]:
    """Return the files and sizes of an entry of the hub. Downloads the data set's card.

    Raises `MissingError` for an unknown subset, split or path, and `UsageError` for other kinds of file.
    """
    place = hub.place
    listed = hub.files()
    if place.path:
        names = _below(place.path, list(listed))
    else:
        root = hub.fetch([name for name in listed if name == _CARD])
        card = (root / _CARD).read_bytes() if _CARD in listed else b""
        base = str(replace(place, part="", revision=""))
        subset, splits = _by_datasets(base, place.part, list(listed), card)
        names = list(splits[_split(base, place.part, subset, setting, splits)])
    if not names:
        raise MissingError(
            f"there is nothing to read at {place}",
            have=few([name for name in listed if is_data(name)]) or "no data file",
            want="a file, a directory of files, or a pattern that matches",
            do="correct the path",
        )
    if foreign := [name for name in names if not is_data(name)]:
        raise UsageError(
            f"{place} has files of an unknown kind",
            have=few(foreign),
            want=", ".join(READERS),
            do="the hub converts most data sets: try "
            f"hf://datasets/{place.repo}@refs/convert/parquet/SUBSET/SPLIT",
        )
    return {name: listed[name] for name in names}


def _walk(folder: Path) -> Iterator[str]:
    """Yield names of files at any depth. Like `datasets`, leave out hidden files."""
    seen = set[tuple[int, int]]()
    for above, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(above)
        is_new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if is_new and not name.startswith((".", "__"))]
        paths = [Path(above, name) for name in files if is_new and not name.startswith(".")]
        yield from (path.relative_to(folder).as_posix() for path in paths if path.is_file())


def _in_folder(
    base: str, part: str, setting: str, listed: Sequence[str], read: _Read
) -> tuple[Sequence[str], str]:
    """Return the names that a folder contributes to `setting`, and a notice. No names: there are no data."""
    names = _without_states(base, listed, read)
    data = [name for name in names if is_data(name)]
    packed = [name for name in names if is_data(name.removesuffix(PurePosixPath(name).suffix))]
    packed = [name for name in packed if name.endswith(_COMPRESSED)]
    card = read(_CARD) if _CARD in listed else b""
    if _DICT in listed:
        saved = json.loads(read(_DICT))["splits"]
        splits: _Splits = {name: [n for n in data if n.startswith(f"{name}/")] for name in saved}
        subset = ""
    elif {_STATE, _INFO} <= set(listed):
        splits = {"": data}
        subset = ""
    elif _CONFIGS.match(card):
        subset, splits = _by_datasets(base, part, names, card)
    else:
        splits = _by_name(data)
        subset = ""
    if packed and not data:
        raise UsageError(
            f"{base} has compressed files",
            have=few(packed),
            want=", ".join(READERS),
            do="unpack them",
        )
    if not data:
        return [], ""
    if set(splits) == {""} and not part:
        without = f"{setting} is {base}, without {few(packed)}" if packed else ""
        return splits[""], without or _contrary(base, setting, splits[""])
    split = _split(base, part, subset, setting, splits)
    chosen = list(dict.fromkeys(splits[split]))
    if foreign := [name for name in chosen if not is_data(name)]:
        raise UsageError(
            f"{base} has files of an unknown kind",
            have=few(foreign),
            want=", ".join(READERS),
            do="convert them",
        )
    left_out = [name for name in (*data, *packed) if name not in set(chosen)]
    if left_out and not part:
        return chosen, f"{setting} is the split {split} of {base}, without {few(left_out)}"
    return chosen, "" if part else _contrary(base, setting, chosen)


def _without_states(base: str, names: Sequence[str], read: _Read) -> list[str]:
    """Leave out what `save_to_disk` writes besides the rows, and Arrow files of an earlier call."""
    remaining = [name for name in names if name != _DICT]
    for state in [name for name in names if PurePosixPath(name).name == _STATE]:
        folder = PurePosixPath(state).parent
        if str(folder / _INFO) not in names:
            continue
        problem = f"{base}/{state} is not a file of save_to_disk"
        with refusing(problem, do="save the rows again"):
            files = [
                str(folder / entry["filename"]) for entry in json.loads(read(state))["_data_files"]
            ]
        if missing := [name for name in files if name not in names]:
            raise UsageError(
                f"{base} is not complete",
                have=f"no {few(missing)}",
                want=f"every file that {state} names",
                do="copy the whole folder, or save the rows again",
            )
        remaining = [name for name in remaining if PurePosixPath(name).parent != folder] + files
    return remaining


def _by_name(names: Sequence[str]) -> _Splits:
    """Return the splits that `datasets` reads from names. Without any, all files are of the split ""."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, get_data_patterns, resolve_pattern

    with _shown(names) as shown:
        try:
            patterns = get_data_patterns(str(shown))
        except FileNotFoundError:  # `datasets` takes config.json and the like for no data
            return {"": []}
        splits: dict[str, list[str]] = {}
        for split, patterns_of_split in patterns.items():
            name = "" if patterns == DEFAULT_PATTERNS_ALL else str(split)
            splits[name] = []
            for pattern in patterns_of_split:
                with suppress(FileNotFoundError):
                    paths = map(Path, resolve_pattern(pattern, str(shown)))
                    splits[name] += [path.relative_to(shown).as_posix() for path in paths]
        return splits


def _by_datasets(
    base: str, part: str, names: Sequence[str], card: bytes
) -> tuple[str, dict[str, Sequence[str]]]:
    """Return the subset that `part` names, or the usual one, and its splits by the data set's card."""
    import datasets

    with _shown(names, card) as shown, tempfile.TemporaryDirectory() as cache:
        try:
            subset = _subset(base, part, shown)
            builder: Any = datasets.load_dataset_builder(str(shown), name=subset, cache_dir=cache)
            splits: dict[str, Sequence[str]] = {}
            for split, files in builder.config.data_files.items():
                splits[str(split)] = [Path(file).relative_to(shown).as_posix() for file in files]
        except (ValueError, OSError) as error:  # no data files, a broken card, or a path elsewhere
            raise MissingError(
                f"`datasets` does not understand the data set {base}",
                have=" ".join(str(error).replace(str(shown), base).split())[:300],
                want=f"{', '.join(READERS)} files in it",
                do=f"name its files: {base}/PATH",
            ) from error
        return subset, splits


@contextmanager
def _shown(names: Sequence[str], card: bytes = b"") -> Iterator[Path]:
    """Make a folder of empty files and a card, for `datasets` to look at."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder).resolve()
        for name in names:
            path = shown / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(card if name == _CARD else b"")
        yield shown


def _subset(base: str, part: str, shown: Path) -> str:
    """Return the named or usual subset."""
    import datasets

    subsets = datasets.get_dataset_config_names(str(shown))
    first, slash, _ = part.partition("/")
    if first in subsets:
        return first
    usual = datasets.get_dataset_default_config_name(str(shown))
    usual = usual or next((name for name in _USUAL_SUBSETS if name in subsets), None)
    if slash or usual is None:
        raise MissingError(
            f"the data set {base} has {'no such subset' if first else 'several subsets'}",
            have=", ".join(subsets),
            want=FORMS["dataset"],
            do=f"name one, as in {base}:{subsets[0]}",
        )
    return usual


def _split(base: str, part: str, subset: str, setting: str, splits: _Splits) -> str:
    """Return the split that `part` names, or the first usual one of the setting."""
    first, _, second = part.partition("/")
    named = second if first == subset else part
    wanted = [named] if named else _SPLITS[setting]
    split = next((name for name in wanted if name in splits), None)
    if split is None:
        names = [name for name in splits if name]
        other = f"{subset}/{names[0]}" if subset and names else "".join(names[:1])
        raise MissingError(
            f"{base} has no split {' or '.join(wanted)}",
            have=", ".join(names) or "files without names of splits",
            want=FORMS["dataset"],
            do=f"to read it, name it: {base}:{other}" if names else f"name its files: {base}/PATH",
        )
    return split


def usual_split(splits: Mapping[str, Any], setting: str) -> str:
    """Return the split of a `DatasetDict` that suits a setting. Raises `MissingError`."""
    split = next((name for name in _SPLITS[setting] if name in splits), None)
    if split is None:
        raise MissingError(
            f"{setting}: the DatasetDict has no split {' or '.join(_SPLITS[setting])}",
            have=", ".join(splits),
            do="give one of its splits",
        )
    return split


def _contrary(base: str, setting: str, names: Sequence[str]) -> str:
    """Return a sentence if names of training files speak of held-out rows."""
    from datasets.data_files import SPLIT_KEYWORDS

    if setting != "data.train":
        return ""
    words = {word for split, known in SPLIT_KEYWORDS.items() if split != "train" for word in known}
    held_out = [n for n in names if words.intersection(re.split(r"[^a-z]+", n.lower()))]
    return f"{setting}: {base} includes {few(held_out)}" if held_out else ""


def _below(path: str, names: Sequence[str]) -> list[str]:
    if path in names:
        return [path]
    if inside := [n for n in names if is_data(n) and str(PurePosixPath(n).parent) == path]:
        return inside
    return [name for name in names if matches(name.split("/"), path.split("/"))]
