"""Distillation on the student's own completions, against plain torch, on one process and several, interrupted; and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.states import committed
from support.models.tiny import save_classifier
from support.models.tokenizers import char_tokenizer
from support.nightly import by_day
from support.runs.endpoints import Answer, serving
from support.runs.preferences import near
from support.runs.same_runs import assert_same
from support.runs.training_files import (
    FRESH,
    RL,
    At,
    burnish,
    done,
    make_files,
    metrics,
    outcome,
    ranks,
    rollouts,
    write_rows,
)
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from burnish.config.distillation import DistillConfig
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.methods.parts.distillation import Prompts, Teachers, require_sources
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, TokenOutputs

WEIGHT, STEPS = 0.5, 3
RUN = ("rl", "distil.yaml")
WIDER = {**FRESH, "hidden_size": 48, "num_hidden_layers": 1}
LAYOUTS = {
    "fsdp": [],
    "tp": ["engine.tensor_parallel=2"],
    "sp": ["engine.sequence_parallel=2"],
    "hsdp": ["engine.replicas=2"],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that knows nothing, a teacher of another size that has learned sums, and a configuration."""
    work = make_files(tmp_path_factory.mktemp("distil"))
    start = done(work, "sft", "sft.yaml", "name=start", "steps=1", "optim.lr=0")
    fresh = f"model.fresh={json.dumps(WIDER)}"
    teacher = done(work, "sft", "sft.yaml", "name=teacher", "seed=7", "steps=8", fresh)
    shutil.copytree(teacher / "checkpoints/step-00000008/model", work / "teacher")
    settings: dict[str, Any] = {
        **RL,
        "steps": STEPS,
        "model": {"path": f"{start}/checkpoints/step-00000001/model"},
        "data": {"train": ["train.jsonl"], "shuffle": False},
        "reward": {},
        "evaluation": {"every": 0},
        "checkpoint": {"model_dtype": "fp32"},
        "distill": {"teachers": [{"path": "teacher"}], "weight": WEIGHT},
    }
    (work / "distil.yaml").write_text(json.dumps(settings))
    return work


@pytest.fixture(scope="module")
def alone(work: Path) -> Path:
    return done(work, *RUN, "name=alone")


def trained_by_torch(
    work: Path, run: Path, asked: Mapping[str, str] | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and the mean reverse KL of each step, from the tokens that the run drew.

    `asked`: what the teacher is asked, by the student's prompt. A row that is not there has no teacher.
    """
    start = work / "runs/start/checkpoints/step-00000001/model"
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (start, work / "teacher")
    )
    ids = char_tokenizer().get_vocab()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01, weight_decay=0.0)
    kls = []
    for step in range(STEPS):
        drawn = []
        for row in rollouts(run, step + 1):
            after = torch.tensor([ids[text] for text in row["tokens"]["texts"]])
            logprobs = []
            told = row["prompt"] if asked is None else asked.get(row["prompt"])
            for model, prompt in ((student, row["prompt"]), (teacher, told)):
                if prompt is None:
                    logprobs.append(torch.full(after.shape, torch.nan))
                    continue
                before = torch.tensor([ids[letter] for letter in prompt])
                whole = torch.cat([before, after])[None]
                logits = model(whole).logits[0, len(before) - 1 : -1]
                logprobs.append(log_softmax(logits, dim=-1).gather(1, after[:, None]).squeeze(1))
            drawn.append(torch.stack(logprobs))
        ours, theirs = torch.cat(drawn, dim=1)
        is_taught = theirs.isfinite()
        apart = torch.where(is_taught, ours - theirs, 0.0).detach()
        loss = (WEIGHT * apart * ours).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        kls.append(float(apart.sum() / is_taught.sum()))
    return dict(student.state_dict()), kls


def load_model(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model/model.safetensors")


def test_advantages_are_the_log_ratios_to_the_teacher(work: Path, alone: Path) -> None:
    wanted, kls = trained_by_torch(work, alone)
    found = [row["actor/reverse_kl"] for row in metrics(alone)]
    np.testing.assert_allclose(found, kls, rtol=1e-4)
    near(load_model(alone), wanted, 2e-5)
    assert kls[-1] < kls[0]


@pytest.mark.parametrize("layout", by_day(LAYOUTS, ["fsdp"]))
def test_two_processes_distil_what_one_does(work: Path, alone: Path, layout: str) -> None:
    assert_same(done(work, *RUN, f"name={layout}", *LAYOUTS[layout], world=2), alone)


@pytest.fixture(scope="module")
def hinted(work: Path) -> dict[str, str]:
    """Write hinted.jsonl, whose column `hinted` tells a teacher the answer; what it is asked, by the student's prompt."""
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        # Of one row the teacher's prompt is too long.
        row["hinted"] = f"{row['answer']}!{row['prompt'] * (40 if number == 1 else 2)}"
    write_rows(work / "hinted.jsonl", rows)
    return {row["prompt"]: row["hinted"] for number, row in enumerate(rows) if number != 1}


OWN = [
    "distill.teachers=[{path: teacher, prompt_column: hinted}]",
    "data.train=[hinted.jsonl]",
]


@pytest.mark.parametrize("world", by_day([1, 2], [1]))
def test_a_teacher_reads_its_own_prompt(work: Path, hinted: dict[str, str], world: int) -> None:
    run = done(work, *RUN, f"name=own-prompt-{world}", *OWN, world=world)
    wanted, kls = trained_by_torch(work, run, hinted)
    found = [row["actor/reverse_kl"] for row in metrics(run)]
    np.testing.assert_allclose(found, kls, rtol=1e-4)
    near(load_model(run), wanted, 2e-5)


def scorer(work: Path, ids: Mapping[str, int]) -> Callable[[dict[str, Any], int], Answer]:
    """An endpoint's answers: the teacher's by transformers, with texts by `ids`. The proof of the tokens fails at first."""
    model = AutoModelForCausalLM.from_pretrained(work / "teacher", dtype=torch.float32)
    texts = {number: text for text, number in ids.items()}
    lock = threading.Lock()

    def answer(body: dict[str, Any], number: int) -> Answer:
        if number == 1 and len(body["prompt"]) > 20:
            return -503, "busy"
        whole = torch.tensor([body["prompt"]])
        with lock, torch.no_grad():
            every = log_softmax(model(whole).logits[0], dim=-1)
        logprobs = every[:-1].gather(1, whole[0, 1:, None]).squeeze(1).tolist()
        drawn = int(every[-1].argmax())
        said = {
            "tokens": [texts[number] for number in [*body["prompt"], drawn]],
            "token_logprobs": [None, *logprobs, float(every[-1, drawn])],
        }
        return 200, {"choices": [{"text": "", "finish_reason": "length", "logprobs": said}]}

    return answer


LAYOUTS_AT = {"alone": [], "tp": LAYOUTS["tp"], "fsdp": LAYOUTS["fsdp"]}


@pytest.mark.parametrize("layout", by_day(LAYOUTS_AT, ["alone"]))
def test_a_teacher_at_an_endpoint_is_the_teacher(work: Path, alone: Path, layout: str) -> None:
    with serving(scorer(work, char_tokenizer().get_vocab())) as endpoint:
        teachers = f"distill.teachers=[{{path: tiny, url: '{endpoint.url}'}}]"
        argv = [*RUN, f"name=at-{layout}", teachers, *LAYOUTS_AT[layout]]
        run = done(work, *argv, world=1 if layout == "alone" else 2)
    assert {(path, body["model"]) for path, _, body in endpoint.asked} == {
        ("/v1/completions", "tiny")
    }
    found = [row["actor/reverse_kl"] for row in metrics(run)]
    np.testing.assert_allclose(
        found, [row["actor/reverse_kl"] for row in metrics(alone)], rtol=1e-4
    )
    near(load_model(run), load_model(alone), 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", ["tokens", "answer"])
def test_an_endpoint_that_cannot_score_the_tokens_is_refused(work: Path, wrong: str) -> None:
    ids = char_tokenizer().get_vocab()
    ids |= {"0": ids["A"], "A": ids["0"]}
    other = scorer(work, ids)
    script = other if wrong == "tokens" else lambda body, number: (200, {"choices": [{"text": ""}]})
    with serving(script) as endpoint:
        teachers = f"distill.teachers=[{{path: tiny, url: '{endpoint.url}'}}]"
        code, output = burnish(work, *RUN, f"name=refused-{wrong}", teachers)
    assert code != 0
    facts = {"tokens": ["token 4 is '0'", "'A'"], "answer": ["token_logprobs", "echo"]}[wrong]
    assert [fact for fact in facts if fact not in output.partition("error: ")[2]] == [], output
    assert "Traceback" not in output


@pytest.mark.nightly
@pytest.mark.parametrize("lora", [0, 4])
def test_a_model_is_its_own_teacher_with_the_answer(
    work: Path, hinted: dict[str, str], lora: int
) -> None:
    teachers = "distill.teachers=[{path: initial, prompt_column: hinted}]"
    argv = [*OWN, teachers, f"model.lora.rank={lora}", "distill.tokens=all", "steps=8"]
    run = done(work, *RUN, f"name=self-{lora}", *argv)
    divergences = [row["actor/divergence"] for row in metrics(run)]
    assert divergences[0] > 1e-6
    plain = done(
        work, *RUN, f"name=plain-{lora}", *argv, teachers.replace(", prompt_column: hinted", "")
    )
    assert metrics(plain)[0]["actor/divergence"] == pytest.approx(0.0, abs=1e-6)


KILLED = {
    "drawn": [],
    "own": OWN,
    "whole": [*OWN, "distill.tokens=all", "distill.mix=0.5"],
    "top": [*OWN, "distill.tokens=topk", "distill.k=5"],
    "self": [
        "distill.teachers=[{path: initial, prompt_column: hinted}]",
        "data.train=[hinted.jsonl]",
        "distill.tokens=all",
        "model.lora.rank=4",
    ],
    "sources": [
        "distill.teachers=[{path: teacher, source: a}, {path: initial}]",
        "data.train=[sources.jsonl]",
    ],
    "endpoint": [],
}


@pytest.mark.nightly
@pytest.mark.usefixtures("hinted")
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 1) for name in KILLED), ("drawn", 2), ("whole", 2)]
)
def test_a_killed_run_goes_on_to_the_bit(work: Path, name: str, world: int) -> None:
    lines = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "data_source": "ab"[number % 2]} for number, row in enumerate(lines)]
    write_rows(work / "sources.jsonl", rows)
    argv = [*RUN, "checkpoint.save_every=1", "batch.minibatches=2", *KILLED[name]]
    argv += ["rollout.ahead=1"] if name == "drawn" else []
    with ExitStack() as stack:
        if name == "endpoint":
            endpoint = stack.enter_context(serving(scorer(work, char_tokenizer().get_vocab())))
            argv.append(f"distill.teachers=[{{path: tiny, url: '{endpoint.url}'}}]")
        require_same_after_a_kill(
            work, argv, f"{name}{world}", world, "burnish.methods.parts.online_training:counted", 4
        )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["whole", "top"])
def test_a_killed_run_on_fixed_answers_goes_on_to_the_bit(work: Path, name: str) -> None:
    argv = [*fixed(name), "checkpoint.save_every=1"]
    place = "burnish.methods.parts.offline_training:make_batch"
    require_same_after_a_kill(work, argv, f"fixed-{name}", 1, place, STEPS)


def require_same_after_a_kill(
    work: Path, argv: list[str], name: str, world: int, place: str, nth: int
) -> None:
    whole = done(work, *argv, f"name=peace-{name}", world=world)
    commands = ranks(work, [*argv, f"name=war-{name}"], world, at=At(place, nth, signal.SIGKILL))
    assert all(command.wait() != 0 for command in commands)
    killed = work / f"runs/war-{name}"
    assert 0 < len(committed(killed / "checkpoints")) < STEPS
    assert outcome(done(work, *argv, f"name=war-{name}", world=world)) == outcome(whole)


@pytest.mark.nightly
def test_a_teacher_stands_beside_rewards(work: Path, alone: Path) -> None:
    """With a reward that is equal for all, only the teacher teaches; one completion of a prompt is enough for it."""
    same = "reward.functions=[{function: 'rewards.py:same'}]"
    run = done(work, *RUN, "name=beside", same)
    near(load_model(run), load_model(alone), 0.0)
    letters = "reward.functions=[{function: 'rewards.py:letters'}]"
    run = done(work, *RUN, "name=letters", letters)
    assert any(
        (load_model(run)[name] != tensor).any() for name, tensor in load_model(alone).items()
    )
    single = done(work, *RUN, "name=single", "steps=12", "rollout.n=1", "batch.prompts=16")
    kls = [row["actor/reverse_kl"] for row in metrics(single)]
    assert sum(kls[-3:]) < sum(kls[:3])


@pytest.mark.nightly
@pytest.mark.parametrize("lora", [0, 4])
def test_the_start_may_teach(work: Path, lora: int) -> None:
    """Before the first update the student is its teacher. Rewards then lead away, and the teacher holds."""
    argv = ["distill.teachers=[{path: initial}]", f"model.lora.rank={lora}"]
    argv += ["reward.functions=[{function: 'rewards.py:letters'}]"]
    argv += ["engine.offload_during_rollout=true"]
    run = done(work, *RUN, f"name=start{lora}", *argv)
    first, *later = [row["actor/reverse_kl"] for row in metrics(run)]
    assert first == pytest.approx(0.0, abs=1e-7)
    assert min(map(abs, later)) > 1e-5


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["distill.teachers=[{path: nowhere}]"], ["distill.teachers", "nowhere"]),
        (["distill.teachers=[{path: other}]"], ["token 4 is '0'", "'A'", "2 of 100"]),
        pytest.param(
            ["distill.teachers=[{path: judge}]"],
            ["judge", "SequenceClassification", "distill.teachers"],
            marks=pytest.mark.nightly,
        ),
        (["distill.teachers=[]"], ["reward.functions", "distill.teachers"]),
        (["algorithm.dynamic_sampling.enabled=true"], ["dynamic_sampling"]),
        (["distill.weight=0"], ["distill.weight"]),
        (
            ["distill.teachers=[{path: t, url: 'http://h'}]", "rollout.temperature=0.5"],
            ["rollout.temperature"],
        ),
        (
            ["distill.teachers=[{path: t, url: 'http://h'}]", "distill.tokens=topk"],
            ["distill.tokens", "url"],
        ),
        (
            ["distill.teachers=[{path: initial, prompt_column: hint}]"],
            ["'hint'", "distill.teachers[].prompt_column"],
        ),
        (
            ["distill.teachers=[{path: initial, prompt_column: prompt}]", "data.streaming=1"],
            ["data.streaming", "prompt_column"],
        ),
        (["distill.teachers=[{path: teacher}, {path: initial}]"], ["distill.teachers", "source"]),
        pytest.param(
            ["distill.teachers=[{path: teacher, source: maths}]"],
            ["maths", "data_source"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_mistakes_end_before_anything_is_written(
    work: Path, argv: list[str], facts: list[str]
) -> None:
    save_classifier(work / "judge")
    other = work / "other"
    if not other.exists():
        shutil.copytree(work / "teacher", other)
        file = other / "tokenizer.json"
        swapped = {'"0": 4': '"A": 4', '"A": 40': '"0": 40'}
        text = file.read_text()
        for before, after in swapped.items():
            assert before in text
            text = text.replace(before, after)
        file.write_text(text)
    code, output = burnish(work, *RUN, "name=wrong", *argv, "--dry-run")
    assert code in (2, 4, 5), output
    said = output.partition("error: ")[2]
    assert [fact for fact in facts if fact not in said] == [], output
    assert "Traceback" not in output
    assert not (work / "runs/wrong").exists()


def test_a_source_that_no_row_has_is_named(tmp_path: Path) -> None:
    """With those that rows have; nothing is looked for where all teachers' sources are there, or none is asked for."""
    rows = [{"prompt": "1", "data_source": source} for source in ("a", "b", None, "a")]
    write_rows(tmp_path / "rows.jsonl", rows)
    write_rows(tmp_path / "plain.jsonl", [{"prompt": "1"}])

    def required(file: str, *sources: str | None) -> None:
        teachers = [{"path": "t", "source": source} for source in sources]
        values = {"data": {"train": [str(tmp_path / file)]}, "distill": {"teachers": teachers}}
        config = RunConfig.model_validate(values)
        foundation: Any = SimpleNamespace(config=config, layout=Layout())
        require_sources(foundation)

    required("rows.jsonl", "a", "b", None)
    required("plain.jsonl", None)
    with pytest.raises(UsageError, match="maths; a, b"):
        required("rows.jsonl", "maths", "a")
    with pytest.raises(UsageError, match="maths"):
        required("plain.jsonl", "maths")


def test_each_row_has_the_teacher_of_its_source() -> None:
    """Teachers see their own sequences alone, in as many micro-batches as there are."""
    sources = ["a", "b", "a", "c", "b"]
    examples = [
        Example(np.arange(n + 1, n + 4 + n % 2), np.arange(3 + n % 2) > 1) for n in range(5)
    ]
    batch = make_batch(examples, Layout(), 8, ModelFlops(1.0, {}, 1.0))
    assert len(batch.microbatches) > 1
    seen: list[list[list[int]]] = [[], []]

    def forward(teacher: int, batch: Batch) -> list[TokenOutputs]:
        for micro in batch.microbatches:
            parts = micro.input_ids.tensor_split(micro.cu_seqlens[1:-1].long())
            seen[teacher] += [part.tolist() for part in parts]
        return [TokenOutputs(100.0 * teacher + m.input_ids) for m in batch.microbatches]

    config = DistillConfig.model_validate(
        {"teachers": [{"path": "x", "source": "b"}, {"path": "y", "source": "a"}]}
    )
    forwards = [partial(forward, 0), partial(forward, 1)]
    teachers = Teachers(config, forwards, [], None, [Prompts(), Prompts()])
    prompts = {"length": np.full(5, 2), "index": np.arange(5)}
    table: Any = SimpleNamespace(sources=sources, groups=np.arange(5), prompts=prompts)
    (answered,) = teachers.answered([batch], table)
    logprobs = [micro.given("teacher_logprobs").numpy() for micro in answered.microbatches]
    found = answered.by_example(logprobs)
    for number, example in enumerate(examples):
        base = {"a": 100.0, "b": 0.0, "c": np.nan}[sources[number]]
        wanted = np.where(example.loss_mask, base + example.token_ids, np.nan)
        np.testing.assert_array_equal(found[number], wanted)
    whole = [example.token_ids.tolist() for example in examples]
    for teacher, numbers in enumerate([[1, 4], [0, 2]]):
        own = [ids for ids in seen[teacher] if ids in whole]
        assert sorted(own) == [whole[number] for number in numbers]


def compared_by_torch(
    work: Path,
    rows: list[tuple[str, list[int]]],
    mix: float,
    k: int | None,
    steps: int,
    temperature: float = 1.0,
    names: Sequence[str | None] = (),
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and divergences of a student that is compared with teachers on whole logits; 8 rows are a step.

    `names`: of each row, whether "teacher" or "student", as it was before, teaches it. Nothing: the first teaches all.
    """
    start = work / "runs/start/checkpoints/step-00000001/model"
    student, teacher, before = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (start, work / "teacher", start)
    )
    teachers = {"teacher": teacher, "student": before}
    ids = char_tokenizer().get_vocab()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01, weight_decay=0.0)
    found = []
    for step in range(steps):
        values = []
        for number in range(8 * step, 8 * step + 8):
            prompt, answer = rows[number]
            name = names[number] if names else "teacher"
            if name is None:
                values.append(torch.zeros(len(answer)))
                continue
            whole = torch.tensor([[*(ids[letter] for letter in prompt), *answer]])
            places = slice(len(prompt) - 1, -1)
            with torch.no_grad():
                logq = log_softmax(teachers[name](whole).logits[0, places] / temperature, dim=-1)
            logp = log_softmax(student(whole).logits[0, places] / temperature, dim=-1)
            values.append(by_formula(logp, logq, mix, k))
        divergence = torch.cat(values).mean()
        divergence.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(divergence.detach()))
    return dict(student.state_dict()), found


def by_formula(logp: torch.Tensor, logq: torch.Tensor, mix: float, k: int | None) -> torch.Tensor:
    if k is not None:
        top = logq.topk(k, dim=-1).indices
        logp, logq = (
            torch.cat([own, (1 - own.exp().sum(-1, keepdim=True)).log()], -1)
            for own in (logp.gather(1, top), logq.gather(1, top))
        )
    if mix == 0:
        return (logq.exp() * (logq - logp)).sum(-1)
    if mix == 1:
        return (logp.exp() * (logp - logq)).sum(-1)
    logm = ((1 - mix) * logp.exp() + mix * logq.exp()).log()
    return (mix * logq.exp() * (logq - logm) + (1 - mix) * logp.exp() * (logp - logm)).sum(-1)


WAYS = {
    "whole": ("all", 0.5, None),
    "forward": ("all", 0.0, None),
    "top": ("topk", 1.0, 5),
}


def fixed(name: str) -> list[str]:
    tokens, mix, k = WAYS[name]
    return [
        *("sft", "distil.yaml", f"distill.tokens={tokens}", f"distill.mix={mix}"),
        *(
            "distill.weight=1",
            f"distill.k={k or 64}",
            "rollout={}",
            "batch={examples: 8, tokens_per_device: 32}",
        ),
    ]


@pytest.mark.parametrize("name", by_day(WAYS, ["whole"]))
def test_fixed_answers_are_compared_at_all_tokens(work: Path, name: str) -> None:
    run = done(work, *fixed(name), f"name={name}")
    _, mix, k = WAYS[name]
    lines = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    tokenizer = char_tokenizer()
    rows = [
        (row["prompt"], [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id])
        for row in lines
    ]
    wanted, values = compared_by_torch(work, rows, mix, k, STEPS)
    found = [row["train/divergence"] for row in metrics(run)]
    np.testing.assert_allclose(found, values, rtol=2e-4)
    near(load_model(run), wanted, 2e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fixed_answers_have_the_teachers_of_their_sources(work: Path, layout: str) -> None:
    lines = [json.loads(line) for line in (work / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "data_source": "abc"[number % 3]} for number, row in enumerate(lines)]
    write_rows(work / f"by-source-{layout}.jsonl", rows)
    teachers = "distill.teachers=[{path: initial, source: b}, {path: teacher, source: a}]"
    argv = [*fixed("top"), teachers, f"data.train=[by-source-{layout}.jsonl]"]
    run = done(work, *argv, f"name=by-source-{layout}", *LAYOUTS[layout], world=2)
    tokenizer = char_tokenizer()
    answers = [
        (row["prompt"], [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id])
        for row in rows
    ]
    names = [{"a": "teacher", "b": "student"}.get(row["data_source"]) for row in rows]
    wanted, values = compared_by_torch(work, answers, 1.0, 5, STEPS, names=names)
    found = [row["train/divergence"] for row in metrics(run)]
    np.testing.assert_allclose(found, values, rtol=5e-4)
    near(load_model(run), wanted, 5e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["whole", "top"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_compare_what_one_does(work: Path, name: str, layout: str) -> None:
    whole = work / "runs" / f"one-{name}"
    if not whole.exists():
        done(work, *fixed(name), f"name=one-{name}")
    argv = [*fixed(name), f"name={name}-{layout}", *LAYOUTS[layout]]
    assert_same(done(work, *argv, world=2), whole)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "temperature"), [("whole", 1.0), ("whole", 0.5), ("top", 0.5)])
def test_own_completions_are_compared_at_all_tokens(
    work: Path, name: str, temperature: float
) -> None:
    tokens, mix, k = WAYS[name]
    argv = [f"distill.tokens={tokens}", f"distill.mix={mix}", f"distill.k={k or 64}"]
    argv += ["distill.weight=1", "batch.prompts=2", f"rollout.temperature={temperature}"]
    run = done(work, *RUN, *argv, f"name=own-{name}-{temperature}")
    ids = char_tokenizer().get_vocab()
    rows = [
        (row["prompt"], [ids[text] for text in row["tokens"]["texts"]])
        for step in range(STEPS)
        for row in rollouts(run, step + 1)
    ]
    wanted, values = compared_by_torch(work, rows, mix, k, STEPS, temperature)
    found = [row["actor/divergence"] for row in metrics(run)]
    np.testing.assert_allclose(found, values, rtol=2e-4)
    near(load_model(run), wanted, 2e-4)


@pytest.mark.nightly
def test_the_likelihood_has_the_rest_of_the_loss(work: Path) -> None:
    run = done(work, *fixed("whole"), "name=mixed", "distill.weight=0.25", "model.lora.rank=4")
    plain = done(work, *fixed("whole"), "name=plain", "distill.teachers=[]", "model.lora.rank=4")
    mixed = metrics(run)[0]
    nll = metrics(plain)[0]["train/loss"]
    wanted = 0.75 * nll + 0.25 * mixed["train/divergence"]
    assert mixed["train/loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["distill.tokens=sampled"], ["distill.tokens", "burnish rl"]),
        (["distill.weight=2"], ["distill.weight"]),
        (["distill.teachers=[{path: teacher, source: a}, {path: initial}]"], ["topk"]),
        (["engine.kind=megatron"], ["megatron", "distill.tokens"]),
        (["distill.teachers=[{path: initial, prompt_column: prompt}]"], ["prompt_column"]),
    ],
)
def test_what_fixed_answers_cannot_have(work: Path, argv: list[str], facts: list[str]) -> None:
    code, output = burnish(work, *fixed("whole"), "name=wrong", *argv, "--dry-run")
    assert code == 2, output
    assert [fact for fact in facts if fact not in output.partition("error: ")[2]] == [], output
    assert not (work / "runs/wrong").exists()
