from itertools import product

import pytest
import torch
from support.models.tiny import FAMILIES, VOCAB, tiny_config, tiny_model
from support.nightly import by_day
from transformers import AutoConfig

from burnish.errors import IncompatibleError
from burnish.models.meta_init import build_on_meta, kept_in_fp32, materialize, position_limit
from burnish.models.scorer import Scorer, ScoringPlan, scored_tokens

LENGTHS = (5, 20, 1, 13, 30, 13)
CPU = torch.device("cpu")


def scorer_of(model, chunk=16):
    """The same weights in a model that Burnish built."""
    ours = build_on_meta(model.config)
    materialize(ours, CPU)
    ours.load_state_dict(model.state_dict())
    return Scorer(ours, chunk)


def packed(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=generator)
    return ids, starts_of(lengths)


def starts_of(lengths):
    """Cumulative lengths, [S + 1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def sampled_group(seed=0):
    """Three samples of one prompt, of which one repeats another and one ends early, beside a prompt of its own."""
    generator = torch.Generator().manual_seed(seed)
    prompt, one, other, alone = (
        torch.randint(3, VOCAB, (count,), generator=generator) for count in (11, 6, 4, 9)
    )
    sequences = [
        torch.cat([prompt, one]),
        alone,
        torch.cat([prompt, other]),
        torch.cat([prompt, one]),
        torch.cat([prompt, one[:3]]),
        torch.cat([prompt, one[:3], other]),
    ]
    lengths = tuple(len(sequence) for sequence in sequences)
    return torch.cat(sequences), lengths


def plain_outputs(model, ids, lengths, temperature):
    """transformers on each sequence alone."""
    logprobs, entropies = [], []
    for sequence in ids.split(list(lengths)):
        logp = (model(sequence[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        zero = logp.new_zeros(1)
        chosen = logp[:-1].gather(1, sequence[1:, None])[:, 0]
        logprobs.append(torch.cat([zero, chosen]))
        entropies.append(torch.cat([zero, -(logp.exp() * logp).sum(-1)[:-1]]))
    return torch.cat(logprobs), torch.cat(entropies)


WAYS = [*product((False, True), ("eager", "sdpa"))]
"""Whether sequences share a prefix, and the kind of attention."""
BY_DAY = [(family, WAYS[way]) for i, family in enumerate(FAMILIES) for way in (i % 2, 2 + i % 2)]


@pytest.mark.parametrize(("family", "way"), by_day(product(FAMILIES, WAYS), BY_DAY))
def test_values_and_gradients_equal_plain_transformers(family, way):
    shared, attention = way
    model = tiny_model(family, attention=attention)
    scorer = scorer_of(model)
    ids, lengths = sampled_group() if shared else (packed()[0], LENGTHS)
    plan = ScoringPlan.of(ids, starts_of(lengths))
    assert (plan.packing.shared is not None) == shared
    upstream = torch.randn(2, len(ids), generator=torch.Generator().manual_seed(1))

    theirs = plain_outputs(model, ids, lengths, temperature=0.8)
    (theirs[0] @ upstream[0] + theirs[1] @ upstream[1]).backward()
    ours = scorer(plan, temperature=0.8)
    (ours.logprobs @ upstream[0] + ours.entropy @ upstream[1]).backward()

    torch.testing.assert_close(ours.logprobs, theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs[1], rtol=1e-5, atol=1e-5)
    expected = dict(model.named_parameters())
    for name, parameter in scorer.model.named_parameters():
        gradient, wanted = parameter.grad, expected[name].grad
        assert wanted.norm() > 0, name
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_cross_entropy_equals_transformers_loss(family):
    model = tiny_model(family)
    ids, starts = packed((24,))
    loss = model(ids[None], labels=ids[None], use_cache=False).loss
    ours = -scorer_of(model)(ScoringPlan.of(ids, starts)).logprobs.sum() / 23
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_reaches_attention_under_gradient_checkpointing(family):
    scorer = scorer_of(tiny_model(family)).train()
    ids, starts = packed()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
        scorer.zero_grad()
        scorer(ScoringPlan.of(ids, starts)).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in scorer.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-5, atol=1e-6)


def test_only_the_rows_asked_for_are_scored():
    scorer = scorer_of(tiny_model())
    ids, starts = packed()
    mask = torch.rand(len(ids), generator=torch.Generator().manual_seed(3)) < 0.3
    whole = scorer(ScoringPlan.of(ids, starts))
    part = scorer(ScoringPlan.of(ids, starts, mask))
    wanted = mask.clone()
    wanted[starts[:-1].long()] = False
    torch.testing.assert_close(part.logprobs[wanted], whole.logprobs[wanted])
    assert (part.logprobs[~wanted] == 0).all()
    assert (part.entropy[~wanted] == 0).all()


def test_a_prediction_has_a_gradient_if_one_of_its_sequences_has():
    ids, lengths = sampled_group()
    starts = starts_of(lengths)
    mask = torch.rand(len(ids), generator=torch.Generator().manual_seed(3)) < 0.8
    learned = torch.rand(len(ids), generator=torch.Generator().manual_seed(4)) < 0.3
    plan = ScoringPlan.of(ids, starts, mask, learned=learned)
    scored = plan.scored.tolist()
    # By the text up to a token, of which equal ones are one prediction.
    begins = [max(s for s in starts.tolist() if s <= token) for token in range(len(ids))]
    texts = [tuple(ids[begins[token] : token + 1].tolist()) for token in range(len(ids))]
    wanted = {texts[token] for token in scored if learned[token]}
    of_row = {int(plan.tree.rows[token]): texts[token] for token in scored}
    found = [of_row[row] for row in plan.predicted[plan.learned].tolist()]
    assert set(found) == wanted
    assert len(found) == len(wanted) < len(plan.predicted)
    assert sum(learned[token] for token in scored) > len(wanted)
    assert ScoringPlan.of(ids, starts, mask, learned=mask).learned is None
    assert ScoringPlan.of(ids, starts, mask, learned=~mask).learned.tolist() == []


def test_all_rows_by_default():
    _, starts = packed()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    assert torch.equal(scored_tokens(starts), positions.nonzero()[:, 0])


def test_no_rows_still_reach_every_parameter():
    scorer = scorer_of(tiny_model())
    ids, starts = packed((4, 3))
    scorer(ScoringPlan.of(ids, starts, torch.zeros(7, dtype=torch.bool))).logprobs.sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
        ("CohereConfig", {"logit_scale": 0.5}),
    ],
)
def test_families_that_scale_logits(kind, changes, caplog):
    import transformers

    config = getattr(transformers, kind)(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids, starts = packed()
    ours = scorer_of(model)(ScoringPlan.of(ids, starts))
    theirs, _ = plain_outputs(model, ids, LENGTHS, temperature=1.0)
    torch.testing.assert_close(ours.logprobs, theirs, rtol=1e-5, atol=1e-5)


def test_a_head_with_a_bias_is_refused():
    from transformers import PhiConfig

    config = PhiConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(IncompatibleError, match="PhiForCausalLM"):
        Scorer(build_on_meta(config))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_the_longest_sequence_chooses_are_refused_where_it_would(kind):
    """Up to the limit a sequence is scored as alone; beyond, it would change those beside it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope |= factors | {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    model = tiny_model(
        "llama", head_dim=8, max_position_embeddings=128 if kind == "longrope" else 32, rope_parameters=rope
    )  # fmt: skip
    assert position_limit(model.config) == 32
    scorer = scorer_of(model)
    ids, lengths = packed((20, 32))[0], (20, 32)
    found = scorer(ScoringPlan.of(ids, starts_of(lengths)))
    expected, _ = plain_outputs(model, ids, lengths, 1.0)
    assert torch.allclose(found.logprobs, expected, atol=1e-4)
    with pytest.raises(IncompatibleError, match=r"(?s)33.*32"):
        scorer(ScoringPlan.of(packed((20, 33))[0], starts_of((20, 33))))


def test_what_transformers_keeps_in_fp32():
    config = AutoConfig.for_model("deepseek_v3")
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert kept_in_fp32(config, [bias, "model.norm.weight"]) == {bias}
    assert kept_in_fp32(tiny_config("llama"), [bias, "model.norm.weight"]) == frozenset()
