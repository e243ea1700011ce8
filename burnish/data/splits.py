"""Choose the files of a data set on the Hugging Face Hub: by subset and split, as `datasets` does, or by path."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.data.columns import READERS, is_data
from burnish.errors import MissingError, UsageError, few
from burnish.files.cache import matches
from burnish.files.hub import FORMS, HubPlace

_CARD = "README.md"
_USUAL_SUBSETS = ("default", "main")
"""Subsets to look for if neither the id nor the data set's card names one."""
_SPLITS: Mapping[str, Sequence[str]] = {
    "data.train": ("train",),
    "data.validation": ("validation", "test"),
}
"""Splits to look for, in this order, if an id names none, by setting."""


def split_files(place: HubPlace, setting: str) -> dict[str, int]:
    """Return a place's files and their sizes. Downloads the data set's card.

    Raises `MissingError` for an unknown subset, split or path, and `UsageError` for other kinds of file.
    """
    listed = place.files()
    if place.path:
        names = _below(place.path, list(listed))
    else:
        names = _in_split(place, setting, list(listed))
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


def _below(path: str, names: Sequence[str]) -> list[str]:
    if path in names:
        return [path]
    if inside := [n for n in names if is_data(n) and str(PurePosixPath(n).parent) == path]:
        return inside
    return [name for name in names if matches(name.split("/"), path.split("/"))]


def _in_split(place: HubPlace, setting: str, names: Sequence[str]) -> list[str]:
    """Ask `datasets`, with a directory of the data set's card and empty files."""
    import datasets

    root = place.fetch([name for name in names if name == _CARD])
    with tempfile.TemporaryDirectory() as folder:
        shown, cache = Path(folder, "shown"), Path(folder, "cache")
        for name in names:
            path = shown / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((root / name).read_bytes() if name == _CARD else b"")
        try:
            subset, wanted = _chosen(place, shown)
            options = {"name": subset, "cache_dir": str(cache)}
            builder: Any = datasets.load_dataset_builder(str(shown), **options)
            splits = {str(split): files for split, files in builder.config.data_files.items()}
        except (ValueError, OSError) as error:  # `datasets` finds no data files, or a broken card
            raise MissingError(
                f"`datasets` does not understand the data set {place}",
                have=" ".join(str(error).replace(str(shown), place.repo).split())[:300],
                want="JSON Lines, Parquet or CSV files",
                do=f"name its files: hf://datasets/{place.repo}/PATH",
            ) from error
        wanted = wanted or _SPLITS[setting]
        found = next((splits[name] for name in wanted if name in splits), None)
        if found is None:
            raise MissingError(
                f"{place} has no split {' or '.join(wanted)}",
                have=", ".join(splits),
                want=FORMS["dataset"],
                do=f"as {_named(place, f'{subset}/{next(iter(splits), None)}')}",
            )
        return [Path(each).relative_to(shown.resolve()).as_posix() for each in found]


def _chosen(place: HubPlace, shown: Path) -> tuple[str, Sequence[str]]:
    """Return the named or usual subset, and the named split."""
    import datasets

    subsets = datasets.get_dataset_config_names(str(shown))
    first, slash, second = place.part.partition("/")
    if first in subsets:
        return first, [second] if second else []
    usual = datasets.get_dataset_default_config_name(str(shown))
    usual = usual or next((name for name in _USUAL_SUBSETS if name in subsets), None)
    if slash or usual is None:
        raise MissingError(
            f"the data set {place} has {'no such subset' if first else 'several subsets'}",
            have=", ".join(subsets),
            want=FORMS["dataset"],
            do=f"as {_named(place, subsets[0])}",
        )
    return usual, [first] if first else []


def _named(place: HubPlace, part: str) -> HubPlace:
    return replace(place, part=part, revision="")
