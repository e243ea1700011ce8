"""vLLM against the built-in generator, the oracle, and against plain transformers. Runs in .venv-vllm (see the Makefile)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import (
    GeneratorContract,
    assert_same,
    chosen,
    logits_by_hand,
    make_requests,
    take_turns,
)
from support.models.adapters import EXPERTS, published_beside
from support.models.generators import builtin, make_generator
from support.models.servers import TOKEN, served, serving
from support.models.tiny import tiny_model
from support.ranks.waiting import until_stopped
from transformers import AutoConfig, PreTrainedModel

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError, UsageError
from burnish.models.names import model_shards
from burnish.records import Request
from burnish.rollout.base import Decode, Generator, Sampling
from burnish.rollout.builtin.sampling import draw, uniforms
from burnish.rollout.client import ServedGenerator
from burnish.rollout.vllm.vllm_generator import VllmGenerator

pytest.importorskip("vllm", exc_type=ImportError)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),  # vLLM has its own
]
CPU = torch.device("cpu")
# vLLM's attention on CPUs wants heads of 32 and more.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}


def made(family: str = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny_model(family, seed, **{**SIZES, **changes})


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[Any, VllmGenerator]]:
    """vLLM takes seconds to start, so tests share it where only weights differ."""
    held: dict[Any, VllmGenerator] = {}
    vllm(held, made("mixtral"))  # first, as only then are there groups for mixtures
    yield held
    held.popitem()[1].close()  # which closes the groups of all


def vllm(
    engines: dict[Any, VllmGenerator],
    model: PreTrainedModel,
    *,
    slots: int = 8,
    eos: Sequence[int] = (),
    version: int = 1,
    decode: Decode | None = None,
) -> VllmGenerator:
    """vLLM with the model's weights."""
    key = model.config.to_json_string(), slots, tuple(eos), decode
    if key not in engines:
        engines[key] = started(model, slots=slots, eos_token_ids=eos, decode=decode)
    engines[key].load_weights(Publication(model_shards(model)), version)
    return engines[key]


def started(model: Any, **options: Any) -> VllmGenerator:
    """vLLM without weights."""
    given = {"slots": 8, "eos_token_ids": (), "decode": None, **options}
    return VllmGenerator(model.config, layout=Layout(), device=CPU, dtype=torch.float32, **given)


class TestContract(GeneratorContract):
    @pytest.fixture(autouse=True)
    def _engines(self, engines: dict[Any, VllmGenerator]) -> None:
        self.engines = engines

    def make(self, model: PreTrainedModel, **options: Any) -> Generator:
        return vllm(self.engines, model, **options)

    def model(self, family: str = "qwen3") -> PreTrainedModel:
        if family == "olmo2":
            pytest.skip("vLLM 0.32 cannot run it on a CPU")
        return made(family)


SAMPLINGS = [
    Sampling(24, seed=3, step=2),
    Sampling(24, temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, seed=4),
    Sampling(24, temperature=0.0),
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"moe_intermediate_size": 32}),
        ("qwen2", {}),
        ("llama", {}),
        ("gemma2", {}),
        ("granite_swa", {}),
    ],
    ids=[
        "tied",
        "untied",
        "mixture whose experts vLLM pads",
        "mixture",
        "biases",
        "llama",
        "soft caps",
        "sinks",
    ],
)
def test_the_built_in_generator_samples_the_same_before_and_after_new_weights(
    engines: dict[Any, VllmGenerator], family: str, changes: dict[str, Any]
) -> None:
    """The same prompts, longer than a block of vLLM's prefix cache, with two sets of weights."""
    requests = make_requests((1, 33, 70, 40), samples=4)
    for version, model in enumerate((made(family, 0, **changes), made(family, 1, **changes))):
        ours, oracle = vllm(engines, model, version=version), builtin(model, slots=16)
        for sampling in SAMPLINGS:
            found = ours.generate(requests, sampling)
            assert_same(found, oracle.generate(requests, sampling), atol=5e-5)
            assert {c.weights_version for c in chain(*found)} == {version}
        request, group = requests[2], ours.generate(requests, SAMPLINGS[0])[2]
        for each in group:
            want = logits_by_hand(model, request, each).log_softmax(-1)
            np.testing.assert_allclose(each.logprobs, chosen(want, each), atol=1e-5)


def test_a_turn_reads_only_the_tokens_after_the_last_full_block(
    engines: dict[Any, VllmGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what vLLM says it took from its cache. What the model said is kept too, and new weights read all of it again."""
    ours = vllm(engines, made(), eos=range(3, 9), slots=16)
    step = ours._engine.step
    taken: dict[tuple[int, ...], int] = {}

    def counted() -> Any:
        outputs = step()
        taken.update((tuple(each.prompt_token_ids), each.num_cached_tokens) for each in outputs)
        return outputs

    monkeypatch.setattr(ours._engine, "step", counted)
    turns = take_turns(ours, Sampling(40, seed=4, keeps=True), turns=4)
    wanted = {}
    for request, completion in turns:
        read = [*request.token_ids, *completion.token_ids][:-1]
        for later, _ in turns:
            if later.token_ids[: len(read)].tolist() == read and later.turn == request.turn + 1:
                wanted[tuple(later.token_ids)] = len(read) // 32 * 32
    assert {known: taken[known] for known in wanted} == wanted
    assert {*wanted.values()} >= {0, 32, 64}
    vllm(engines, made(seed=1), eos=range(3, 9), slots=16, version=2)
    last, _ = turns[-1]
    ours.generate([last], Sampling(2))
    assert taken[tuple(last.token_ids)] == 0


def test_gpt_oss_whose_new_weights_vllm_loses_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="gpt-oss"):
        started(made("gpt_oss", intermediate_size=64))


def letters(ids: Sequence[int]) -> str:
    """A text of one letter per token, of few letters."""
    return "".join("abcdefg"[token % 7] for token in ids)


@pytest.mark.parametrize("strings", [("ab",), ("cd", "gfa"), ("a", "ddd")])
def test_stop_strings_and_ids_end_as_the_built_in_generator_ends(
    engines: dict[Any, VllmGenerator], strings: tuple[str, ...]
) -> None:
    model, requests = made(), make_requests(samples=6)
    sampling = Sampling(30, stop_strings=strings, stop_token_ids=(11, 12), seed=1)
    oracle = builtin(model, slots=16, eos=(5,), decode=letters).generate(requests, sampling)
    assert {c.stop_reason for c in chain(*oracle)} == {"stop", "length"} or strings[0] == "a"
    ours = vllm(engines, model, eos=(5,), decode=letters)
    assert_same(ours.generate(requests, sampling), oracle)
    assert not ours._engine.has_unfinished_requests()


def test_too_little_memory_for_all_changes_nothing(
    engines: dict[Any, VllmGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops completions that run, and reads what they have again later."""
    model, requests = made(), make_requests((40, 30, 20), samples=4)
    token = 2 * 2 * 2 * 32 * 4
    monkeypatch.setattr(
        "burnish.rollout.vllm.vllm_generator.free_memory", lambda _: 8 * 32 * token / 0.4
    )
    few: dict[Any, VllmGenerator] = {}
    engines["few"] = ours = vllm(few, model)
    found = ours.generate(requests, Sampling(60, seed=8))
    scheduler = ours._engine.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_config.num_blocks == 9 * 160 // 8 // 32
    assert_same(found, builtin(model, slots=16).generate(requests, Sampling(60, seed=8)))


def test_a_model_that_memory_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.rollout.vllm.vllm_generator.free_memory", lambda _: 1e5)
    with pytest.raises(IncompatibleError, match=r"rollout\.slots"):
        vllm({}, made())


def test_logits_that_are_not_finite_are_refused(engines: dict[Any, VllmGenerator]) -> None:
    model = made()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    ours, requests = vllm(engines, model), [Request(0, np.array([5, 6]), samples=2)]
    with pytest.raises(BurnishError, match="finite"):
        ours.generate(requests, Sampling(4))
    vllm(engines, made())  # and are not in the cache any more
    assert_same(
        ours.generate(requests, Sampling(4)),
        builtin(made(), slots=16).generate(requests, Sampling(4)),
    )


class TestWeights:
    def test_pieces_of_rows_in_any_order(self, engines: dict[Any, VllmGenerator]) -> None:
        model = made("qwen3_moe")
        ours = vllm(engines, made("qwen3_moe", 1))
        ours.load_weights(Publication(list(halves(model))[::-1]), 5)
        assert_same(
            ours.generate(make_requests(), Sampling(9)),
            builtin(model, slots=16).generate(make_requests(), Sampling(9)),
        )

    def test_new_ones_in_the_middle_of_completions_draw_the_rest(
        self, engines: dict[Any, VllmGenerator]
    ) -> None:
        """vLLM reads again what completions have, so the rest is as if the new weights had read all of it."""
        first, second = made(seed=1), made(seed=2)
        ours, steps = vllm(engines, first, slots=2), 0

        def watch(ended: int) -> None:
            nonlocal steps
            steps += 1
            if steps == 4:
                ours.load_weights(Publication(model_shards(second)), 5)

        requests, sampling = make_requests((40, 3, 5, 33), samples=1), Sampling(8)
        found = [each for (each,) in ours.generate(requests, sampling, watch)]
        before = [each for (each,) in builtin(first, slots=16).generate(requests, sampling)]
        after = builtin(second, slots=16).generate(requests, sampling)
        assert [each.versions.tolist() for each in found[:2]] == [[1] * 4 + [5] * 4] * 2
        for request, one, other in zip(requests, found[:2], before, strict=False):
            np.testing.assert_array_equal(one.token_ids[:4], other.token_ids[:4])
            np.testing.assert_allclose(one.logprobs[:4], other.logprobs[:4], atol=1e-5)
            want = chosen(logits_by_hand(second, request, one).log_softmax(-1), one)
            np.testing.assert_allclose(one.logprobs[4:], want[4:], atol=1e-5)
        assert_same([[each] for each in found[2:]], after[2:])

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice"])
    def test_what_does_not_fit_is_named_and_leaves_no_weights(
        self, engines: dict[Any, VllmGenerator], fault: str
    ) -> None:
        model, name = made(), "model.layers.1.self_attn.k_proj.weight"
        ours, shards = vllm(engines, model), list(model_shards(made(seed=1)))
        index = next(i for i, shard in enumerate(shards) if shard.spec.name == name)
        other = {
            "missing": [],
            "unknown": [Shard(TensorSpec("model.x", (1,), torch.float32), whole((1,)), ONE)],
            "shape": [Shard(TensorSpec(name, (1,), torch.float32), whole((1,)), ONE)],
            "twice": [shards[index]] * 2,
        }[fault]
        with pytest.raises(IncompatibleError, match="model.x" if fault == "unknown" else name):
            ours.load_weights(Publication([*shards[:index], *other, *shards[index + 1 :]]), 2)
        with pytest.raises(UsageError):
            ours.generate(make_requests(), Sampling(4))
        again = vllm(engines, model)
        assert_same(
            again.generate(make_requests(), Sampling(9)),
            builtin(model, slots=16).generate(make_requests(), Sampling(9)),
        )

    @pytest.mark.parametrize("tied", [True, False])
    def test_checksums_show_a_head_and_a_layer_that_keep_old_weights(
        self, engines: dict[Any, VllmGenerator], tied: bool
    ) -> None:
        """Those that vLLM multiplies with, not the parameters they were packed from."""
        models = [made(seed=seed, tie_word_embeddings=tied) for seed in (0, 1)]
        ours = vllm(engines, models[0])
        [packed] = ours._engine.apply_model(lambda model: packed_layers(model))
        vllm(engines, models[1])
        wanted = {shard.spec.name: shard.checksum() for shard in model_shards(models[1])}
        assert {wanted[spec.name] == digest for spec, digest in ours.checksums()} == {True}
        ours._engine.apply_model(lambda model: packed_layers(model, packed))
        stale = {spec.name for spec, digest in ours.checksums() if wanted[spec.name] != digest}
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        assert stale == {head, "model.layers.1.mlp.down_proj.weight"}


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", LoraConfig(rank=4, alpha=8.0)),
        ("qwen2", LoraConfig(rank=3, alpha=5.0, rslora=True, targets=["v_proj", "o_proj"])),
    ],
    ids=["all layers", "some layers"],
)
def test_an_adapter_beside_the_model(
    engines: dict[Any, VllmGenerator], family: str, lora: LoraConfig
) -> None:
    """As the built-in generator computes with it, and as the merged model does; the model's own weights are read once."""
    lora = lora.model_copy(update={"publish": "adapter"})
    config, requests = made(family).config, make_requests((40, 3, 70), samples=2)
    engines[family, "lora"] = ours = started(made(family), lora=lora)
    oracle = make_generator(config, Layout(), lora=lora)
    for version, factor in enumerate((1.0, -2.0)):
        weights = published_beside(made(family), lora, factor)
        oracle.load_weights(weights, version)
        fixed = weights.fixed if version == 0 else ()
        ours.load_weights(Publication(weights.changing, fixed), version)
        merged = make_generator(config, Layout())
        merged.load_weights(published_beside(made(family), lora, factor, merged=True), version)
        for sampling in SAMPLINGS:
            found = ours.generate(requests, sampling)
            for each in (oracle, merged):
                assert_same(found, each.generate(requests, sampling), atol=1e-4)
        wanted = {shard.spec.name: shard.checksum() for shard in oracle._model.shards()}
        told = {spec.name: digest for spec, digest in ours.checksums()}
        exact = lora.alpha == 8.0
        assert wanted.items() >= told.items()
        assert {n for n in wanted if "lora_A" in n or (exact and "lora_B" in n)} <= told.keys()
    again = Publication(weights.changing, published_beside(made(family, 1), lora).fixed, anew=True)
    ours.load_weights(again, 2)
    oracle.load_weights(again, 2)
    found, other = (each.generate(requests, SAMPLINGS[0]) for each in (ours, oracle))
    assert_same(found, other, atol=1e-4)


@pytest.mark.parametrize("targets", [EXPERTS, ["q_proj"]])
def test_an_adapter_that_vllm_does_not_compute_is_refused(targets: list[str]) -> None:
    """Of experts, and on a CPU beside them."""
    lora = LoraConfig(rank=4, targets=targets, publish="adapter")
    with pytest.raises(IncompatibleError, match=r"model\.lora\.publish"):
        started(made("qwen3_moe"), lora=lora)


def test_an_adapter_beside_the_model_is_refused_in_fp32_on_a_gpu() -> None:
    """vLLM's kernel takes fp16 and bf16."""
    asked, gpu = (["q_proj"], made().config), torch.device("cuda", 0)
    with pytest.raises(IncompatibleError, match=r"engine\.precision"):
        VllmGenerator.require_adaptable(*asked, gpu, torch.float32)
    VllmGenerator.require_adaptable(*asked, gpu, torch.bfloat16)
    VllmGenerator.require_adaptable(*asked, CPU, torch.float32)


def test_pieces_of_a_merged_adapter_are_loaded_with_it(engines: dict[Any, VllmGenerator]) -> None:
    """They compute what they are when they are read."""
    lora, requests = LoraConfig(rank=4), make_requests((40, 3))
    ours, oracle = vllm(engines, made()), make_generator(made().config, Layout())
    for each in (ours, oracle):
        each.load_weights(published_beside(made(), lora, merged=True), 2)
    assert_same(*(each.generate(requests, Sampling(9)) for each in (ours, oracle)))


def test_sleep_wakes_weights_when_they_come_and_the_cache_when_it_is_needed(
    engines: dict[Any, VllmGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a worker that sleeps in name only."""
    model, requests, calls = made(), make_requests((40, 3)), []
    ours = vllm(engines, model)
    wanted = ours.generate(requests, Sampling(9))
    worker = ours._engine.model_executor.driver_worker.worker
    monkeypatch.setattr(worker, "sleep", lambda level: calls.append(level))
    monkeypatch.setattr(worker, "wake_up", lambda tags: calls.extend(tags))
    monkeypatch.setattr(ours, "_sleeps", True)
    ours.release()
    ours.release()
    with pytest.raises(UsageError):
        ours.generate(requests, Sampling(9))
    for version in (2, 3):
        ours.load_weights(Publication(model_shards(model)), version)
    assert calls == [2, "weights"]
    ours.release()
    ours.load_weights(Publication(model_shards(model)), 4)
    for held in ours._engine.model_executor.driver_worker.worker.model_runner.kv_caches:
        held.fill_(torch.nan)  # what memory may hold that was another's
    for _ in range(2):
        assert_same(ours.generate(requests, Sampling(9)), wanted)
    assert calls == [2, "weights", 2, "weights", "kv_cache"]


def packed_layers(model: Any, new: Sequence[Any] = ()) -> list[Any]:
    """What two of vLLM's layers multiply with; `new` takes its place."""
    layers = [model.lm_head, model.model.layers[1].mlp.down_proj]
    for layer, packed in zip(layers, new, strict=False):
        layer.cpu_linear = packed
    return [layer.cpu_linear for layer in layers]


def halves(model: PreTrainedModel) -> Iterator[Shard]:
    """The model's tensors, each in two pieces of rows."""
    for shard in model_shards(model):
        cut = len(shard.tensor) // 2
        for start, rows in ((0, shard.tensor[:cut]), (cut, shard.tensor[cut:])):
            offsets = (start, *[0] * (rows.dim() - 1))
            yield Shard(shard.spec, Box(offsets, tuple(rows.shape)), rows)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_those_of_the_built_in_generator(
    engines: dict[Any, VllmGenerator], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prefixes that others have read too, with few slots, where memory drops completions, and with new weights."""
    requests, token = make_requests((40, 70, 20), samples=3), 2 * 2 * 2 * 32 * 4
    monkeypatch.setattr(
        "burnish.rollout.vllm.vllm_generator.free_memory", lambda _: 16 * 32 * token / 0.4
    )
    changes = {"sliding_window": None} if family == "mixtral" else {}
    ours = engines[family, "routed"] = started(made(family, **changes), experts=True)
    for seed in (0, 1):
        model = made(family, seed, **changes)
        ours.load_weights(Publication(model_shards(model)), seed)
        for sampling in (Sampling(50, seed=5, experts=True), Sampling(30, experts=True)):
            found, oracle = (
                each.generate(requests, sampling) for each in (ours, builtin(model, slots=16))
            )
            assert_same(found, oracle)
            for one, other in zip(chain(*found), chain(*oracle), strict=True):
                assert one.experts is not None
                assert one.experts.dtype == np.uint8
                np.testing.assert_array_equal(one.experts, other.experts)
        assert ours.generate(requests, Sampling(2))[0][0].experts is None


def test_experts_that_nobody_records_are_refused(engines: dict[Any, VllmGenerator]) -> None:
    ours = vllm(engines, made("qwen3_moe"))
    with pytest.raises(UsageError, match="experts"):
        ours.generate(make_requests(), Sampling(4, experts=True))


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_model_that_does_not_tell_its_experts_is_refused(
    engines: dict[Any, VllmGenerator], family: str
) -> None:
    """It has none, or tokens leave its window."""
    with pytest.raises(IncompatibleError, match="experts"):
        started(made(family), experts=True)


def test_a_model_that_vllm_does_not_know_is_refused() -> None:
    config = AutoConfig.for_model("xglm", vocab_size=97, d_model=32, num_layers=1, ffn_dim=32)
    with pytest.raises(IncompatibleError, match="xglm"):
        started(SimpleNamespace(config=config))


def test_the_processor_for_runner_v2_draws_the_same() -> None:
    """With the slots, positions and prompt lengths that vLLM would give it; slots are in another order than rows."""
    from burnish.rollout.vllm import logits_processor_v1, logits_processor_v2

    prompts, slots = torch.tensor([0, 7, 0, 3, 9]), np.array([3, 1, 4])
    states = SimpleNamespace(max_num_reqs=5, prompt_len=SimpleNamespace(np=prompts.numpy()))
    processor = logits_processor_v2.SlotDrawingProcessor(None, states)
    samplings = [Sampling(8), Sampling(8, temperature=0.0), Sampling(8, top_k=4)]
    before = (2, 0, 3)
    for slot, sampling, count in zip(slots, samplings, before, strict=True):
        assert processor.add_request(
            slot,
            logits_processor_v1.request_params(
                sampling, int(slot) * 1001, count, sampling.max_tokens - count
            ),
        )
    drawn = torch.tensor([0, 5, 2])
    context = SimpleNamespace(idx_mapping_np=slots, pos=prompts[slots] + drawn - 1)
    logits = torch.randn(3, 97)
    left = processor.apply(logits.clone(), context)
    for row, sampling in enumerate(samplings):
        number = uniforms(
            torch.tensor([int(slots[row]) * 1001]), drawn[row : row + 1] + before[row]
        )
        want = draw(logits[row : row + 1].clone(), sampling, number)
        two = left[row].topk(2)
        assert int(two.indices[0]) == int(want.tokens)
        sampled, raw = logits_processor_v1.read_draws(
            [float(two.values[0]), *two.values.tolist()], 1
        )
        np.testing.assert_array_equal(sampled, want.sampled_logprobs)
        np.testing.assert_array_equal(raw, want.logprobs)


def test_two_processes_sample_the_same(engines: dict[Any, VllmGenerator]) -> None:
    """With tensor parallelism, before and after new weights."""
    requests, sampling = make_requests((40, 3)), Sampling(12, top_p=0.9, experts=True)
    model, options = made("qwen3_moe"), {"max_length": 60, "tensor_parallel": 2, "experts": True}
    engines["two"] = ours = started(model, **options)
    for seed in (0, 1):
        ours.load_weights(Publication(model_shards(made("qwen3_moe", seed))), seed)
        oracle = builtin(made("qwen3_moe", seed), slots=16)
        found, wanted = (each.generate(requests, sampling) for each in (ours, oracle))
        assert_same(found, wanted)
        for one, other in zip(chain(*found), chain(*wanted), strict=True):
            np.testing.assert_array_equal(one.experts, other.experts)
        held = [(shard.spec.name, shard.checksum()) for shard in oracle._model.shards()]
        assert sorted((spec.name, digest) for spec, digest in ours.checksums()) == sorted(held)
    with pytest.raises(UsageError, match="60"):
        ours.generate(requests, Sampling(21))
    with serving(ours, timeout=60.0) as server:  # each process maps the weights
        generator = served([server], model)
        for seed in (2, 3):
            oracle = builtin(made("qwen3_moe", seed), slots=16)
            generator.load_weights(Publication(model_shards(made("qwen3_moe", seed))), seed)
            assert (server._way, generator._lost) == ("shared memory (cpu)", {})
            assert_same(generator.generate(requests, sampling), oracle.generate(requests, sampling))
            held = [(shard.spec.name, shard.checksum()) for shard in oracle._model.shards()]
            assert sorted((s.name, digest) for s, digest in server.checksums()) == sorted(held)
        fewer = list(model_shards(made("qwen3_moe", 4)))[1:]
        generator = ServedGenerator([server], [shard.spec for shard in fewer], Layout())
        generator.load_weights(Publication(fewer), 4)
        assert "lack" in generator._lost[server]
        assert server.about()["version"] is None


def mapping(maps: bool) -> Callable[[Any], None]:
    """What lets the second process map memory, or not. vLLM's processes get it by value."""

    def change(worker: Any) -> None:
        process = worker.burnish_received.process
        if worker.rank == 1 and maps:
            del process.map
        elif worker.rank == 1:
            process.map = lambda offers: None

    return change


def ending(how: int) -> Callable[[Any], int]:
    """What has the second process get signals as it reads the next wave. It returns the process's id."""

    def change(worker: Any) -> int:
        process = worker.burnish_received.process

        def read(*wave: Any) -> Iterator[Shard]:
            del process.read
            for piece in process.read(*wave):
                os.kill(os.getpid(), how)
                yield piece

        if worker.rank == 1:
            process.read = read
        return os.getpid()

    return change


def test_a_process_that_cannot_map_hangs_or_dies_does_no_harm(
    engines: dict[Any, VllmGenerator],
) -> None:
    """All take the broadcast with it; an engine whose process hangs or dies has no version."""
    requests, sampling = make_requests((40, 3)), Sampling(6)
    engines["ending"] = ours = started(made(), max_length=60, tensor_parallel=2)

    def load(seed: int, way: str) -> None:
        generator.load_weights(Publication(model_shards(made(seed=seed))), seed)
        assert [server._way for server in generator._servers] == [way]
        found = generator.generate(requests, sampling)
        assert_same(found, builtin(made(seed=seed), slots=16).generate(requests, sampling))

    def lose(how: int) -> int:
        [fed] = generator._servers
        fed.timeout = 8.0
        _, pid = ours._call(ending(how))
        generator.load_weights(Publication(model_shards(made())), 2)
        assert [*generator._lost][-1] is fed
        fed.timeout = 60.0
        return int(pid)

    with serving(ours, timeout=60.0) as server:
        again = partial(map, lambda url: (url, (url, TOKEN)))
        generator = served([server], made(), revive=lambda lost, others: dict(again(lost)))
        load(0, "shared memory (cpu)")
        ours._call(mapping(False))
        load(1, "gloo")
        ours._call(mapping(True))
        load(2, "shared memory (cpu)")
        pid = lose(signal.SIGSTOP)
        until_stopped(pid)
        os.kill(pid, signal.SIGCONT)
        load(3, "shared memory (cpu)")
        lose(signal.SIGKILL)
        generator.load_weights(Publication(model_shards(made())), 4)
        assert len(generator._lost) == 3
        assert server.about()["version"] is None
