"""Reward models say what transformers' classifiers say of the same texts, at every layout, and rewards hold it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.faults.bit_flips import flip
from support.models.tiny import save_classifier
from support.models.tokenizers import char_tokenizer
from support.nightly import by_day
from support.ranks.processes import run_ranks
from support.runs.training_files import burnish, done, metrics
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from burnish.check import loaded
from burnish.config.frozen_models import reward_models
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import IncompatibleError
from burnish.methods.parts.judges import load_judge
from burnish.methods.parts.rollouts import Judge
from burnish.records import Completion, Prompt, Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.runs.frozen_engines import load_beside
from burnish.tracking.rollouts import read_rollouts, rollout_files

CPU = torch.device("cpu")
ANSWERS = ("42", "", "forty-two, I think", "42")


def rollouts() -> list[Rollout]:
    """Of a conversation, of one that the assistant has begun to answer, and of a plain text."""
    asked = [{"role": "user", "content": "How much is 6 times 7?"}]
    begun = [*asked, {"role": "assistant", "content": "It is "}]
    nothing = np.zeros(0, dtype=np.float32)
    tokens = np.arange(3)  # the policy's, which mean nothing here
    prompts = [
        Prompt(number, tokens, "6*7=", messages, "42", "", {})
        for number, messages in enumerate([asked, begun, None])
    ]
    return [
        Rollout(prompt, i, Completion(tokens, nothing, nothing, "stop", 0), text, 0.5, {"f": 0.25})
        for prompt in prompts
        for i, text in enumerate(ANSWERS)
    ]


def by_transformers(path: Path, model: PreTrainedModel, rollout: Rollout) -> float:
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = rollout.prompt.messages
    if messages is None:
        text = rollout.prompt.text + rollout.text
    elif messages[-1]["role"] == "assistant":
        whole = messages[-1]["content"] + rollout.text
        text = tokenizer.apply_chat_template(
            [*messages[:-1], {"role": "assistant", "content": whole}], tokenize=False
        )
    else:
        answer = {"role": "assistant", "content": rollout.text}
        text = tokenizer.apply_chat_template([*messages, answer], tokenize=False)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, use_cache=False).logits.flatten()[-1])


def judge_of(config: RunConfig, layout: Layout) -> Judge:
    beside = [*reward_models(config)]
    foundation: Any = SimpleNamespace(config=config, layout=layout, device=CPU, beside=beside)
    return load_judge(foundation, load_beside(foundation, None))


def judged_rank(
    layout: Layout, settings: Mapping[str, Any], layouts: Sequence[Mapping[str, int]]
) -> list[list[Rollout]]:
    found = []
    for engine in layouts:
        config = RunConfig.model_validate(
            {**settings, "engine": {"precision": "fp32", **engine}, "name": "n"}
        )
        judge = judge_of(config, layout)
        table = RolloutTable.of([[each] for each in rollouts()])
        found.append(list(judge(table).rollouts))
    return found


def judged(
    models: Sequence[Mapping[str, Any]], engine: Mapping[str, Any] | None = None, **batch: Any
) -> list[Rollout]:
    settings = {"reward": {"models": models}, "batch": {"tokens_per_device": 64} | batch}
    with process_group(CPU, 60.0) as layout:
        return judged_rank(layout, settings, [engine or {}])[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_the_reward_is_what_a_sequence_classifier_says(tmp_path: Path, family: str) -> None:
    path = save_classifier(tmp_path / "judge", family)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    found = judged([{"path": str(path), "weight": 2.0}])
    assert len({round(each.reward_parts["judge"], 4) for each in found}) > 6
    for rollout, before in zip(found, rollouts(), strict=True):
        wanted = by_transformers(path, model, before)
        assert rollout.reward_parts == {"f": 0.25, "judge": pytest.approx(wanted, abs=1e-5)}
        assert rollout.reward == pytest.approx(0.5 + 2 * wanted, abs=3e-5)
        assert rollout.reward_error is None
        assert rollout.text == before.text


def test_a_token_classifier_is_asked_at_the_last_token(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "judge", "qwen3", "Token")
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    for rollout, before in zip(judged([{"path": str(path)}]), rollouts(), strict=True):
        wanted = by_transformers(path, model, before)
        assert rollout.reward_parts["judge"] == pytest.approx(wanted, abs=1e-5)


def test_every_layout_judges_alike(tmp_path: Path) -> None:
    path = str(save_classifier(tmp_path / "judge"))
    settings = {"reward": {"models": [{"path": path}]}, "batch": {"tokens_per_device": 48}}
    wanted = [each.reward for each in judged([{"path": path}])]
    layouts = [{}, {"replicas": 2}, {"tensor_parallel": 2}, {"sequence_parallel": 2}]
    for rank in run_ranks(judged_rank, 2, settings, layouts):
        for found in rank:
            assert [each.reward for each in found] == pytest.approx(wanted, abs=1e-5)


def judged_divided(
    layout: Layout, settings: Mapping[str, Any]
) -> tuple[list[tuple[Any, ...]], list[str], list[tuple[Any, ...]]]:
    """Of rollouts that ranks made in turns: all scores here, own texts, and own calls."""
    flat = rollouts()
    shares = [flat[rank :: layout.world] for rank in range(layout.world)]
    tables = [
        RolloutTable.of([[each] for each in share], rank) for rank, share in enumerate(shares)
    ]
    table = RolloutTable.gathered([each.encoded() for each in tables], tables[layout.rank])
    config = RunConfig.model_validate({**settings, "engine": {"precision": "fp32"}, "name": "n"})
    numbers = [n for rank in range(layout.world) for n in range(rank, len(flat), layout.world)]
    found = judge_of(config, layout)(table.take(np.argsort(numbers)))
    scores = [(e.reward, list(e.reward_parts.items()), e.reward_error) for e in found.rollouts]
    calls = [(c.name, c.value, c.error) for e in found.objects for c in e.calls]
    return scores, [each.text for each in found.objects], calls


def test_a_rank_judges_with_the_texts_of_its_own_rollouts(tmp_path: Path) -> None:
    """Two models, of which one reads short texts alone."""
    path, brief = save_classifier(tmp_path / "judge"), save_classifier(tmp_path / "brief")
    config = json.loads((brief / "config.json").read_text())
    (brief / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    models = [{"path": str(path), "weight": 2.0}, {"path": str(brief)}]
    settings = {"reward": {"models": models, "on_error": -1.0}, "batch": {"tokens_per_device": 64}}
    with process_group(CPU, 60.0) as layout:
        wanted, texts, calls = judged_divided(layout, settings)
    plain = judged(models)
    assert [error for *_, error in wanted] == [each.reward_error for each in plain]
    assert texts == [each.text for each in rollouts()]
    for rank, (scores, own, told) in enumerate(run_ranks(judged_divided, 2, settings)):
        assert own == texts[rank::2]
        assert [error for *_, error in scores] == [error for *_, error in wanted]
        for (reward, parts, _), (their_reward, theirs, _) in zip(scores, wanted, strict=True):
            assert reward == pytest.approx(their_reward, abs=1e-5)
            assert [name for name, _ in parts] == ["f", "judge", "brief"]
            assert dict(parts) == pytest.approx(dict(theirs), abs=1e-5)
        pairs = [calls[n : n + 2] for n in range(0, len(calls), 2)]
        wanted_calls = [call for pair in pairs[rank::2] for call in pair]
        assert [(name, error) for name, _, error in told] == [(n, e) for n, _, e in wanted_calls]


@pytest.mark.parametrize("degree", by_day(["pipeline_parallel", "expert_parallel"], []))
def test_several_judge_alike_on_the_megatron_engine(tmp_path: Path, degree: str) -> None:
    """Dense ones too where the policy's experts are divided."""
    models = [
        {"path": str(save_classifier(tmp_path / kind, kind=kind))} for kind in ("Sequence", "Token")
    ]
    settings = {"reward": {"models": models}, "batch": {"tokens_per_device": 48}}
    wanted = [each.reward for each in judged(models)]
    layout = {"kind": "megatron", degree: 2}
    for (found,) in run_ranks(judged_rank, 2, settings, [layout]):
        assert [each.reward for each in found] == pytest.approx(wanted, abs=1e-5)


def test_several_models_and_their_names(tmp_path: Path) -> None:
    paths = [save_classifier(tmp_path / each / "judge", each) for each in ("llama", "qwen3")]
    (first, *_) = judged([{"path": str(paths[0])}, {"path": f"{paths[1]}/", "weight": -1.0}])
    parts = first.reward_parts
    assert list(parts) == ["f", "judge", "judge_2"]
    assert first.reward == pytest.approx(0.5 + parts["judge"] - parts["judge_2"])
    (first, *_) = judged([{"path": str(paths[0]), "name": "kind"}])
    assert list(first.reward_parts) == ["f", "kind"]


def test_what_is_too_long_is_an_error_of_its_rollout(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "judge")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    found = judged([{"path": str(path)}])
    assert {each.prompt.index for each in found if each.reward_error} == {0, 1}
    error = "judge: reads less than 40 tokens"
    long = next(each for each in found if each.reward_error)
    assert (long.reward_error, dict(long.reward_parts)) == (error, {"f": 0.25})
    assert math.isnan(long.reward)
    assert all(not math.isnan(each.reward) for each in found if not each.reward_error)


def test_a_model_that_says_no_number_is_an_error_of_each_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one, which is not checked after loading."""
    monkeypatch.setattr(loaded, "_MOST_PARAMETERS", 0)
    path = save_classifier(tmp_path / "judge")
    weights = load_file(path / "model.safetensors")
    weights["score.weight"].fill_(float("nan"))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    reward = {"models": [{"path": str(path), "weight": 2.0}], "on_error": -1.0}
    with process_group(CPU, 60.0) as layout:
        (found,) = judged_rank(layout, {"reward": reward}, [{}])
    assert all(each.reward_error.startswith("judge: ") for each in found)
    assert {(each.reward, each.reward_parts["judge"]) for each in found} == {(0.5 - 2.0, -1.0)}


def test_the_longest_text_leaves_a_place_for_the_token_after_it(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "judge")
    tokenizer, config = char_tokenizer(), json.loads((path / "config.json").read_text())
    whole = [each for each in rollouts() if each.prompt.messages is None]
    lengths = [len(tokenizer(each.prompt.text + each.text)["input_ids"]) for each in whole]
    for positions, refused in ((max(lengths) + 1, False), (max(lengths), True)):
        changed = config | {"max_position_embeddings": positions}
        (path / "config.json").write_text(json.dumps(changed))
        found = [each for each in judged([{"path": str(path)}]) if each.prompt.messages is None]
        longest = found[lengths.index(max(lengths))]
        assert (longest.reward_error is not None) == refused
        (call,) = longest.calls
        assert (call.error is not None) == (call.value is None) == refused
        assert 0 < call.began < call.began + call.seconds < time.time()
        assert (call.name in longest.reward_parts) == (not refused)
        assert sum(each.reward_error is not None for each in found) == refused


@pytest.mark.nightly
def test_a_damaged_model_of_a_step_is_refused(work: Path) -> None:
    argv = ["rl", "rl.yaml", "steps=1"]
    run = done(work, *argv, "algorithm.advantage=gae", "name=valued")
    judge = run / "checkpoints/step-00000001/critic/model"
    argv.append(f"reward.models=[{{path: {judge}}}]")
    done(work, *argv, "name=judged_by_a_critic")
    file = judge / "model.safetensors"
    flip(file)
    code, said = burnish(work, *argv, "name=judged_by_damage")
    assert (code, "critic/model/model.safetensors" in said) == (3, True), said


def test_the_weights_are_kept_in_the_dtype_of_computing_and_have_no_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    load = TorchEngine.load
    monkeypatch.setattr(
        TorchEngine, "load", lambda self, *given: (made.append(self), load(self, *given))
    )
    path = save_classifier(tmp_path / "judge")
    exact = [each.reward for each in judged([{"path": str(path)}])]
    rough = [each.reward for each in judged([{"path": str(path)}], {"precision": "bf16"})]
    assert rough == pytest.approx(exact, abs=0.1)
    judges = [each for each in made if hasattr(each, "_scorer")]  # the proof's engine is closed
    for engine, dtype in zip(judges, (torch.float32, torch.bfloat16), strict=True):
        parameters = list(engine._scorer.parameters())
        assert {parameter.dtype for parameter in parameters} == {dtype}
        assert not any(parameter.requires_grad for parameter in parameters)


def test_what_gives_no_reward_is_refused(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "judge", labels=2)
    with pytest.raises(IncompatibleError):
        judged([{"path": str(path)}])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(IncompatibleError):
        judged([{"path": str(path)}])


def test_a_run_without_functions_learns_from_a_model(work: Path) -> None:
    path = save_classifier(work / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    argv = ["rl.yaml", "reward.functions=[]", "reward.models=[{path: judge}]"]
    run = done(work, "rl", *argv, "steps=2", "name=judged")
    assert {"reward/parts/judge", "val/reward"} <= metrics(run)[-1].keys()
    (*_, (_, newest)) = rollout_files(run / "rollouts", "validation")
    for row in read_rollouts(newest):
        text = row["prompt"] + row["completion"]
        ids = torch.tensor([AutoTokenizer.from_pretrained(path)(text)["input_ids"]])
        with torch.no_grad():
            wanted = float(model.eval()(input_ids=ids).logits)
        assert row["reward"] == pytest.approx(wanted, abs=1e-4)
    code, said = burnish(work, "eval", "runs/judged")
    assert (code, "val/reward" in said) == (0, True), said


def test_a_model_that_is_not_there_is_said_first(work: Path) -> None:
    code, said = burnish(work, "rl", "rl.yaml", "reward.models=[{path: jugde}]", "--dry-run")
    assert code == 5
    assert "reward.models[0].path: " in said
    assert " jugde" in said
