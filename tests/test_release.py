"""A release: the wheel and the source distribution hold what a user needs, and run outside the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.models.tiny import save_tiny
from support.models.tokenizers import char_tokenizer, save_char_tokenizer

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DATA = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "burnish").rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
}


def call(*command: str | Path, cwd: Path) -> str:
    own = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(cwd), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, target: Path) -> Path:
    """A wheel of the source tree."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    call(*pip, "--no-index", "--wheel-dir", target, source, cwd=source)
    (found,) = target.glob("burnish-*.whl")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files that a build reads."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for name in ("burnish", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("wheel"))


@pytest.mark.nightly
def test_the_wheel_holds_the_package_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = message_from_bytes(archive.read(metadata))
    assert {"burnish/py.typed", "burnish/view/page/index.html"} < DATA
    assert not DATA - names
    assert not {name for name in names if not re.match(r"burnish(-[\d.]+\.dist-info)?/", name)}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert said["Name"] == "burnish"
    assert said["Description-Content-Type"] == "text/markdown"
    readme = said.get_payload(decode=True)
    assert isinstance(readme, bytes)
    assert readme.decode().strip() == (ROOT / "README.md").read_text().strip()
    urls = dict(each.split(", ", 1) for each in said.get_all("Project-URL", []))
    assert urls == PROJECT["urls"]
    assert said.get_all("Classifier") == PROJECT["classifiers"]


@pytest.mark.nightly
def test_the_source_distribution_makes_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call(sys.executable, "-c", backend, tmp_path, cwd=source)
    (packed,) = tmp_path.glob("burnish-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / packed.name.removesuffix(".tar.gz")
    examples = {path.relative_to(source) for path in source.glob("examples/*/*")}
    assert not {path for path in examples if not (unpacked / path).is_file()}
    again = built(unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())


@pytest.mark.nightly
def test_the_installed_command_prepares_a_run(wheel: Path, tmp_path: Path) -> None:
    """In a clean environment, which sees the dependencies of this one but not its Burnish."""
    env, here = tmp_path / "env", tmp_path / "here"
    here.mkdir()
    call(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    python = env / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    call(*pip, "--no-deps", "--no-index", wheel, cwd=here)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    )
    where = call(python, "-c", "import burnish; print(burnish.__file__)", cwd=here)
    assert Path(where.strip()).is_relative_to(site)
    burnish = env / "bin" / "burnish"
    assert wheel.name.split("-")[1] in call(burnish, "--version", cwd=here)
    save_tiny(here / "model", vocab_size=len(char_tokenizer()), max_position_embeddings=1024)
    save_char_tokenizer(here / "model")
    call(burnish, "init", "rl", "model", cwd=here)
    call(burnish, "rl", "rl.yaml", "--dry-run", "--devices", "1xCPU-8G", cwd=here)


def test_the_readme_stands_alone() -> None:
    """A package index shows it without the repository: links are absolute, and lead to what there is."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (\S+)$", text, re.M)
    assert links
    home = PROJECT["urls"]["Repository"]
    for link in ("".join(pair) for pair in links):
        if path := re.match(rf"{re.escape(home)}/(?:blob|tree|raw)/main/(.+)", link):
            assert (ROOT / path[1]).exists(), link
        assert link.startswith("https://"), link
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.M)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    used = re.findall(r"\[([^\]`]+)\](?![:(])", prose)
    assert {name.lower() for name in used} == set(defined)


def test_the_job_script_is_that_of_the_guide() -> None:
    script = ROOT / "examples" / "slurm" / "job.sh"
    guide = (ROOT / "docs" / "guides" / "clusters.md").read_text()
    shown = re.search(r'```bash title="job\.sh"\n(.*?)```', guide, re.S)
    assert shown is not None
    assert shown[1] == script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


def test_the_image_is_made_of_files_that_are_sent_to_the_builder() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} == {line for line in sent if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    (torch,) = (line.removeprefix("ARG TORCH=") for line in lines if line.startswith("ARG TORCH="))
    assert torch in (ROOT / "Makefile").read_text()


def test_nightly_tests_the_oldest_versions_that_may_be_installed() -> None:
    lines = (ROOT / "constraints/oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    own, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    assert {canonicalize_name(Requirement(each).name) for each in own} <= tested.keys()
    for needed in map(Requirement, [*own, *(each for extra in extras.values() for each in extra)]):
        oldest = [Version(each.version) for each in needed.specifier if each.operator == ">="]
        pinned = tested.get(canonicalize_name(needed.name))
        assert not (oldest and pinned) or [Version(pinned)] == oldest, needed
