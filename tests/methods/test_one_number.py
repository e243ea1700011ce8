"""A step's validation, measured by the run, by `burnish eval` on the run, on the model that it wrote, and by transformers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.states import committed
from support.runs.training_files import done, make_files, metrics, ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

CALLS = {"sft": "sft", "greedy": "rl", "sampled": "rl", "lora": "sft"}
SETTINGS = {
    "sft": [],
    "greedy": ["evaluation.temperature=0"],
    "sampled": ["evaluation.n=3", "evaluation.temperature=1"],
    "lora": ["model.lora.rank=4"],
}
CASES = list(product(CALLS, ("bf16", "fp32"), (1, 2)))


@pytest.fixture(scope="module")
def ties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for runs, and `model`: each weight lies halfway between two bf16 numbers."""
    root = make_files(tmp_path_factory.mktemp("ties"))
    made = ["name=made", "steps=1", "optim.lr=0", "checkpoint.model_dtype=fp32"]
    run = done(root, "sft", "sft.yaml", *made)
    newest_model(run).rename(root / "model")
    (path,) = (root / "model").glob("*.safetensors")
    halfway = {
        name: tensor.view(torch.int32).bitwise_and(-0x10000).bitwise_or(0x8000).view(torch.float32)
        for name, tensor in load_file(path).items()
    }
    save_file(halfway, path, metadata={"format": "pt"})
    return root


def newest_model(run: Path) -> Path:
    return Path(committed(run / "checkpoints")[-1].path) / "model"


def evaluated(root: Path, world: int, *argv: str) -> dict[str, float]:
    commands = ranks(root, ["eval", *argv, "--json"], world)
    assert [command.wait() for command in commands] == [0] * world, commands[0].output
    (line,) = [each for each in commands[0].output.splitlines() if each.startswith("{")]
    found: dict[str, float] = json.loads(line)
    return found


def given(case: str, precision: str, model: Path | str) -> list[str]:
    own = ["model.fresh=null", f"model.path={model}", f"engine.precision={precision}"]
    return [*own, *SETTINGS[case]]


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "precision", "world"), CASES)
def test_run_eval_and_written_model_give_the_same_bits(
    ties: Path, case: str, precision: str, world: int
) -> None:
    # The first run steps by 0, so its weights are ties still where the optimizer leaves them.
    for lr in ("0", "0.01"):
        name = f"{case}-{precision}-{world}-{lr}"
        method = CALLS[case]
        schedule = [f"name={name}", "steps=2", "evaluation.every=2", f"optim.lr={lr}"]
        settings = given(case, precision, "model")
        run = done(ties, method, f"{method}.yaml", *schedule, *settings, world=world)
        logged = {n: v for n, v in metrics(run)[-1].items() if n.startswith("val/")}
        assert evaluated(ties, world, str(run)) == logged
        changed = given(case, precision, newest_model(run))
        if case == "lora":
            changed = [*given("sft", precision, "model"), f"model.lora.path={newest_model(run)}"]
        rewards = ["reward.functions=[]"] if method == "sft" else []
        found = evaluated(ties, world, f"{method}.yaml", *rewards, *changed)
        if precision == "bf16":
            assert found == logged
        elif method == "sft":  # model/ rounds them to bf16
            assert found == pytest.approx(logged, rel=1e-2)
            assert found != logged or case == "lora"  # an adapter that was not trained is 0


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.nightly
def test_transformers_agrees_on_the_written_model(
    ties: Path, precision: str, tolerance: float
) -> None:
    """In bf16 transformers rounds its logits as well, which Burnish does not."""
    settings = ["name=plain", "steps=2", *given("sft", "bf16", "model")]
    model = newest_model(done(ties, "sft", "sft.yaml", *settings))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    total = count = 0.0
    for line in (ties / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        answer = tokenizer.encode(row["completion"], add_special_tokens=False)
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = plain(ids).logits.float().log_softmax(-1)[0, :-1]
        chosen = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        total -= float(chosen.sum())
        count += len(chosen)
    found = evaluated(ties, 1, "sft.yaml", "reward.functions=[]", *given("sft", precision, model))
    assert found["val/loss"] == pytest.approx(total / count, rel=tolerance)
