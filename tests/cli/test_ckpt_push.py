"""Steps whose models go to the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer, running_hub
from training_files import burnish, done, make_files


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


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (("me/sums",), {"HF_TOKEN": "hf_wrong"}, 2),
        (("me/sums",), {"HF_HUB_OFFLINE": "1"}, 2),
        (("me/sums",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1),
        (("sums",), {}, 2),
        (("me/sums@main",), {}, 2),
        (("me/sums", "--role", "critic"), {}, 5),
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
