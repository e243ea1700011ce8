"""Environment classes and tool functions of TRL, against TRL's own trainer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
from environments.played import play, play_all, pool_of

from burnish.environments.trl import TrlEnvironment
from burnish.errors import UsageError

COUNTER = Path(__file__).with_name("trl_counter.py")
ASKED = [{"role": "user", "content": "Here is a game."}]
needs_trl = pytest.mark.skipif(
    find_spec("trl") is None, reason="make nightly-environments installs TRL"
)
SCRIPTS = {
    "counter": (
        "Counter",
        [[("add", {"amount": 2})], [("look", {})], [("add", {"amount": -1})], "Done."],
    ),
    "two calls": ("Counter", [[("add", {"amount": 1}), ("add", {"amount": 3})], "Done."]),
    "errors": ("Counter", [[("add", {"much": 1})], [("fly", {})], [("_hidden", {})], "Done."]),
    "cut": ("Counter", [[("add", {"amount": 2})]]),
    "silent": ("Silent", [[("press", {"times": 2})], [("multiply", {"a": 2, "b": 3})], "Done."]),
}


def test_a_class_is_played_as_it_is():
    with pool_of(trl=f"{COUNTER}:Counter") as pool:
        names = [tool["function"]["name"] for tool in pool.described.tools]
        assert names == ["add", "look", "roll"]
        row = {"prompt": ASKED, "target": 7}
        calls = [("roll", {}), ("roll", {})]
        one, two = play_all(pool, [row, row], [calls, calls])
        assert one == two  # each has its own draws from the process-wide generator
        assert one.opening.replaces_prompt
        assert one.opening.messages[0]["content"].startswith("Here is a game. Count to 7 from ")
        assert one.texts[0] != one.texts[1]


@pytest.mark.parametrize("names", [["NoReset"], ["Counter", "Silent"], ["multiply", "nothing"]])
def test_what_trl_would_not_take_is_refused(names):
    with pytest.raises(UsageError):
        TrlEnvironment.schemas([f"{COUNTER}:{name}" for name in names])


@needs_trl
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of TRL's own
@pytest.mark.parametrize("case", SCRIPTS)
def test_trl_says_and_rewards_the_same(case, tmp_path):
    name, script = SCRIPTS[case]
    row = {"prompt": ASKED, "target": 7}
    theirs_prompt, theirs, reward = of_trl(name, script, row, tmp_path)
    rewards = {"kwargs": {"rewards": [f"{COUNTER}:pressed"]}} if name == "Silent" else {}
    functions = [f"{COUNTER}:multiply"] if name == "Silent" else []
    ours = play(row, script, trl=[f"{COUNTER}:{name}", *functions], **rewards)
    assert (ours.opening.messages or ASKED) == theirs_prompt
    heard = [(m["name"], m["content"]) for turn in ours.turns for m in turn.messages]
    assert heard == [(m["name"], m["content"]) for m in theirs if m["role"] == "tool"]
    assert sum(ours.rewards.values()) == pytest.approx(reward)  # TRL's is fp32


def of_trl(name, script, row, folder):
    """Play a script with TRL's trainer, whose model says the script's turns; return prompt, completion and reward."""
    from datasets import Dataset
    from support.models.tiny import tiny_config
    from support.models.tool_templates import calling_tokenizer
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from burnish.environments.process_random import ProcessRandom
    from burnish.functions import load_function

    seen = {}

    def watch(prompts, completions, environments, **kwargs):
        seen.update(prompt=prompts[0], completion=completions[0])
        return [0.0] * len(prompts)

    turns = [*script]

    def parsed(*_, **__):
        said = turns.pop(0) if turns else "This turn is one more than the limit."
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in said]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    functions = [watch]
    tools = None
    if name == "Silent":
        functions.append(load_function(f"{COUNTER}:pressed", "test"))
        tools = [load_function(f"{COUNTER}:multiply", "test")]
    tokenizer = calling_tokenizer()
    tokenizer.response_schema = {}  # the script stands for what a schema reads
    model = AutoModelForCausalLM.from_config(
        tiny_config("qwen2", vocab_size=len(tokenizer), max_position_embeddings=4096)
    )
    limit = {"max_tool_calling_iterations": len(script)} if not isinstance(script[-1], str) else {}
    args = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2,
        num_generations=2, max_completion_length=2000, num_generations_eval=1, **limit,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, functions, args, Dataset.from_list([row] * 2), processing_class=tokenizer,
        tools=tools, environment_factory=load_function(f"{COUNTER}:{name}", "test"),
    )  # fmt: skip
    home = "trl.trainer.grpo_trainer"
    ids = tokenizer("x")["input_ids"]
    model.eval()
    scores = []

    def scored(inputs, prompts, completions, completion_ids, _theirs=trainer._calculate_rewards):
        scores.append(_theirs(inputs, prompts, completions, completion_ids))
        return scores[-1]

    with (
        patch(f"{home}.parse_response", parsed),
        patch.object(
            trainer, "_generate_single_turn", lambda asked, *_, **__: ([ids] * len(asked), None)
        ),
        patch.object(trainer, "_calculate_rewards", scored),
        ProcessRandom(3),
    ):
        trainer._generate_and_score_completions([row])
    return seen["prompt"], seen["completion"], scores[0].nansum().item()
