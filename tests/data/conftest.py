import json
from pathlib import Path

import datasets
import pytest

from burnish.data.sources import load_rows


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The Arrow files of a test lie in its own directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows_of(tmp_path):
    """Writes rows as JSON Lines and reads them back."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_rows([str(path)])

    return write


@pytest.fixture
def write(tmp_path):
    """Writes a text file and returns its path."""

    def make(name: str, text: str) -> str:
        path = Path(tmp_path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return make
