"""What is refused of a sound step for a certain run (section 4 of the checkpoint format), through the real command.

Each row changes a copy of a run, its model and its data, and goes on with it. That the model is
untouched is shown by a probe: a process in which the engine is asked to load anything kills itself.
What is wrong with a step for everybody is in `tests/checkpoint/test_refusals.py`. What is refused of
adapters is in `test_lora.py`.
"""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.faults.bit_flips import flip, reseal
from support.nightly import by_day
from support.runs.training_files import At, burnish, done, make_files
from transformers import AutoConfig, AutoModelForCausalLM

RUN = ["sft", "sft.yaml", "model.fresh=null", "model.tokenizer=null", "model.path=base", "evaluation.every=0", "name=run"]  # fmt: skip
STEP = "runs/run/checkpoints/step-00000002"
PROBE = At("burnish.checkpoint.load:CheckpointSource.fill", 1, signal.SIGKILL)
SETS = ("model/model", "training/residual", "training/exp_avg", "training/exp_avg_sq")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run of two steps, and the model that it began from."""
    root = make_files(tmp_path_factory.mktemp("sound"))
    fresh = done(root, "sft", "sft.yaml", "name=fresh", "steps=1", "evaluation.every=0")
    shutil.copytree(fresh / "checkpoints/step-00000001/model", root / "base")
    shutil.rmtree(fresh)
    done(root, *RUN, "steps=2", "tracking.report=false")
    return root


@pytest.fixture
def work(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "work"))


def another_model(**changes: object) -> Callable[[Path], None]:
    """Another model where the run's was."""

    def change(work: Path) -> None:
        config = AutoConfig.from_pretrained(work / "base", **changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(work / "base")

    return change


def without(*sets: str) -> Callable[[Path], None]:
    """A step without some sets of tensors, sealed as if it had never had them."""

    def change(work: Path) -> None:
        for name in sets:
            (work / STEP / f"{name}.safetensors").unlink()
        reseal(work / STEP)

    return change


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A step with other tensors in all sets, sealed."""

    def forge(work: Path) -> None:
        for name in SETS:
            path = work / STEP / f"{name}.safetensors"
            held = load_file(path)
            change(held)
            save_file(held, path)
        reseal(work / STEP)

    return forge


def swapped_ids(work: Path) -> None:
    path = work / "base/tokenizer.json"
    table = json.loads(path.read_text())
    vocabulary = table["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isdigit()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(table))


def data(change: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    def write(work: Path) -> None:
        path = work / "train.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


REFUSED: dict[str, tuple[Callable[[Path], object], int, list[str]]] = {
    "another vocabulary": (another_model(vocab_size=128), 4, ["embed_tokens.weight", "[100, 32]", "[128, 32]"]),
    "another hidden size": (another_model(hidden_size=48), 4, ["model.layers.0.input_layernorm.weight", "float32 [32]", "float32 [48]", "and 8 more"]),
    "an output layer that is not tied": (another_model(tie_word_embeddings=False), 5, ["lm_head.weight  -  "]),
    "a layer more": (another_model(num_hidden_layers=3, layer_types=["full_attention"] * 3), 5, ["model.layers.2.", "-  "]),
    "a layer less": (another_model(num_hidden_layers=1, layer_types=["full_attention"]), 4, ["model.layers.1.", "]  -\n"]),
    "weights in bf16 alone": (without("training/residual"), 4, ["bfloat16 [", "float32 ["]),
    "no optimizer state": (without(*SETS[2:]), 5, ["no optimizer state exp_avg, exp_avg_sq", "checkpoint.fresh_optimizer=true"]),
    "half of the optimizer state": (without(SETS[3]), 5, ["no optimizer state exp_avg_sq"]),
    "a tensor more": (tensors(lambda held: held.update(stale=held["model.norm.weight"].clone())), 4, ["stale", "float32 [32]  -\n"]),
    "a tensor less": (tensors(lambda held: held.pop("model.norm.weight")), 5, ["model.norm.weight  -"]),
    "other ids for the tokens": (swapped_ids, 4, ["trained with another vocabulary", "model.tokenizer"]),
    "more data": (data(lambda rows: rows.append(rows[0])), 4, ["trained on other data", "30 samples", "31 samples"]),
}  # fmt: skip
"""By name: the change, the exit code, and what is said."""
BY_DAY = (
    "another hidden size",
    "no optimizer state",
    "a tensor more",
    "other ids for the tokens",
    "more data",
)


@pytest.mark.parametrize("name", by_day(REFUSED, BY_DAY))
@pytest.mark.nightly
def test_a_step_that_does_not_fit_the_run(work, name):
    change, code, words = REFUSED[name]
    change(work)
    ended, output = burnish(work, *RUN, "steps=3", at=PROBE)
    said = output.partition("error: ")[2]
    assert ended == code, output
    assert all(word in said for word in words), output
    assert "do: " in said
    assert "Traceback" not in output
    assert (work / STEP / "COMMIT").is_file()  # it is sound, and stays


def test_optimizer_state_that_is_absent_is_begun_anew_when_asked_for(work):
    without(*SETS[2:])(work)
    argv = [*RUN, "checkpoint.fresh_optimizer=true"]
    code, output = burnish(work, *argv, "steps=3")
    assert code == 0, output
    assert "no optimizer state: a fresh one begins" in output
    state = json.loads((work / "runs/run/checkpoints/step-00000003/state.json").read_text())
    assert (state["step"], state["optimizer_steps"]) == (3, 1)
    done(work, *argv, "steps=4")  # once there is some, it is used
    state = json.loads((work / "runs/run/checkpoints/step-00000004/state.json").read_text())
    assert state["optimizer_steps"] == 2


def test_a_refusal_with_half_of_the_optimizer_state_is_no_matter_of_asking(work):
    without(SETS[3])(work)
    code, output = burnish(work, *RUN, "checkpoint.fresh_optimizer=true", "steps=3", at=PROBE)
    assert code == 5, output


TOLD = {
    "nothing": (lambda work: None, ""),
    "a column that is not used": (data(lambda rows: [row.update(note="x") for row in rows]), ""),
    "an answer": (data(lambda rows: rows[0].update(completion="7")), "the content of data.train"),
    "the chat template": (lambda work: (work / "base/chat_template.jinja").write_text("{{ messages }}"), "chat template"),
}  # fmt: skip
"""What may change: and what is said of it, if anything."""


@pytest.mark.parametrize("name", by_day(TOLD, ("nothing", "an answer")))
def test_a_step_that_still_fits(work, name):
    change, words = TOLD[name]
    change(work)
    code, output = burnish(work, *RUN, "steps=3")
    assert code == 0, output
    assert ("changed since" in output) == bool(words), output
    assert words in output


def test_a_run_whose_model_and_data_moved_goes_on(work):
    """Content is compared, not paths."""
    (work / "base").rename(work / "elsewhere")
    (work / "train.jsonl").rename(work / "rows.jsonl")
    moved = [*RUN, "model.path=elsewhere", "data.train=[rows.jsonl]"]
    code, output = burnish(work, *moved, "steps=3")
    assert code == 0, output
    assert "changed since" not in output
    file = work / "elsewhere/model.safetensors"
    flip(file)
    code, output = burnish(work, *moved, "steps=4")
    assert code == 0, output
    assert "the model at model.path" in output


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("pytorch_model.bin", 5, "safetensors"), ("model.safetensors", 3, "model.safetensors")],
)
def test_a_model_that_would_have_to_be_unpickled(work, name, code, words):
    (work / "base/model.safetensors").unlink()
    (work / "base" / name).write_bytes(pickle.dumps({"model.norm.weight": [1.0] * 32}))
    ended, output = burnish(work, *RUN[:-1], "name=pickled", "steps=3", at=PROBE)
    assert ended == code, output
    assert words in output.partition("error: ")[2]


def test_a_model_out_of_a_damaged_step(work):
    file = work / STEP / "model/model.safetensors"
    flip(file)
    argv = [*RUN[:4], f"model.path={STEP}/model", "name=next", "steps=1"]
    code, output = burnish(work, *argv, at=PROBE)
    assert code == 3, output
    assert "model/model.safetensors" in output
    assert "_proj.weight" in output
