import json
import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models.tiny import FAMILIES, WITH_STATE, save_tiny, tiny_config, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mxfp4Config,
)

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.config.schema import ModelConfig
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.models.loading import (
    FreshSource,
    SafetensorsSource,
    composite_of,
    read_model_config,
)
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards, tensor_specs, tied_names

CPU = torch.device("cpu")


def loaded(directory, config):
    model = build_on_meta(config)
    composite = composite_of(str(directory), config)
    source = SafetensorsSource(directory, tied_names(model), composite)
    source.check(tensor_specs(model))
    materialize(model, CPU)
    source.fill(model_shards(model))
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_STATE])
def test_loads_what_from_pretrained_loads_bit_for_bit(tmp_path, family):
    save_tiny(tmp_path, family, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = loaded(tmp_path, theirs.config)
    state = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state.pop(name), tensor), name
    assert not state
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffers.pop(name), buffer), name
    assert not buffers


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_language_model_is_taken_out_of_one_that_reads_images(tmp_path, kind, is_tied, caplog):
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}  # fmt: skip
    text = tiny_config(f"{kind}_text", tie_word_embeddings=is_tied).to_dict()
    both = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=is_tied
    )
    model = AutoModelForImageTextToText.from_config(both)
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    with caplog.at_level(logging.WARNING):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.allclose(theirs(ids).logits, model(input_ids=ids).logits, atol=1e-5)
        config = read_model_config(ModelConfig(path=str(tmp_path)))
        ours = loaded(tmp_path, config).state_dict()
    assert config.model_type == f"{kind}_text"
    state = theirs.state_dict()
    assert state.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in state.items())
    assert not [each for each in caplog.records if each.name == "burnish.models.loading"]
    kept = composite_of(str(tmp_path), config).rest
    assert kept
    assert all(name.startswith("model.visual.") for name in kept)


def test_a_model_in_several_files(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = loaded(tmp_path, model.config).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("names", ["embedding", "head", "both"])
def test_tied_checkpoints_may_hold_either_name_or_both(tmp_path, names, caplog):
    save_tiny(tmp_path, "qwen3", torch.float32)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    if names != "embedding":
        tensors["lm_head.weight"] = embedding.clone()
    if names == "head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path)
    with caplog.at_level(logging.WARNING):
        model = loaded(tmp_path, tiny_config("qwen3"))
    assert caplog.text == ""
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)


def test_weights_in_mxfp4_are_those_that_transformers_reads(tmp_path, caplog):
    """As gpt-oss is published; also a part of them."""
    config = tiny_config("gpt_oss", intermediate_size=64)
    tiny_model("gpt_oss", intermediate_size=64).bfloat16().save_pretrained(tmp_path)
    held, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = held.pop(name).shape
        sizes = (experts, columns, rows // 32, 16)
        draws = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)
        held[f"{name}_blocks"] = draws
        held[f"{name}_scales"] = 120 + draws[..., 0] % 9
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True)
    )
    with caplog.at_level(logging.WARNING):
        ours = loaded(tmp_path, config)
    assert not [record for record in caplog.records if record.name.startswith("burnish")]
    values = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(values[name], parameter.float()), name
    name = "model.layers.1.mlp.experts.down_proj"
    spec, box = TensorSpec(name, (4, 64, 32), torch.float32), Box((1, 3, 5), (2, 40, 20))
    shard = Shard(spec, box, torch.empty(box.sizes))
    SafetensorsSource(tmp_path).fill([shard])
    assert torch.equal(shard.tensor, values[name][box.slices])


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return shape, Box(offsets, sizes)


@example(case=((2, 2, 1), Box((0, 0, 0), (2, 2, 1))), dtype=torch.float32, turned=True)
@given(case=boxes(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), turned=st.booleans())
def test_any_box_is_read_into_any_memory(tmp_path_factory, case, dtype, turned):
    shape, box = case
    whole = torch.randn(shape)
    directory = tmp_path_factory.mktemp("box")
    save_file({"x": whole}, directory / "model.safetensors")
    memory = torch.empty(box.sizes[::-1] if turned else box.sizes, dtype=dtype)
    target = memory.permute(*range(memory.ndim)[::-1]) if turned else memory
    shard = Shard(TensorSpec("x", shape, dtype), box, target)
    SafetensorsSource(directory).fill([shard])
    assert torch.equal(target, whole[box.slices].to(dtype))


def test_scalars_and_integers(tmp_path):
    tensors = {"n": torch.tensor(7), "x": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {name: torch.zeros_like(value) for name, value in tensors.items()}
    SafetensorsSource(tmp_path).fill(
        Shard(TensorSpec(name, (), value.dtype), Box((), ()), value)
        for name, value in targets.items()
    )
    assert targets == tensors


class TestBadDirectories:
    def test_no_directory(self, tmp_path):
        with pytest.raises(MissingError):
            SafetensorsSource(tmp_path / "absent")

    def test_no_weights(self, tmp_path):
        tiny_config().save_pretrained(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(MissingError, match=r"pytorch_model\.bin"):
            SafetensorsSource(tmp_path)

    def test_a_file_is_missing(self, tmp_path):
        tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
        victim = sorted(tmp_path.glob("*.safetensors"))[1]
        victim.unlink()
        with pytest.raises(MissingError, match=victim.name):
            SafetensorsSource(tmp_path)

    def test_a_truncated_file(self, tmp_path):
        save_tiny(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            SafetensorsSource(tmp_path)

    def test_a_file_that_shrinks_after_opening(self, tmp_path):
        save_file({"x": torch.zeros(100)}, tmp_path / "model.safetensors")
        source = SafetensorsSource(tmp_path)
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(200)
        shard = Shard(TensorSpec("x", (100,), torch.float32), Box((0,), (100,)), torch.empty(100))
        with pytest.raises(CorruptError):
            source.fill([shard])

    @pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
    def test_a_broken_index(self, tmp_path, index):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CorruptError, match=r"index\.json"):
            SafetensorsSource(tmp_path)

    def test_an_index_that_points_outside(self, tmp_path):
        index = {"weight_map": {"x": "../elsewhere.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptError):
            SafetensorsSource(tmp_path)

    def test_one_tensor_in_two_files(self, tmp_path):
        for name in ("a", "b"):
            save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CorruptError):
            SafetensorsSource(tmp_path)

    def test_wrong_shapes(self, tmp_path):
        save_tiny(tmp_path, "llama")
        with pytest.raises(IncompatibleError, match=r"mlp\.gate_proj\.weight") as caught:
            loaded(tmp_path, tiny_config("llama", intermediate_size=40))
        assert (caught.value.have, caught.value.want) == ((48, 32), (40, 32))

    def test_a_missing_tensor(self, tmp_path):
        save_tiny(tmp_path, "llama")
        with pytest.raises(MissingError, match=r"q_norm\.weight"):
            loaded(tmp_path, tiny_config("olmo2"))

    def test_a_head_that_was_tied_when_saved(self, tmp_path):
        save_tiny(tmp_path, "qwen3")
        with pytest.raises(MissingError, match=r"lm_head\.weight"):
            loaded(tmp_path, tiny_config("qwen3", tie_word_embeddings=False))

    @pytest.mark.parametrize(
        ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")]
    )
    def test_quantized_weights(self, tmp_path, dtype, name):
        save_file({"x": torch.zeros(2, dtype=dtype)}, tmp_path / "model.safetensors")
        source = SafetensorsSource(tmp_path)
        with pytest.raises(IncompatibleError) as caught:
            source.check([TensorSpec("x", (2,), torch.float32)])
        assert caught.value.have == name
        if dtype == torch.int8:  # a buffer
            source.check([TensorSpec("x", (2,), torch.int64)])

    def test_extra_tensors_are_noticed(self, tmp_path, caplog):
        save_tiny(tmp_path, "llama", num_hidden_layers=3)
        meta = build_on_meta(tiny_config("llama"))
        with caplog.at_level(logging.WARNING):
            extra = SafetensorsSource(tmp_path).check(tensor_specs(meta))
        assert len(extra) == 9
        assert all(name.startswith("model.layers.2.") for name in extra)
        assert "model.layers.2." in caplog.text
        assert str(tmp_path) in caplog.text


class TestFresh:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_has_the_familys_own_distribution(self, family):
        config = tiny_config(family, initializer_range=0.5, hidden_size=64)
        ours = build_on_meta(config)
        materialize(ours, CPU)
        FreshSource(config, seed=1).fill(model_shards(ours))
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        values = dict(ours.named_parameters())
        for name, parameter in theirs.named_parameters():
            if parameter.unique().numel() == 1:
                assert torch.equal(values[name], parameter), name
            else:
                torch.testing.assert_close(values[name].std(), parameter.std(), rtol=0.2, atol=0)
                assert abs(values[name].mean()) < 0.1

    def test_a_module_may_initialize_one_inside_it(self):
        """As a layer of experts of Qwen3-Next its router."""
        config = tiny_config("qwen3_next", initializer_range=0.5, hidden_size=64)
        router = self.values(config, seed=1)["model.layers.0.mlp.gate.weight"]
        assert float(router.std()) == pytest.approx(0.5, rel=0.2)

    def test_modules_differ_and_seeds_differ(self):
        config = tiny_config("qwen3_moe")
        first, again, other = (self.values(config, seed) for seed in (1, 1, 2))
        names = [name for name in first if name.endswith("_proj.weight")]
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in names)
        heads = {tuple(first[name].flatten()[:3].tolist()) for name in names}
        assert len(heads) == len(names)

    def test_leaves_the_global_generator_alone(self):
        torch.manual_seed(3)
        before = torch.random.get_rng_state()
        self.values(tiny_config(), seed=1)
        assert torch.equal(before, torch.random.get_rng_state())

    def test_a_padding_row_is_zero_as_in_transformers(self):
        values = self.values(tiny_config("llama"), seed=1)
        assert (values["model.embed_tokens.weight"][0] == 0).all()

    def test_strangers(self):
        source = FreshSource(tiny_config(), seed=0)
        for spec, error in (
            (TensorSpec("nobody", (1,), torch.float32), MissingError),
            (TensorSpec("model.norm.weight", (1,), torch.float32), IncompatibleError),
        ):
            with pytest.raises(error, match=spec.name):
                source.fill([Shard(spec, Box((0,), (1,)), torch.empty(1))])

    def test_a_model_that_cannot_say_how_it_starts(self, monkeypatch):
        source = FreshSource(tiny_config("llama"), seed=0)
        model_type = type(source._model).__mro__[1]
        monkeypatch.setattr(model_type, "_init_weights", lambda self, module: None)
        target = torch.empty(32)
        shard = Shard(
            TensorSpec("model.norm.weight", (32,), torch.float32), Box((0,), (32,)), target
        )
        with pytest.raises(IncompatibleError, match=r"model\.norm\.weight"):
            source.fill([shard])

    @staticmethod
    def values(config, seed):
        meta = build_on_meta(config)
        shards = [
            Shard(spec, Box((0,) * len(spec.shape), spec.shape), torch.empty(spec.shape))
            for spec in tensor_specs(meta)
        ]
        FreshSource(config, seed).fill(shards)
        return {shard.spec.name: shard.tensor for shard in shards}


MEASURE = """
import resource, sys, torch
from burnish.config.schema import ModelConfig
from burnish.models.loading import read_model_config, weights_source
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024

config = ModelConfig(path=sys.argv[1])
hf_config = read_model_config(config)
model = build_on_meta(hf_config)
source = weights_source(config, hf_config, 0)
before = peak()
materialize(model, torch.device("cpu"))
source.fill(model_shards(model))
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(held, peak() - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_at_the_model_and_64_mb(tmp_path):
    """A tied model whose embedding layer has a computed buffer, from bf16 to fp32."""
    config = tiny_config("gemma3_text", hidden_size=1024, vocab_size=50_000)
    specs = tensor_specs(build_on_meta(config))
    tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    save_file(tensors, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    held, grown = map(int, done.stdout.split())
    assert held > 180e6
    assert 0.95 * held < grown < held + 64e6
