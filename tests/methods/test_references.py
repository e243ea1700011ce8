"""The reference's log-probs are computed once, kept by content, and read by the next run."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import xxhash
from support.models.tiny import save_base
from support.models.tokenizers import save_char_tokenizer
from support.runs.preferences import PAIRS, begin_pairs, load_model, near
from support.runs.same_runs import assert_same
from support.runs.training_files import At, burnish, done, metrics, ranks, write_rows

pytestmark = pytest.mark.nightly
RUN = ("dpo", "dpo.yaml", "steps=2")
HEAD = 32
"""Bytes of a file's own digest."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("references")
    begin_pairs(work, "dpo.yaml")
    return work


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / "references").iterdir()}


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in metrics(run) if "train/loss" in row]


def test_the_next_run_of_the_same_model_and_rows_computes_none(work: Path, tmp_path: Path) -> None:
    cache = {"BURNISH_CACHE": str(tmp_path)}
    first = done(work, *RUN, "name=first", environ=cache)
    kept = files(tmp_path)
    assert len(kept) == 1
    again = done(work, *RUN, "name=again", "method.beta=0.1", "optim.lr=0.001", environ=cache)
    assert files(tmp_path) == kept
    assert losses(again)[0] == pytest.approx(np.log(2), rel=1e-6)
    # It reads them: with other numbers, the loss is another one.
    ((name, content),) = kept.items()
    count = int.from_bytes(content[HEAD : HEAD + 8], "little")
    start = HEAD + 8 + 8 * count
    moved = np.frombuffer(content[start:], np.float32) * np.float32(1.5)
    body = content[HEAD:start] + moved.tobytes()
    (tmp_path / "references" / name).write_bytes(xxhash.xxh3_128_hexdigest(body).encode() + body)
    other = done(work, *RUN, "name=moved", environ=cache)
    assert losses(other)[0] != pytest.approx(np.log(2), rel=1e-3)
    # A damaged file is computed again.
    (tmp_path / "references" / name).write_bytes(content[:-1] + b"x")
    mended = done(work, *RUN, "name=mended", environ=cache)
    assert files(tmp_path) == kept
    near(load_model(mended, 2), load_model(first, 2), 0.0)


def test_other_weights_rows_or_precision_have_files_of_their_own(
    work: Path, tmp_path: Path
) -> None:
    cache = {"BURNISH_CACHE": str(tmp_path)}
    done(work, *RUN, "name=own", environ=cache)
    save_base(work / "third", 3)
    write_rows(work / "fewer.jsonl", PAIRS[:-1])
    changes = [
        ["model.path=third"],
        ["method.reference=third"],
        ["data.train=[fewer.jsonl]"],
        ["engine.precision=bf16"],
        ["method.loss={kto: 1}"],
    ]
    for number, change in enumerate(changes):
        before = files(tmp_path).keys()
        done(work, *RUN, f"name=own{number}", *change, environ=cache)
        # The model of `third` with these rows is one content, whether it is trained or only the reference.
        assert len(files(tmp_path).keys() - before) == (0 if number == 1 else 1), change


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_computes_the_rest_and_goes_on_to_the_bit(
    work: Path, tmp_path: Path, world: int
) -> None:
    write_rows(work / "many.jsonl", [*PAIRS * 64, *PAIRS[:5], *PAIRS[5:] * 5])
    argv = [
        *RUN,
        "data.train=[many.jsonl]",
        "batch.tokens_per_device=512",
        "checkpoint.save_every=1",
    ]
    whole = done(
        work,
        *argv,
        f"name=whole{world}",
        world=world,
        environ={"BURNISH_CACHE": str(tmp_path / "a")},
    )
    assert len(files(tmp_path / "a")) == 2
    cache = {"BURNISH_CACHE": str(tmp_path / "b")}
    name = f"name=killed{world}"
    for place, nth in (
        ("burnish.methods.parts.references:write_kept", 2),
        ("burnish.methods.parts.offline_training:make_batch", 2),
    ):
        at = At(place, nth, signal.SIGKILL)
        commands = ranks(work, [*argv, name], world, at=at, environ=cache)
        assert all(command.wait() != 0 for command in commands)
        assert len(files(tmp_path / "b")) == (1 if "write" in place else 2)
    assert_same(done(work, *argv, name, world=world, environ=cache), whole)
    near(load_model(work / f"runs/killed{world}", 2), load_model(whole, 2), 0.0)


def test_an_adapter_that_is_continued_is_part_of_its_reference(work: Path) -> None:
    begun = done(work, *RUN, "name=begun", "model.lora.rank=4")
    path = begun / "checkpoints/step-00000002/model"
    run = done(work, *RUN, "name=continued", f"model.lora.path={path}")
    assert losses(run)[0] == pytest.approx(np.log(2), rel=1e-6)


def test_another_vocabulary_is_refused(work: Path) -> None:
    save_base(work / "foreign", 4)
    file = work / "foreign/tokenizer.json"
    save_char_tokenizer(file.parent)
    text = file.read_text()
    file.write_text(text.replace('"0": 4', '"A": 4').replace('"A": 40', '"0": 40'))
    code, output = burnish(work, *RUN, "name=refused", "method.reference=foreign", "--dry-run")
    assert code == 4, output
    assert "foreign" in output.partition("error: ")[2]
    assert "Traceback" not in output
    assert not (work / "runs/refused").exists()
