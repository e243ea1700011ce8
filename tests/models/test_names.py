import pytest
import torch
from safetensors.torch import load_file
from support.models.tiny import FAMILIES, save_tiny, tiny_config, tiny_model
from support.ranks.processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from burnish.errors import IncompatibleError
from burnish.models.loading import FreshSource
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards, regions, tensor_specs, tied_names
from burnish.models.scorer import Scorer, ScoringPlan

OTHERS = {
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    for name, changes in OTHERS.items():
        monkeypatch.setitem(FAMILIES, name, changes)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_names_shapes_and_values_are_those_that_transformers_saves(tmp_path, family):
    saved = load_file(save_tiny(tmp_path, family, torch.float32) / "model.safetensors")
    model = tiny_model(family)
    meta = build_on_meta(model.config)
    specs = {spec.name: spec for spec in tensor_specs(meta)}
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert {name: spec.dtype for name, spec in specs.items()} == {
        name: tensor.dtype for name, tensor in saved.items()
    }
    for shard in model_shards(model):
        assert shard.box.sizes == shard.spec.shape
        assert torch.equal(shard.tensor, saved.pop(shard.spec.name))
    assert not saved


def test_dtype_of_specs():
    meta = build_on_meta(tiny_config("qwen3_moe"))
    assert {spec.dtype for spec in tensor_specs(meta)} == {torch.float32}


def test_shards_are_views_of_live_memory():
    model = tiny_model("qwen3_moe")
    for shard in model_shards(model):
        shard.tensor.fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_tied_weights():
    assert tied_names(build_on_meta(tiny_config("llama"))) == {}
    tied = build_on_meta(tiny_config("llama", tie_word_embeddings=True))
    assert tied_names(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {spec.name for spec in tensor_specs(tied)}


def test_other_tensors_under_the_names_of_their_parameters():
    model = tiny_model("qwen3_moe")
    slots = {
        name: torch.zeros_like(p) for name, p in model.named_parameters() if "norm" not in name
    }
    shards = list(model_shards(model, slots, prefix="exp_avg/"))
    for shard in shards:
        shard.tensor.fill_(1.0)
    assert all((slot == 1.0).all() for slot in slots.values())
    names = [region.name for region in regions(model) if "norm" not in region.name]
    assert [shard.spec.name for shard in shards] == [f"exp_avg/{name}" for name in names]


def test_what_is_no_box_is_refused():
    class Moved(type(build_on_meta(tiny_config("qwen3")))):
        pass

    convert = WeightConverter("mlp.turned.weight", "mlp.up_proj.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("Moved", [convert])
    with torch.device("meta"):
        model = Moved(tiny_config("qwen3"))
    with pytest.raises(IncompatibleError, match=r"mlp\.turned\.weight"):
        regions(model)


def sharded_pieces(layout, family, changes):
    config = tiny_config(family, **changes)
    scorer = Scorer(build_on_meta(config))
    mesh = init_device_mesh("cpu", (layout.world,))
    for layer in scorer.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh)
    cpu = torch.device("cpu")
    parts = regions(scorer.model)
    assert parts == regions(build_on_meta(config))
    materialize(scorer, cpu)
    FreshSource(config, seed=4).fill(model_shards(scorer.model, parts=parts))
    pieces = [
        (shard.spec.name, shard.box, shard.tensor.clone()) for shard in model_shards(scorer.model)
    ]
    ids = torch.arange(3, 15)
    logprobs = scorer(ScoringPlan.of(ids, torch.tensor([0, 7, 12]))).logprobs
    logprobs.sum().backward()
    return pieces, logprobs.detach()


@pytest.mark.parametrize(
    ("family", "world", "changes"),
    [
        ("qwen3", 2, {}),
        ("qwen3_moe", 3, {"vocab_size": 31}),  # uneven pieces, and experts for two ranks only
    ],
)
def test_the_shards_of_all_ranks_make_up_the_model(family, world, changes):
    config = tiny_config(family, **changes)
    whole = build_on_meta(config)
    materialize(whole, torch.device("cpu"))
    FreshSource(config, seed=4).fill(model_shards(whole))
    expected = {shard.spec.name: shard.tensor for shard in model_shards(whole)}
    covered = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    results = run_ranks(sharded_pieces, world, family, changes)
    for pieces, logprobs in results:
        for name, box, tensor in pieces:
            assert tensor.numel() > 0
            assert torch.equal(tensor, expected[name][box.slices]), name
            covered[name][box.slices] += 1
        torch.testing.assert_close(logprobs, results[0][1])
    for name, count in covered.items():
        assert (count == 1).all(), name
