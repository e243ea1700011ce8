"""A method of one's own that declares a frozen model: no module of Burnish knows it, and every part of a run takes care of it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.nightly import by_day
from support.runs.training_files import FRESH, SFT, burnish, done, make_files, metrics
from support.services.hub import hub_variables, running_hub
from torch.nn.functional import log_softmax
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.config.schema import RunConfig
from burnish.errors import MissingError
from burnish.files.remote import Remote
from burnish.launch.elastic import planner_of
from burnish.method import Method
from burnish.methods.table import load_method
from burnish.plan.devices import parse_devices
from burnish.runs.download_inputs import local_inputs
from burnish.runs.hub_revisions import at_newest_steps, pin
from burnish.runs.model_card import model_card
from burnish.runs.preflight import require_inputs
from burnish.runs.summary import summary

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-method.md"
RUN = ("run", "anchored.py:Anchored", "sft.yaml")
ANCHOR = ["method.anchor=anchor"]
number = itertools.count()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = make_files(tmp_path_factory.mktemp("anchored"))
    found = re.search(r'^```python title="anchored.py"\n(.*?)^```', GUIDE.read_text(), re.M | re.S)
    assert found is not None
    (work / "anchored.py").write_text(found[1])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FRESH))
    for name in ("anchor", "foreign"):
        model.save_pretrained(work / name)
        save_char_tokenizer(work / name)
    file = work / "foreign/tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"0": 4', '"A": 4').replace('"A": 40', '"0": 40'))
    return work


@pytest.fixture
def method(work: Path, monkeypatch: pytest.MonkeyPatch) -> Method:
    monkeypatch.chdir(work)
    monkeypatch.setenv("BURNISH_CACHE", str(work / f"cache-{next(number)}"))
    return load_method("anchored.py:Anchored")


def config_of(method: Method, anchor: str) -> RunConfig:
    values = {**SFT, "method": {"anchor": anchor}, "tracking": {"progress": False}}
    return method.named(RunConfig.model_validate(values))


def test_it_is_copied_and_recorded_as_it_was_named(work: Path, method: Method) -> None:
    remote = Remote(f"memory://anchor {next(number)}")
    for path in (work / "anchor").iterdir():
        remote.put_file(f"model/{path.name}", path)
    config = config_of(method, f"{remote.url}/model")
    recorded, local = local_inputs(config, torch.device("cpu"), method=method)
    assert recorded == config
    copied = Path(local.method["anchor"])
    weights = "model.safetensors"
    assert (copied / weights).read_bytes() == (work / "anchor" / weights).read_bytes()
    assert [each.path for each in method.frozen(local)] == [str(copied)]
    _, small = local_inputs(config, torch.device("cpu"), method=method, only_small=True)
    assert small.method == config.method


def test_it_is_pinned_and_stays_where_it_was(work: Path, method: Method) -> None:
    files = {path.name: path.read_bytes() for path in (work / "anchor").iterdir()}
    with (
        running_hub({"models/me/anchor": files}) as hub,
        hub_variables(HF_ENDPOINT=hub.url, HF_HOME=str(work / "home"), HF_HUB_OFFLINE="0"),
    ):
        values = config_of(method, "me/anchor").model_dump()
        pin(values, None, method.frozen)
        assert values["method"]["anchor"] == f"me/anchor@{hub.commit('models/me/anchor')}"
        again = config_of(method, "me/anchor").model_dump()
        pin(again, values, method.frozen, ask=False)
        assert again == values


def test_a_run_stands_for_its_newest_step(work: Path, method: Method, tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-00000003"
    shutil.copytree(work / "anchor", step / "model")
    config = config_of(method, str(step))
    found = at_newest_steps(config.model_dump(), config.directory, method.frozen)
    assert found.method == {"anchor": f"{step}/model"}


@pytest.mark.parametrize("missing", ["nowhere", "tokenizer"])
def test_what_is_not_there_is_named_before_torch(method: Method, missing: str) -> None:
    """A directory without a model, and none."""
    require_inputs(config_of(method, "anchor"), method)
    with pytest.raises(MissingError, match=r"method\.anchor"):
        require_inputs(config_of(method, missing), method)


def test_its_memory_and_time_are_planned(method: Method) -> None:
    devices = parse_devices("1xH100-80G")
    config = config_of(method, "anchor")
    plan, refused = planner_of(config, method, devices).as_configured()
    assert refused is None
    assert plan is not None
    elements = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained("anchor").parameters())
    width = 4  # fp32; gathered on the only device, beside what it holds
    assert plan.phases["save"]["anchor"] == 2 * width * elements
    assert plan.seconds["log-probs"] > 0
    few = parse_devices("1xH100-80G", memory_gib=1e-6)
    planned, refused = planner_of(config, method, few).as_configured()
    assert planned is not None
    assert refused is not None


def test_summary_and_card_name_it(method: Method) -> None:
    config = config_of(method, "anchor")
    assert ["anchor", "anchor"] in [
        line.split() for line in summary(config, method, 1).splitlines()
    ]
    assert "| anchor | anchor |" in model_card(method, config)


@pytest.mark.parametrize(
    ("anchor", "kind"), by_day([("foreign", 4), ("anchor", 0)], [("foreign", 4)])
)
def test_a_dry_run_reads_it(work: Path, anchor: str, kind: int) -> None:
    code, output = burnish(work, *RUN, "name=dry", f"method.anchor={anchor}", "--dry-run")
    assert code == kind, output
    assert anchor in output
    assert "method.anchor" in output or not kind
    assert not (work / "runs/dry").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_loaded_and_computes(work: Path, world: int) -> None:
    """The first step's distance from it, against transformers."""
    run = done(
        work,
        *RUN,
        f"name=whole{world}",
        "steps=2",
        "data.shuffle=false",
        *ANCHOR,
        world=world,
    )
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()[:8]]
    ids = char_tokenizer().get_vocab()
    start = done(
        work,
        "sft",
        "sft.yaml",
        f"name=start{world}",
        "steps=1",
        "optim.lr=0",
        "checkpoint.model_dtype=fp32",
    )
    apart = []
    with torch.no_grad():
        for row in rows:
            before, after = row["prompt"], row["completion"]
            tokens = torch.tensor([*(ids[each] for each in before + after), FRESH["eos_token_id"]])
            said = [
                log_softmax(
                    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(
                        tokens[None]
                    ).logits[0, len(before) - 1 : -1],
                    dim=-1,
                ).gather(1, tokens[len(before) :, None])
                for path in (start / "checkpoints/step-00000001/model", work / "anchor")
            ]
            apart.append(said[0] - said[1])
    mean = float(torch.cat(apart).mean())
    assert metrics(run)[1]["train/apart"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.nightly
def test_a_damaged_step_is_refused(work: Path) -> None:
    run = done(work, "sft", "sft.yaml", "name=damaged", "steps=1")
    file = run / "checkpoints/step-00000001/model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, output = burnish(work, *RUN, "name=refused", "method.anchor=runs/damaged")
    assert code != 0, output
    assert "model.safetensors" in output
    assert not list((work / "runs/refused").glob("checkpoints/step-*"))
