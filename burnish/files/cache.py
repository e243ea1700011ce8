"""The cache: `burnish` in `XDG_CACHE_HOME` (`~/.cache`), or `BURNISH_CACHE`. Users may remove unused files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the cache's directory."""
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("BURNISH_CACHE") or Path(above, "burnish")).expanduser()
