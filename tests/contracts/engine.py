"""What every engine owes: the numbers of one plain transformers model in one process.

An implementation's tests call `train_by_hand` for the oracle and `train` for the engine, and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.algorithms.base import SparseLoss
from burnish.algorithms.loss import policy_loss_fn
from burnish.config.algorithm import AlgorithmConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from burnish.records import Batch, Example, MicroBatch, TokenOutputs
from burnish.tracking.stats import Mean, Stats

LR = 1e-3
STEPS = 3
BETAS = (0.9, 0.95)
CLIP = 0.5


def make_examples(
    vocab: int, lengths: Sequence[int] = (9, 4, 12, 2, 7, 5), seed: int = 0
) -> list[Example]:
    """Sequences of random tokens, about two thirds of them trained on."""
    rng = np.random.default_rng(seed)
    examples = []
    for length in lengths:
        mask = rng.random(length) < 0.67
        mask[0], mask[-1] = False, True
        examples.append(Example(rng.integers(3, vocab, length), mask))
    return examples


def examples_that_begin_alike(vocab: int) -> list[Example]:
    """Five sequences, of which two begin alike."""
    made = make_examples(vocab, (9, 4, 12, 2, 7))
    shared = np.concatenate([made[2].token_ids[:8], made[0].token_ids[8:]])
    return [replace(made[0], token_ids=shared), *made[1:]]


def cut(
    examples: Sequence[Example], layout: Layout, per_micro: int, temperature: float = 1.0
) -> Batch:
    """A batch in micro-batches of at most `per_micro` sequences; ranks with nothing left run filler."""
    shares = [range(rank, len(examples), layout.data_size) for rank in range(layout.data_size)]
    rounds = max(-(-len(share) // per_micro) for share in shares)
    mine = list(shares[layout.data_rank])
    chunks = [mine[i * per_micro : (i + 1) * per_micro] for i in range(rounds)]
    tokens = sum(int(example.loss_mask.sum()) for example in examples)
    filler = Example(np.array([3, 4]), np.array([False, False]))
    micros = [
        replace(
            _pack([examples[i] for i in chunk] or [filler], tokens, len(examples)),
            temperature=temperature,
        )
        for chunk in chunks
    ]
    total = sum(len(example.token_ids) for example in examples)
    numbers = tuple(tuple(chunk) or (-1,) for chunk in chunks)
    return Batch(tuple(micros), numbers, tokens, len(examples), total)


def _pack(examples: Sequence[Example], tokens: int, sequences: int) -> MicroBatch:
    lengths = [len(example.token_ids) for example in examples]
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate([e.token_ids for e in examples])),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        loss_mask=torch.from_numpy(np.concatenate([e.loss_mask for e in examples])),
        num_tokens=tokens,
        num_sequences=sequences,
    )


def loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Token mean of the negative log-prob minus a little of the entropy, so both have a gradient."""
    terms = torch.where(micro.loss_mask, -outputs.logprobs - 0.01 * outputs.entropy, 0.0)
    total = terms.sum() / micro.num_tokens
    return total, Stats(nll=Mean(-outputs.logprobs.detach().sum(), micro.loss_mask.sum()))


def train(
    engine: Engine, examples: Sequence[Example], per_micro: int, seed: int = 0
) -> dict[str, Any]:
    """Some steps; what came of them on this rank."""
    batch = replace(cut(examples, engine.layout, per_micro), seed=seed)
    losses, norms, gradients = [], [], None
    for _ in range(STEPS):
        losses.append(engine.forward_backward(batch, loss).values_by_name()["loss"])
        norms.append(engine.optim_step(LR).values_by_name()["grad_norm"])
        gradients = gradients or _gradients(engine)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "shapes": {s.spec.name: s.spec.shape for part in Part for s in engine.shards(part)},
        "weights": [(s.spec.name, s.box, s.tensor.clone()) for s in engine.shards(Part.WEIGHTS)],
        "slots": [(s.spec.name, s.box, s.tensor.clone()) for s in engine.shards(Part.TRAINING)],
        "logprobs": _by_example(batch, engine.forward(batch)),
        "predictions": engine.passed.predictions / engine.layout.sharing,
    }


def require_same_when_sparse(make: Callable[[], Engine], per_micro: int) -> None:
    """Whether an engine knows of tokens without a gradient or not, a GRPO step's numbers and gradients are the same.

    Of sequences that begin alike the first has none, and of the others some tokens, so predictions are shared by both.
    """
    loss = policy_loss_fn(AlgorithmConfig(), 16)
    assert isinstance(loss, SparseLoss)
    found = []
    for either in (loss.function, loss):
        engine = make()
        batch = cut(examples_that_begin_alike(25), engine.layout, per_micro)
        advantages = []
        for micro, numbers in zip(batch.microbatches, batch.examples, strict=True):
            of_tokens = (micro.input_ids % 3 - 1).float()
            if numbers[0] == 0:
                of_tokens[: micro.cu_seqlens[1]] = 0
            advantages.append(of_tokens)
        batch = batch.with_field("advantages", advantages)
        stats = engine.forward_backward(batch, either).values_by_name()
        stats = {**stats, **engine.optim_step(LR).values_by_name()}
        found.append((stats, _gradients(engine)))
        engine.close()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6, nan_ok=True)
    for dense, sparse in zip(found[0][1], found[1][1], strict=True):
        assert dense[:2] == sparse[:2]
        assert_relative(sparse[2], dense[2], 1e-5, dense[0])


def _gradients(engine: Engine) -> list[tuple[str, Any, Tensor]]:
    """By name and box, those that a first step clipped: AdamW's first moment is the part 1 - β₁ of them."""
    return [
        (shard.spec.name.removeprefix("exp_avg/"), shard.box, shard.tensor / (1 - BETAS[0]))
        for shard in engine.shards(Part.TRAINING)
        if shard.spec.name.startswith("exp_avg/")
    ]


def _by_example(batch: Batch, outputs: Sequence[TokenOutputs]) -> dict[int, tuple[Tensor, Tensor]]:
    found = {}
    for micro, numbers, out in zip(batch.microbatches, batch.examples, outputs, strict=True):
        ends = micro.cu_seqlens.tolist()
        for number, start, end in zip(numbers, ends[:-1], ends[1:], strict=True):
            if number >= 0:
                found[number] = (out.logprobs[start:end].cpu(), out.entropy[start:end].cpu())
    return found


def train_by_hand(model: PreTrainedModel, examples: Sequence[Example]) -> dict[str, Any]:
    """The oracle: a plain model, one sequence at a time, torch's AdamW and clipping of what is trained."""
    model = model.float()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_matrix = {n: p.ndim >= 2 and not n.endswith("bias") for n, p in trained.items()}
    decayed = [p for name, p in trained.items() if is_matrix[name]]
    plain = [p for name, p in trained.items() if not is_matrix[name]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
    tokens = sum(int(example.loss_mask.sum()) for example in examples)
    losses, norms, gradients = [], [], {}
    for _ in range(STEPS):
        total = torch.zeros(())
        for example in examples:
            logprobs, entropy = score_by_hand(model, example)
            mask = torch.from_numpy(example.loss_mask)
            total = total + torch.where(mask, -logprobs - 0.01 * entropy, 0.0).sum() / tokens
        total.backward()
        losses.append(total.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items()}
        adamw.step()
        adamw.zero_grad()
    slots = {
        f"{slot}/{name}": adamw.state[p][slot]
        for slot in ("exp_avg", "exp_avg_sq")
        for name, p in trained.items()
    }
    with torch.no_grad():
        logprobs = {i: score_by_hand(model, example) for i, example in enumerate(examples)}
    weights = {name: p.detach() for name, p in trained.items()}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": weights,
        "slots": slots,
        "logprobs": logprobs,
        "predictions": STEPS * tokens,
    }


def score_by_hand(model: PreTrainedModel, example: Example) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of an example's tokens, where the mask is set, from plain logits."""
    ids = torch.from_numpy(example.token_ids)[None]
    log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    chosen = log_p.gather(1, ids[0, 1:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    mask = torch.from_numpy(example.loss_mask)[1:]
    zero = torch.zeros(1)
    return (
        torch.cat([zero, torch.where(mask, chosen, 0.0)]),
        torch.cat([zero, torch.where(mask, entropy, 0.0)]),
    )


def whole(
    pieces: Sequence[Sequence[tuple[str, Any, Tensor]]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Put every rank's (name, box, tensor) together; NaN stays where nobody held anything. Who holds the same has the same bits."""
    built: dict[str, Tensor] = {}
    for rank, held in enumerate(pieces):
        for name, box, tensor in held:
            there = built.setdefault(name, torch.full(shapes[name], torch.nan))[box.slices]
            own = tensor.float().cpu()
            is_same = torch.equal(there.where(~there.isnan(), own), own)
            assert is_same, f"rank {rank} has another {name} than those before it, or one with NaN"
            there.copy_(own)
    return built


def require_learnt(rough: Sequence[float], exact: Sequence[float]) -> None:
    """Losses in bf16 fall as those in fp32 do, by as much, and are not the same: weights that were one step behind would show."""
    assert rough == pytest.approx(exact, rel=2e-2)
    assert rough != pytest.approx(exact, rel=1e-6), "this was not computed in bf16"
    assert exact[0] - exact[-1] > 0.1 * exact[0]
    assert rough[0] - rough[-1] == pytest.approx(exact[0] - exact[-1], rel=2e-2)


def require_alike(
    ranks: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any], parts: Sequence[str], what: str
) -> None:
    """What `train` gave on all ranks is what `train_by_hand` did, `parts` of which have canonical names: to 1e-5 relative, tensor by tensor.

    Ranks that share a sequence say the same bits of it.
    """
    first: dict[int, Sequence[Tensor]] = {}
    for found in ranks:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5), what
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5), what
        for number, said in found["logprobs"].items():
            for tensor, by_hand in zip(said, wanted["logprobs"][number], strict=True):
                assert_relative(tensor, by_hand, 1e-5, f"{what}: sequence {number}")
            assert all(map(torch.equal, said, first.setdefault(number, said))), what
    seen = {number for found in ranks for number in found["logprobs"]}
    assert seen == set(wanted["logprobs"])
    shapes = {name: shape for found in ranks for name, shape in found["shapes"].items()}
    for part in parts:
        built = whole([found[part] for found in ranks], shapes)
        assert built.keys() == wanted[part].keys()
        for name, tensor in wanted[part].items():
            assert_relative(built[name], tensor, 1e-5, f"{what}: {part} of {name}")


def assert_relative(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """2-norm of the difference over the 2-norm of what was wanted."""
    error = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert error <= tolerance, f"{what}: relative error {float(error):.2e} > {tolerance:.0e}"
