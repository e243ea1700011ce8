"""What one may name in place of a built-in engine, generator and tracker: it runs, it resumes, or it is refused before a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import make_examples, train, train_by_hand
from contracts.generator import GeneratorContract
from support.models.engines import CPU, make_engine
from support.models.tiny import VOCAB, save_tiny
from support.ranks.fork_server import TESTS, with_given_path
from support.ranks.processes import run_ranks
from support.runs.training_files import At, burnish, done, make_files, metrics, outcome, ranks
from support.services import shelf
from transformers import AutoModelForCausalLM, PreTrainedModel

from burnish.boxes.shards import Publication
from burnish.config.load import read_config
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.extend import (
    ADVANTAGES,
    DESTINATIONS,
    ENGINES,
    GENERATORS,
    POLICY_LOSSES,
    REWARDS,
    SOURCES,
    TRACKERS,
    Table,
    _lacking,
)
from burnish.extend import METHODS as METHODS_OF_OTHERS
from burnish.functions import Registry, load_function
from burnish.methods.table import METHODS
from burnish.models.names import model_shards
from burnish.rollout.base import Generator

SHELF = Path(str(shelf.__file__))
PACKAGE = TESTS / "support" / "example_package"
TABLES: list[Table[Any]] = [ENGINES, GENERATORS, TRACKERS, SOURCES, DESTINATIONS]
MINE = '''
"""Extensions of one's own."""
import json

from burnish.engines.torch.torch_engine import TorchEngine
from burnish.rollout.base import Generator
from burnish.rollout.builtin.generator import BuiltinGenerator


class Noting(TorchEngine):
    """An engine that inherits from a built-in one."""

    def optim_step(self, lr):
        with open("engine.txt", "a") as file:
            file.write(f"{lr}\\n")
        return super().optim_step(lr)


class Around(Generator):
    """A generator that holds a built-in one."""

    def __init__(self, hf_config, **options):
        self.inner = BuiltinGenerator(hf_config, **options)

    def generate(self, requests, sampling, watch=None):
        with open("generator.txt", "a") as file:
            file.write(f"{len(requests)}\\n")
        return self.inner.generate(requests, sampling, watch)

    def load_weights(self, weights, version):
        self.inner.load_weights(weights, version)

    def so_far(self):
        return self.inner.so_far()

    def checksums(self):
        return self.inner.checksums()


class Lines:
    """A tracker that inherits from nothing."""

    def __init__(self, directory):
        self.file = open(directory / "lines.jsonl", "a")

    def log(self, step, values):
        self.file.write(json.dumps([step, values.get("reward/mean")]) + "\\n")

    def sync(self):
        self.file.flush()

    def close(self):
        self.file.close()


class Untrained(Generator):
    """Without load_weights."""

    def generate(self, requests, sampling, watch=None):
        return []


class Deaf:
    """Without most of an engine's methods."""

    def forward(self, batch, *, adapter=True, experts=False):
        return []


class Narrow(TorchEngine):
    """Takes no layout."""

    def __init__(self, hf_config, config, optim, *, device):
        pass


class Wrong(TorchEngine):
    """Steps twice as far."""

    def optim_step(self, lr):
        return super().optim_step(2 * lr)


class Failing(TorchEngine):
    """Has a mistake."""

    def forward_backward(self, batch, loss):
        return {}["loss"]


class Unlayered(TorchEngine):
    """Makes nothing."""

    def __init__(self, *given, **more):
        pass


class Rankless(Around):
    """Knows no adapter."""

    def __init__(self, hf_config, *, layout, device, dtype, slots, eos_token_ids, decode, max_length):
        pass


NUMBER = 4
'''
SHORT = ["steps=3", "data.validation=[]", "evaluation.every=0"]
OWN = [
    "engine.kind=mine.py:Noting",
    "rollout.engine=mine.py:Around",
    "tracking.trackers=[mine.py:Lines]",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return make_files(tmp_path)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.protocol)
def test_every_built_in_is_there_and_does_what_its_protocol_says(table: Table[Any]) -> None:
    protocol: Any = load_function(table.protocol, "")
    for name, target in table.builtins.items():
        found = load_function(target, name)
        lacking = [*_lacking(found, protocol, ())]
        assert lacking == [] or name == "openai"  # which has no model


@pytest.mark.parametrize("functions", [ADVANTAGES, POLICY_LOSSES, REWARDS])
def test_every_built_in_function_is_there(functions: Registry) -> None:
    for name, target in functions.items():
        assert callable(load_function(str(target), name))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages: pip has installed one that extends Burnish."""
    source, folder = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(folder), str(source)]
    subprocess.run(pip, check=True)
    return folder


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(packages)
    return packages


def test_installed_packages_join_the_table(installed: Path) -> None:
    for table, name, kind in (
        (METHODS_OF_OTHERS, "prudent", "Prudent"),
        (ENGINES, "noting", "NotingEngine"),
        (GENERATORS, "around", "GeneratorAround"),
        (TRACKERS, "lines", "Lines"),
        (SOURCES, "shelf", "Shelf"),
        (DESTINATIONS, "shelf", "Shelf"),
    ):
        found: Any = table.load(name, "setting")
        assert (found.__module__, found.__name__) == ("burnish_example", kind)
    with pytest.raises(UsageError) as caught:
        TRACKERS.load("half", "tracking.trackers")
    assert "log" in str(caught.value.have)
    with pytest.raises(UsageError) as caught:
        TRACKERS.load("linse", "tracking.trackers")
    assert "lines" in str(caught.value.want)
    assert "lines" in str(caught.value.do)


def test_a_name_of_two_packages_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[burnish.trackers]\nlines = other:Lines\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        TRACKERS.target("lines", "tracking.trackers")
    assert "other" in str(caught.value.have)
    assert "burnish-example" in str(caught.value.have)


def of_package(name: str) -> str:
    return f"{PACKAGE / 'burnish_example.py'}:{name}"


@pytest.mark.nightly
class TestContractOfAGenerator(GeneratorContract):
    """A generator of one's own holds the contract of the built-in ones."""

    @pytest.fixture(autouse=True)
    def _notes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def make(
        self, model: PreTrainedModel, *, slots: int = 4, eos: Sequence[int] = (), version: int = 1
    ) -> Generator:
        generator = GENERATORS.load(of_package("GeneratorAround"), "rollout.engine")(
            model.config,
            layout=Layout(),
            device=CPU,
            dtype=torch.float32,
            slots=slots,
            eos_token_ids=eos,
            decode=str,
            max_length=1 << 20,
        )
        generator.load_weights(Publication(model_shards(model)), version)
        return generator


def test_an_engine_of_ones_own_holds_the_contract(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(oracle, make_examples(VOCAB))
    [found] = run_ranks(train_own, 1, path)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


def train_own(layout: Layout, path: Path) -> dict[str, Any]:
    os.chdir(path)  # of this process, for its notes
    engine = make_engine(layout, path, kind=of_package("NotingEngine"))
    assert type(engine).__name__ == "NotingEngine"
    return train(engine, make_examples(VOCAB), 2)


@pytest.mark.nightly
def test_runs_with_an_installed_package(root: Path, packages: Path) -> None:
    """Its method, generator, tracker and source train, after a dry run; without the package they are refused."""
    environ = {"PYTHONPATH": with_given_path(packages, TESTS.parent)}
    (root / "shelves" / "box").mkdir(parents=True)
    (root / "train.jsonl").rename(root / "shelves" / "box" / "train.jsonl")
    names = ["rollout.engine=around", "tracking.trackers=[lines]"]
    argv = ["rl", "rl.yaml", *SHORT, *names, "data.train=shelf://box/train.jsonl"]
    code, said = burnish(root, *argv)
    assert code == 2, said
    assert "around" in said
    assert burnish(root, *argv, "--dry-run", environ=environ)[0] == 0
    run = done(root, *argv, environ=environ)
    assert [json.loads(line)[0] for line in (run / "lines.jsonl").read_text().splitlines()] == [
        *(1, 2, 3)
    ]
    assert "generate" in (root / "notes.txt").read_text()
    tuned = ["run", "prudent", "sft.yaml", *SHORT, "data.train=shelf://box/train.jsonl"]
    run = done(root, *tuned, "engine.kind=noting", "name=tuned", environ=environ)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert {"loss", "step"} < set((root / "notes.txt").read_text().split())


def test_built_in_names_and_ones_own_files_ask_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    for table in TABLES:
        for name in table.builtins:
            assert table.target(name, "setting") == table.builtins[name]
        assert table.target("mine.py:Class", "setting") == "mine.py:Class"


@pytest.mark.parametrize(
    ("table", "name", "asked", "have"),
    [
        (ENGINES, "mine.py:Deaf", (), "forward_backward"),
        (ENGINES, "mine.py:Narrow", (), "layout"),
        (ENGINES, "mine.py:NUMBER", (), "int"),
        (ENGINES, "mine.py:Nothing", (), "Nothing"),
        (ENGINES, "nobodys.py:Engine", (), "nobodys"),
        (ENGINES, "torhc", (), "torhc"),
        (GENERATORS, "mine.py:Untrained", (), "load_weights"),
        (GENERATORS, "mine.py:Rankless", ("lora",), "lora"),
        (GENERATORS, "mine.py:Lines", (), "generate"),
        (TRACKERS, "mine.py:Deaf", (), "log"),
        (TRACKERS, "json:loads", (), "function"),
    ],
)
def test_what_cannot_be_one_is_refused(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: Table[Any],
    name: str,
    asked: tuple[str, ...],
    have: str,
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(UsageError) as caught:
        table.load(name, "a.setting", asked)
    error = caught.value
    assert error.problem.startswith("a.setting")
    assert have in f"{error.problem} {error.have}"
    assert error.want
    assert error.do


def test_a_file_runs_once_until_it_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    first = ENGINES.load("mine.py:Noting", "engine.kind")
    assert ENGINES.load("mine.py:Noting", "engine.kind") is first
    (root / "mine.py").write_text(f"{MINE}\n# changed")
    assert ENGINES.load("mine.py:Noting", "engine.kind") is not first


def test_what_is_not_known_of_an_engine_is_not_refused(root: Path) -> None:
    """Every setting that one of the built-in engines lacks is left to an engine of one's own."""
    own = ["engine.kind=mine.py:Noting", "rollout.engine=mine.py:Around"]
    settings = ["engine.pipeline_parallel=2", "optim.kind=muon", "rollout.tensor_parallel=2"]
    config = read_config(root / "rl.yaml", [*own, *settings])
    METHODS["rl"].check(config, None)
    for kind in ("torch", "megatron"):
        with pytest.raises(UsageError):
            METHODS["rl"].check(
                read_config(root / "rl.yaml", [f"engine.kind={kind}", *settings]), None
            )


@pytest.mark.nightly
def test_a_run_with_ones_own_is_the_run_without(root: Path) -> None:
    """Engine, generator and tracker of a file: a dry run, a run, and one that is killed and resumed."""
    plain = done(root, "rl", "rl.yaml", *SHORT, "name=plain")
    own = ["rl", "rl.yaml", *SHORT, *OWN]
    assert burnish(root, *own, "--dry-run")[0] == 0
    assert not (root / "runs" / "run").exists()
    killed = At("burnish.runs.run:Run.finish", 3, 9)
    code, said = burnish(root, *own, "checkpoint.save_every=1", at=killed)
    assert code == -9, said
    assert len((root / "engine.txt").read_text().split()) == 1 + 3  # one of the proof
    resumed = done(root, *own, "checkpoint.save_every=1")
    assert len((root / "engine.txt").read_text().split()) == 1 + 3 + 1
    assert (root / "generator.txt").exists()
    steps = [json.loads(line)[0] for line in (resumed / "lines.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert {**outcome(resumed), "state": None} == {**outcome(plain), "state": None}


@pytest.mark.nightly
def test_ones_own_on_two_ranks_in_processes_beside_them(root: Path) -> None:
    """Also with the built-in engine before, whose checkpoint any other resumes."""
    place = ["rollout.place=child", "checkpoint.save_every=3"]
    plain = done(root, "rl", "rl.yaml", *place, "name=plain", world=2)
    commands = ranks(
        root, ["rl", "rl.yaml", *place, "name=own"], 2, At("burnish.runs.run:Run.finish", 4, 9)
    )
    assert commands[0].wait() == -9
    commands[1].wait()
    own = done(root, "rl", "rl.yaml", *place, *OWN, "name=own", world=2)
    assert outcome(own) == outcome(plain)
    assert (root / "generator.txt").exists()


def test_a_run_reads_from_ones_own_source_and_comes_back_from_ones_own_mirror(root: Path) -> None:
    """Data and tokenizer from one's own service; the run's disk is lost between two commands."""
    shutil.copy(SHELF, root)
    box = root / "shelves" / "box"
    box.mkdir(parents=True)
    (root / "train.jsonl").rename(box / "train.jsonl")
    (root / "tokenizer").rename(box / "tokenizer")
    url = "shelf.py:Shelf://box"
    argv = ["sft", "sft.yaml", *SHORT, f"model.tokenizer={url}/tokenizer"]
    argv += [f"data.train={url}/train.jsonl", "checkpoint.mirror=shelf.py:Shelf://mirrors/of-runs"]
    assert burnish(root, *argv, "--dry-run")[0] == 0
    done(root, *argv, "steps=2")
    shutil.rmtree(root / "runs")
    resumed = done(root, *argv)
    assert [row["step"] for row in metrics(resumed)] == [1, 2, 3]
    copied = root / "shelves" / "mirrors" / "of-runs" / "run" / "checkpoints"
    assert (copied / "step-00000003" / "COMMIT").exists()
    code, said = burnish(root, *argv, "name=other", "checkpoint.mirror=shelf.py:Catalogue://box/b")
    assert code == 2, said
    assert "write" in said


@pytest.mark.parametrize(
    "setting",
    [
        "checkpoint.mirror=shelf.py:Nothing://place",
        "engine.kind=torhc",
        "engine.kind=mine.py:Deaf",
        "rollout.engine=mine.py:Untrained",
        "tracking.trackers=[mine.py:Deaf]",
        "tracking.trackers=[tensorbord]",
    ],
)
def test_a_run_that_names_none_writes_nothing(root: Path, setting: str) -> None:
    code, said = burnish(root, "rl", "rl.yaml", setting)
    assert code == 2, said
    assert setting.partition("=")[2].strip("[]") in said
    assert "Traceback" not in said
    assert not (root / "runs" / "run" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["Wrong", pytest.param("Failing", marks=pytest.mark.nightly)])
def test_an_engine_that_computes_something_else_is_refused(root: Path, name: str) -> None:
    code, said = burnish(root, "sft", "sft.yaml", f"engine.kind=mine.py:{name}")
    assert code == 4, said
    assert f"mine.py:{name}" in said
    assert "Traceback" not in said
    assert not [*(root / "runs" / "run" / "checkpoints").glob("step-*")]


def test_an_engine_without_its_attributes_is_refused_with_their_names(root: Path) -> None:
    code, said = burnish(root, "rl", "rl.yaml", "engine.kind=mine.py:Unlayered")
    assert code == 2, said
    assert "layout" in said
    assert "Traceback" not in said
