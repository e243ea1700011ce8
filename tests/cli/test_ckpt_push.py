"""Steps whose models go to the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs.training_files import burnish, done, make_files
from support.services.hub import TOKEN, HubServer, running_hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = make_files(tmp_path_factory.mktemp("work"))
    return done(work, "sft", "sft.yaml", "steps=1", "evaluation.every=0")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running_hub({}) as server:
        yield server


def push(hub: HubServer, run: Path, *argv: str, **variables: str) -> tuple[int, str]:
    environ = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(run / "home"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return burnish(run.parent, "ckpt", "push", *argv, environ=environ | variables)


def test_a_model_arrives_whole_with_its_card(hub: HubServer, run: Path) -> None:
    code, output = push(hub, run, str(run), "me/sums", "--json")
    assert code == 0, output
    report = json.loads(output)
    model = Path(report["path"]) / "model"
    sent = hub.repositories["models/me/sums"]
    assert sent == {path.name: path.read_bytes() for path in model.iterdir()}
    assert hub.visible == {"models/me/sums": "private"}
    assert hub.messages[0].startswith("Step 1,")
    card = sent["README.md"].decode()
    assert card.startswith("---\n")
    assert "train.jsonl" in card
    assert str(run.parent) not in card

    code, output = push(hub, run, report["path"], "me/sums")  # once more
    assert code == 0, output
    code, output = push(hub, run, report["path"], "me/open", "--public")
    assert (code, hub.visible["models/me/open"]) == (0, "public"), output


@pytest.mark.nightly
def test_a_branch_gets_the_adapter_or_the_model_that_it_is_merged_into(
    hub: HubServer, run: Path
) -> None:
    step = run / "checkpoints/step-00000001/model"
    lora = ["model.fresh=null", f"model.path={step}", "model.tokenizer=null", "model.lora.rank=2"]
    argv = ["name=lora", "steps=1", "evaluation.every=0", *lora]
    tuned = done(run.parents[1], "sft", "sft.yaml", *argv)
    for branch, options in (("adapter", []), ("whole", ["--merged"])):
        code, output = push(hub, run, str(tuned), "me/sums", "--branch", branch, *options)
        assert code == 0, output
    assert hub.repositories["models/me/sums"] == {}
    adapter, whole = (hub.branches["models/me/sums", name] for name in ("adapter", "whole"))
    assert "adapter_model.safetensors" in adapter
    assert b"library_name: peft" in adapter["README.md"]
    assert "model.safetensors" in whole
    assert not [name for name in whole if name.startswith("adapter")]
    assert b"library_name: transformers" in whole["README.md"]
    assert [path.name for path in tuned.iterdir() if path.name.startswith(".push-")] == []


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (("me/sums",), {"HF_TOKEN": "hf_wrong"}, 2),
        (("me/sums",), {"HF_HUB_OFFLINE": "1"}, 2),
        (("me/sums",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1),
        (("sums",), {}, 2),
        (("me/sums@main",), {}, 2),
        (("me/sums", "--role", "critic"), {}, 5),
        (("me/sums", "--merged"), {}, 4),
        (("me/sums", "--base", "x"), {}, 2),
    ],
)
def test_what_cannot_be_sent_is_an_error(
    hub: HubServer, run: Path, argv: tuple[str, ...], variables: dict[str, str], expected: int
) -> None:
    code, output = push(hub, run, str(run), *argv, **variables)
    assert (code, "Traceback" in output) == (expected, False), output
    assert "models/me/sums" not in hub.repositories


def test_a_damaged_model_is_not_sent(hub: HubServer, run: Path) -> None:
    (file,) = run.glob("checkpoints/*/model/model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, output = push(hub, run, str(run), "me/sums")
    assert code == 3, output
    assert hub.repositories == {}
