"""The documents: their code runs as it stands, the files that they name exist, extras are described.

A page runs in a directory of its own, block by block, in order. A block with a title is a file. `sh` blocks are commands that have
to succeed. A Python block without a title is a script. YAML without a title is a piece of a configuration. `text` and `mermaid` blocks
are for the eye.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.models.tiny import tiny_model
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import burnish, ranks

from burnish.config.load import read_config

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
RUN = [
    page for page in PAGES if page == "README.md" or re.match(r"docs/(quickstart|guides/)", page)
]
FOLDERS = ("burnish", "tests", "bench", "examples", "constraints", "docs", "scripts")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables of a reader whose cache of the Hugging Face Hub has a tiny model, with a tokenizer and a chat template."""
    home = tmp_path_factory.mktemp("home")
    repository, commit = home / "hub" / "models--Qwen--Qwen3-0.6B", "1" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    path = repository / "snapshots" / commit
    torch.manual_seed(0)
    tokenizer = char_tokenizer()
    model = tiny_model(
        "qwen3",
        vocab_size=len(tokenizer),
        max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(path)
    save_char_tokenizer(path)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


BY_NIGHT = tuple(
    f"docs/guides/{name}.md"
    for name in (
        *("add-a-method", "agents", "asynchronous", "checkpoints", "clusters", "code-rewards"),
        *("data", "distillation", "environments", "evaluation", "extending", "from-trl"),
        *("generators", "lora", "megatron", "memory", "ppo", "preferences", "remote-files"),
        *("resharding", "reward-models", "tracking"),
    )
)
"""Pages whose blocks take long."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(each, marks=pytest.mark.nightly if each in BY_NIGHT else ()) for each in RUN],
)
def test_every_code_block_runs_as_it_stands(
    page: str, tmp_path: Path, environ: Mapping[str, str]
) -> None:
    place = tmp_path
    text = (ROOT / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == len(re.findall(r"^```\w", text, re.M))
    for language, title, code in blocks:
        if title:
            (place / title).parent.mkdir(parents=True, exist_ok=True)
            (place / title).write_text(code)
        if language == "bash":
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        elif language == "sh":
            for line in code.splitlines():
                _run(line, place, environ)
        elif language == "python" and not title:
            (place / "script.py").write_text(code)
            _call([sys.executable, "script.py"], place, environ)
        elif language == "yaml" and not title:
            (place / "piece.yaml").write_text(code)
            read_config(place / "piece.yaml")
        else:
            assert title or language in ("text", "mermaid"), language


def _run(line: str, place: Path, environ: Mapping[str, str]) -> None:
    """Run one command, in processes forked from one that has imported everything."""
    command = shlex.split(line.replace("$PWD", str(place)), comments=True)
    match command:
        case []:
            return
        case ["torchrun", "--nproc-per-node", count, "-m", "burnish", *arguments] | [
            "burnish",
            *arguments,
            "--processes",
            count,
        ]:
            started = ranks(place, arguments, int(count), environ=environ)
            assert [each.wait() for each in started] == [0] * len(started), started[0].output
        case ["burnish", *arguments]:
            code, output = burnish(place, *arguments, environ=environ)
            assert code == 0, f"{line}\n{output}"
        case _:
            _call(command, place, environ)


def _call(command: list[str], place: Path, environ: Mapping[str, str]) -> None:
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env = {**own, **environ}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_the_repository_that_is_named_exists(page: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()))
    paths = re.findall(r"(?<![\w/.-])(?:[\w-]+/)+(?:[\w.-]*\w)?", code)
    named = {path for path in paths if path.split("/")[0] in FOLDERS}
    generated = {"docs/reference/settings.md", "docs/reference/cli.md"}
    assert [path for path in sorted(named - generated) if not (ROOT / path).exists()] == []


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "docs/explanation/architecture.md").read_text().split()) <= 1500


def test_every_extra_is_named_in_the_readme_and_those_that_errors_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    (listed,) = re.findall(r'"\.\[([\w,]+)\]" adds extras', (ROOT / "README.md").read_text())
    assert set(listed.split(",")) == extras
    code = "".join(path.read_text() for path in (ROOT / "burnish").rglob("*.py"))
    named = re.findall(r"""\binstall\(["'](\w+)["']\)""", code)
    assert len(named) > 3
    assert set(named) - {"EXTRA"} <= extras  # as a placeholder in a list of packages


@pytest.mark.nightly
def test_the_recipes_are_what_the_planner_finds() -> None:
    command = [sys.executable, "scripts/recipes.py", "--check"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
