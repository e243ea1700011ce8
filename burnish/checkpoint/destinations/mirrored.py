"""Which local steps need not be kept for the mirror's sake: `checkpoints/mirrored.json`.

`{"format": 1, "url": "s3://bucket/runs/my-run", "steps": {"100": UUID}}`. A step is in it once its
copy was read back and sealed, or when the mirror's own retention does not want it. The truth is on
the mirror; this is so that retention can decide without asking it. A file that is missing, damaged or
of another mirror says nothing, and nothing goes. No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from burnish.errors import CorruptError
from burnish.files.durable import read_whole, write_durably
from burnish.files.storage import Storage
from burnish.files.strict_json import encode_json, parse_json

MIRRORED = "mirrored.json"
"""Its name below `checkpoints/`."""

_FORMAT = 1
_LIMIT = 1 << 20

_log = logging.getLogger(__name__)


def read_mirrored(root: Path, url: str, storage: Storage) -> dict[int, str]:
    """The uuids of the steps below `root` that the mirror at `url` has or does not want, by step."""
    path = root / MIRRORED
    try:
        value = parse_json(read_whole(storage, path, _LIMIT), str(path))
        if value["format"] != _FORMAT or value["url"] != url:
            return {}
        return {int(step): str(uuid) for step, uuid in value["steps"].items()}
    except FileNotFoundError:
        return {}
    except (CorruptError, OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as e:
        _log.warning("%s is damaged, so every step counts as not mirrored: %s", path, e)
        return {}


def write_mirrored(root: Path, url: str, steps: Mapping[int, str], storage: Storage) -> None:
    """Put the file, where it does not say so already."""
    if steps != read_mirrored(root, url, storage):
        by_step = {str(step): uuid for step, uuid in sorted(steps.items())}
        content = encode_json({"format": _FORMAT, "url": url, "steps": by_step})
        write_durably(storage, root / MIRRORED, content)
