"""What the documents say of the code, as far as it can be compared with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))),
]
FOLDERS = {"burnish", "tests", "bench", "examples", "constraints", "docs"}
PACKAGES = {path.parent.name for path in (ROOT / "burnish").glob("*/__init__.py")}
VERL = "from-verl.md"


def named_paths(text: str) -> set[str]:
    """Paths of this repository in code style; those of a package may lack `burnish/`."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    found = re.findall(r"(?<![\w/.-])(?:[\w-]+/)+(?:[\w.-]*\w)?", code)
    inside = {path for path in found if path.split("/")[0] in FOLDERS}
    inside |= {f"burnish/{p}" for p in found if p.split("/")[0] in PACKAGES and p.endswith(".py")}
    return {path for path in inside if "NAME" not in path}


def test_files_are_as_small_as_is_said() -> None:
    (most,) = re.findall(r"none over (\d+)", (ROOT / "CONTRIBUTING.md").read_text())
    files = (ROOT / "burnish").rglob("*.py")
    assert [path for path in files if path.read_text().count("\n") > int(most)] == []


def test_every_extra_is_described_once_and_those_that_errors_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = table_rows((ROOT / "README.md").read_text().partition("| extra |")[2])
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(name for name in described if name in extras) == sorted(extras)
    code = "".join(path.read_text() for path in (ROOT / "burnish").rglob("*.py"))
    named = re.findall(r"""\binstall\(["'](\w+)["']\)""", code)
    assert len(named) > 5
    assert set(named) <= set(extras)


def table_rows(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    if document.endswith(VERL):  # elsewhere than in the last column the paths are verl's
        text = "\n".join(row[-1] for row in table_rows(text))
    paths = named_paths(text)
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert document not in ("docs/architecture.md", f"docs/{VERL}") or len(paths) > 40


def test_every_part_of_verl_is_described_and_has_an_answer() -> None:
    rows = table_rows((ROOT / "docs" / VERL).read_text())
    assert [row for row in rows if len(row) not in (2, 3) or not all(row)] == []
    assert [row for row in rows if row[-1] in ("tested", "yes", "no")] == []
    assert len(rows) > 60


def test_the_step_in_the_readme_is_the_trainers_step() -> None:
    """Line by line and indented alike, in this order; a progress bar aside."""
    (block,) = re.findall(
        r"```python\n(for step in .*?)```", (ROOT / "README.md").read_text(), re.S
    )
    code = (ROOT / "burnish/train/rl.py").read_text()
    code = re.sub(r", run\.progress\.phase\(.*\) as bar:$", ":", code, flags=re.M)
    start = next(line for line in code.splitlines() if line.lstrip() == block.splitlines()[0])
    margin = start[: -len(start.lstrip())]
    left = iter(line.removeprefix(margin) for line in code[code.index(start) :].splitlines())
    missing = [line for line in block.splitlines() if line not in left]
    assert missing == []
