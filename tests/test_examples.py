from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.models.chat_templates import HYBRID, tokenizer_of
from torch.distributed.run import get_args_parser
from transformers import AutoTokenizer

from burnish.config.load import read_config
from burnish.data.sources import load_rows
from burnish.data.tasks import PromptDataset
from burnish.extend import REWARDS
from burnish.functions import load_function
from burnish.methods.table import METHODS

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name} {path.stem}"
)
def test_every_configuration_is_sound(path: Path) -> None:
    METHODS["rl" if path.stem.endswith("rl") else "sft"].check(read_config(path))


def test_the_hubs_questions_are_asked_with_the_chat_template(tmp_path: Path) -> None:
    """GSM8K's columns on the hub; the answer is scored by the first reward."""
    config = read_config(EXAMPLES / "gsm8k" / "rl.yaml")
    row = {"question": "1+1?", "answer": "It is 1+1. #### 2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = tokenizer_of(HYBRID)
    prompt = PromptDataset(load_rows([str(tmp_path / "train.jsonl")]), tokenizer, config.data)[0]
    system, user = prompt.messages or []
    assert "\\boxed{}" in system["content"]
    assert user == {"role": "user", "content": "1+1?"}
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    score = load_function(config.reward.functions[0].function, "reward.functions", REWARDS)
    assert [score(said, prompt.answer) for said in ("\\boxed{2}", "\\boxed{3}")] == [1.0, 0.0]


def test_the_reward_of_ones_own() -> None:
    boxed = load_function(f"{EXAMPLES}/gsm8k/rewards.py:boxed", "reward.functions")
    said = ["\\boxed{3}", [{"role": "assistant", "content": "3"}]]
    assert boxed(completions=said, answer=["3", "3"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "missed"),
    [(0.4, 0.95, ""), (0.41, 1.0, "41.0%"), (0.1, 0.94, "94.0%"), (float("nan"), 1.0, "nan%")],
)
def test_the_demo_fails_when_it_shows_nothing(before: float, after: float, missed: str) -> None:
    said = runpy.run_path(str(EXAMPLES / "demo" / "demo.py"))["unkept"](before, after)
    assert missed in said
    assert bool(said) == bool(missed)


def test_the_demo_holds_its_questions_out(tmp_path: Path) -> None:
    questions = runpy.run_path(str(EXAMPLES / "demo" / "demo.py"))["QUESTIONS"]
    task = runpy.run_path(str(EXAMPLES / "demo" / "task.py"))
    task["write_tokenizer"](tmp_path / "tokenizer")
    task["write_data"](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation")
    )
    choices, others = ({digits(row) for row in rows} for rows in (train, held_out))
    assert len(choices) == 180
    assert len(held_out) == 30 * 24
    assert not choices & others
    assert set(questions) <= {row["prompt"] for row in held_out}
    for row in (*train, *held_out):
        assert row["answer"] == row["completion"] == digits(row)
        assert tokenizer.decode(tokenizer.encode(row["prompt"])) == row["prompt"]


def digits(row: dict[str, str]) -> str:
    return "".join(sorted(row["prompt"].removesuffix("=")))


def test_the_job_of_kubernetes_fits_together() -> None:
    """What its parts say of each other: a schema would not see it."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, template = job["spec"], job["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    torchrun, command = container["command"][0], container["command"][-3:]
    options = dict(each[2:].split("=") for each in container["command"] if each.startswith("--"))
    assert (torchrun, command) == ("torchrun", ["burnish", "rl", "rl.yaml"])
    _, unknown = get_args_parser().parse_known_args(container["command"][1:])
    assert set(unknown) <= {"--shutdown-timeout=150"}  # which torchrun has from torch 2.12
    assert int(options["nnodes"]) == spec["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    host = options["rdzv-endpoint"].partition(":")[0]
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(options["shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubernetes_knows_every_field_of_the_job() -> None:
    """kubectl decodes into Kubernetes' own types, which drop the fields that they lack."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yml").read_text())
    for document, change in ((service, ("selector", "app=burnish")), (job, ("env", "NEW=1"))):
        command = ["kubectl", "set", *change, "--local", "--filename=-", "--output=json"]
        told = subprocess.run(
            command, input=json.dumps(document), capture_output=True, text=True, check=True
        )
        assert lost(document, json.loads(told.stdout)) == []
    job["spec"]["template"]["spec"]["subDomain"] = "burnish"
    told = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    assert lost(job, json.loads(told.stdout)) == [".spec.template.spec.subDomain"]


def lost(given: Any, found: Any, place: str = "") -> list[str]:
    """What is given and not found."""
    if isinstance(given, dict):
        lacking = [f"{place}.{key}" for key in given if key not in found]
        kept = [
            (value, found[key], f"{place}.{key}") for key, value in given.items() if key in found
        ]
    elif isinstance(given, list):
        lacking = [] if len(given) <= len(found) else [place]
        kept = [(a, b, f"{place}[]") for a, b in zip(given, found, strict=False)]
    else:
        return [] if str(given) == str(found) else [place]
    return [*lacking, *(each for pair in kept for each in lost(*pair))]


@pytest.mark.parametrize(
    ("needed", "missed"),
    [
        ({"grpo": 100.0, "sampled": 50.0, "all": 20.0}, ""),
        ({"grpo": None, "sampled": 50.0, "all": None}, "all"),
        ({"grpo": 100.0, "sampled": 51.0, "all": 20.0}, "sampled"),
    ],
)
def test_the_example_of_distillation_fails_when_it_shows_nothing(
    needed: dict[str, float | None], missed: str
) -> None:
    program = runpy.run_path(str(EXAMPLES / "distillation" / "distil.py"))
    assert program["unkept"](needed) == missed
    assert program["tokens_to"](0.5, [(0.0, 0.1), (8.0, 0.5), (9.0, 0.4)]) == 8.0


@pytest.mark.nightly
def test_a_student_needs_fewer_tokens_of_a_teacher_than_of_rewards(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "distillation" / "distil.py")]
    environ = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    subprocess.run(program, cwd=tmp_path, env=environ, check=True)
