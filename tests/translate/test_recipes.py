"""The arguments of eight published recipes translate with none lost, pass the dry run and train a small model.

`recipes/` has the arguments and values of the recipes, in an order of their own. The guide has a table of the counts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.models.tokenizers import save_char_tokenizer
from support.runs.training_files import FRESH, done, make_files
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.tracking.trackers import read_metrics
from burnish.translate.translation import translate_arguments

RECIPES = sorted((Path(__file__).parent / "recipes").iterdir())
GUIDE = Path(__file__).parents[2] / "docs/guides/translate.md"
COUNT = re.compile(
    r"# (\d+) settings: (\d+) carried, (\d+) as by default, (\d+) have no counterpart, (\d+) left for you to decide, (\d+) lost$"
)
SMALL = (
    "name=run output_dir=runs steps=3 model.path=model data.train=train.jsonl data.max_rows=null engine.precision=fp32 "
    "engine.sequence_parallel=1 engine.replicas=1 batch.minibatches=1 batch.tokens_per_device=64 optim.warmup_steps=0 "
    "tracking.trackers=[] checkpoint.save_every=0 checkpoint.keep_last=1"
)
"""What fits a small model and small files."""
BY_METHOD = {
    "sft": "batch.examples=4 data.validation=10% data.max_length=32 evaluation.every=0",
    "rl": (
        "batch.prompts=4 rollout.n=4 rollout.max_response_length=4 rollout.engine=builtin rollout.place=inside "
        "rollout.tensor_parallel=1 data.max_prompt_length=32 data.prompt_column=prompt data.validation=validation.jsonl "
        "data.system_prompt=null data.string_prompts=raw reward.functions=rewards.py:letters evaluation.every=0 "
    ),
}
OF_RECIPE = {
    "tiny_zero": "critic.path=model rollout.n=1",
    "verl_dapo": "algorithm.overlong.buffer=2 algorithm.dynamic_sampling.part=null",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_guide_counts_what_becomes_of_a_recipe(recipe: Path) -> None:
    rows = re.findall(r"^\|.*\| ([a-z_\d]+\.\w+) \|((?: \d+ \|)+)$", GUIDE.read_text(), re.M)
    shown = {name: re.findall(r"\d+", counts) for name, counts in rows}
    counts = COUNT.search(translate_arguments([str(recipe)]).rstrip())
    assert counts
    assert shown[recipe.name] == list(counts.groups())
    assert counts[6] == "0"


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_small_model(recipe: Path, tmp_path: Path) -> None:
    make_files(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FRESH))
    model.save_pretrained(tmp_path / "model")
    save_char_tokenizer(tmp_path / "model")
    text = translate_arguments([str(recipe)])
    (tmp_path / "run.yaml").write_text(text)
    method = text.split()[3]
    words = [method, "run.yaml", *f"{SMALL} {BY_METHOD[method]}".split()]
    words += OF_RECIPE.get(recipe.stem, "").split()
    done(tmp_path, *words, "--dry-run")
    assert not (tmp_path / "runs").exists()
    directory = done(tmp_path, *words)
    steps = [
        row["step"] for row in read_metrics(directory / "metrics.jsonl") if "timing_s/step" in row
    ]
    assert steps[-3:] == [1, 2, 3]
    meant = yaml.safe_load(text)["optim"]
    assert yaml.safe_load((directory / "config.yaml").read_text())["optim"]["lr"] == meant["lr"]
