"""`make demo`: train a small model from nothing to sort digits, with the same commands as any run.

Makes a tokenizer and digits to sort, trains a new model a little on them (`burnish sft`), improves
it by reinforcement learning (`burnish rl`), and asks the result with plain transformers. The exit status is 1
unless the model is poor before reinforcement learning and nearly always right after it.

A choice of four digits is held out in all its orders: the model trains neither on 6237 nor on 2736.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RUNS = Path("runs/demo")
QUESTIONS = ("6237=", "4820=", "9061=")
"""Prompts whose digits are held out in every order."""
BEFORE_AT_MOST = 0.40
AFTER_AT_LEAST = 0.95
"""Expected accuracies before and after reinforcement learning."""


def main() -> None:
    begun = time.monotonic()
    if RUNS.exists():
        shutil.rmtree(RUNS)
    RUNS.mkdir(parents=True)
    say("1/4  a tokenizer of characters, and four digits to sort; 30 of 210 choices are held out")
    make_world()
    say("2/4  a new model of 0.7 million parameters, fine-tuned for a moment: still poor at it")
    burnish("sft", HERE / "sft.yaml")
    say(
        "3/4  reinforcement learning: eight answers to each prompt, better ones made likelier (GRPO)"
    )
    burnish("rl", HERE / "rl.yaml")
    say("4/4  the result, loaded with plain transformers")
    model = newest_model(RUNS / "rl")
    answers = ask(model)
    before, after = accuracies(RUNS / "rl" / "metrics.jsonl")
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "seconds": round(time.monotonic() - begun, 1),
    }
    (RUNS / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report(answers, summary, model)
    if missed := unkept(before, after):
        raise SystemExit(f"\nThe demo did not show what it should: {missed}")


def unkept(before: float, after: float) -> str:
    """Return how the accuracies before and after reinforcement learning miss the expected ones; empty if they meet them."""
    missed = []
    if not before <= BEFORE_AT_MOST:
        missed.append(f"{before:.1%} right before it, want at most {BEFORE_AT_MOST:.0%}")
    if not after >= AFTER_AT_LEAST:
        missed.append(f"{after:.1%} right after it, want at least {AFTER_AT_LEAST:.0%}")
    return "; ".join(missed)


def make_world() -> None:
    from task import write_data, write_tokenizer

    write_tokenizer(RUNS / "tokenizer")
    write_data(RUNS)


def burnish(*arguments: object) -> None:
    """Run the command as a person would; its exit status becomes ours."""
    command = ["burnish", *map(str, arguments)]
    print("$", *command, flush=True)
    status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
    if status != 0:
        raise SystemExit(status)


def newest_model(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1] / "model"


def ask(model: Path) -> dict[str, str]:
    """Return greedy answers to the questions, from transformers alone."""
    for talkative in ("torchao", "torch.utils._pytree"):  # transformers imports them
        logging.getLogger(talkative).setLevel(logging.ERROR)

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    answers = {}
    for question in QUESTIONS:
        inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        ids = network.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers[question] = tokenizer.decode(
            ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def accuracies(metrics: Path) -> tuple[float, float]:
    """Return held-out exact match before and after reinforcement learning."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [row["val/mean@1"] for row in rows if "val/mean@1" in row]
    return measured[0], measured[-1]


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def report(answers: dict[str, str], summary: dict[str, float], model: Path) -> None:
    for question, answer in answers.items():
        right = "".join(sorted(question.rstrip("=")))
        print(f"  {question}{answer}{'' if answer == right else f'   (wrong: {right})'}")
    print(
        f"""
  held-out exact match    before   after
                          {summary["accuracy_before"]:6.1%}  {summary["accuracy_after"]:6.1%}     in {summary["seconds"]:.0f} seconds

  the model    {model}   (AutoModelForCausalLM.from_pretrained loads it as it is)
  the report   {RUNS / "rl" / "report.html"}   (open it in a browser)

Try next
  burnish eval runs/demo/rl                          validate the newest committed step
  burnish rl examples/demo/rl.yaml name=dr algorithm.advantage=dr_grpo
  torchrun --nproc-per-node 2 -m burnish rl examples/demo/rl.yaml name=two
  burnish config show examples/demo/rl.yaml          every setting, and where its value came from
(with .venv/bin on the PATH: source .venv/bin/activate)"""
    )


if __name__ == "__main__":
    main()
