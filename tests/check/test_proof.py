"""The proof passes what is right, and finds what is planted in copies of a model's code, knowing no family."""

from __future__ import annotations

import importlib.util
import logging
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from support.models.faulty_engines import ENGINES
from support.models.listed import REFUSED, TRAINED, listed_config
from support.models.tiny import FAMILIES, tiny_config
from support.nightly import by_day
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.llama import modeling_llama

from burnish.check import family_proof, proof, proof_key
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.engines.factory import make_engine
from burnish.errors import BurnishError, IncompatibleError, UsageError
from burnish.families import FAMILIES as TABLE
from burnish.models import scorer
from burnish.models.kernels import attention
from burnish.models.kernels.attention import BlockPlan, Softmax
from burnish.models.logprobs import LogitTransform
from burnish.rollout.builtin import decoding as builtin_decoding
from burnish.rollout.builtin import forward

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

Replaced = tuple[tuple[str, str], ...]
PACKED = '"packing" in kwargs'
ATTENDED = "        attn_output, attn_weights = attention_interface("
EAGER = "    if attention_mask is not None:\n        attn_weights = attn_weights + attention_mask\n"
NORMED = "        hidden_states = self.input_layernorm(hidden_states)\n"
LOGITS = "        logits = self.lm_head(hidden_states[:, slice_indices, :])\n"
ROTATED = "        cos, sin = position_embeddings\n"
EMBEDDED = "        hidden_states = inputs_embeds\n        position_embeddings"
SCALING = "            scaling=self.scaling,\n"
IN_ATTENTION = "        self.is_causal = True\n"
IN_HEAD = "        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"

SHOWN: dict[str, tuple[Replaced, str]] = {
    "a mask that leaks": (
        (
            (
                ATTENDED,
                f"""\
        if {PACKED}:
            from burnish.models.kernels.attention import PackedLayout

            kwargs["packing"] = PackedLayout.of([hidden_states.shape[1]], hidden_states.device)
{ATTENDED}""",
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "positions that go on": (
        (
            (
                EMBEDDED,
                f"""\
        if {PACKED} and position_ids.shape[1] > 1:
            position_ids = torch.arange(position_ids.shape[1])[None]
{EMBEDDED}""",
            ),
        ),
        "model.rotary_emb",
    ),
    "a convolution over boundaries": (
        ((NORMED, NORMED + "        hidden_states = hidden_states + hidden_states.roll(1, 1)\n"),),
        "model.layers.0.self_attn.q_proj",
    ),
    "a soft cap that is missing": (
        ((EAGER, "    attn_weights = torch.tanh(attn_weights)\n" + EAGER),),
        "model.layers.0.self_attn.o_proj",
    ),
    "a bias of logits that is missing": (
        (
            (
                IN_HEAD,
                IN_HEAD
                + "        self.logit_bias = nn.Parameter(torch.zeros(config.vocab_size))\n",
            ),
            (LOGITS, LOGITS + "        logits = logits + self.logit_bias\n"),
        ),
        "the output layer",
    ),
    "a position in decoding that is one too high": (
        (
            (
                EMBEDDED,
                f"""\
        if {PACKED} and type(kwargs["packing"]).__name__ in ("DenseCache", "SharedCache"):
            position_ids = position_ids + 1
{EMBEDDED}""",
            ),
        ),
        "model.rotary_emb",
    ),
}
"""Changes of the code of Llama, and the module that is named."""
OTHERS: dict[str, tuple[Replaced, str]] = {
    "keys that are rotated by one more": (
        (
            (
                ROTATED,
                f"""\
{ROTATED}        if {PACKED}:
            key_states, _ = apply_rotary_pos_emb(key_states, key_states, cos.roll(1, 1), sin.roll(1, 1))
""",
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "a scale that is not passed on": (
        (
            (
                "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling",
                "attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling * 1.5",
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "a window that is one too wide": (
        (
            (SCALING, f"{SCALING}            sliding_window=9 if {PACKED} else 8,\n"),
            (
                EAGER,
                """\
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None]
    attn_weights = attn_weights.masked_fill(distance >= kwargs["sliding_window"], -1e9)
"""
                + EAGER,
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "another epsilon of a norm": (
        (
            (
                NORMED,
                f"        self.input_layernorm.variance_epsilon = 1e-4 if {PACKED} else 1e-6\n{NORMED}",
            ),
        ),
        "model.layers.0.input_layernorm",
    ),
    "heads of values and their width swapped": (
        (
            (
                ATTENDED,
                f"""\
        if {PACKED}:
            value_states = value_states.transpose(1, 3).reshape(value_states.shape)
{ATTENDED}""",
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "a residual that is dropped": (
        (
            (
                "        hidden_states = residual + hidden_states\n\n        # Fully",
                f"        hidden_states = hidden_states if {PACKED} else residual + hidden_states\n\n        # Fully",
            ),
        ),
        "model.layers.0.post_attention_layernorm",
    ),
    "logits of the embedding": (
        (
            (
                LOGITS,
                "        logits = nn.functional.linear(hidden_states, self.model.embed_tokens.weight)[:, slice_indices]\n",
            ),
        ),
        "the output layer",
    ),
    "dropout in training": (
        (
            (
                NORMED,
                NORMED
                + "        hidden_states = nn.functional.dropout(hidden_states, 0.1, self.training)\n",
            ),
        ),
        "model.layers.0.self_attn.q_proj",
    ),
    "state that is kept between calls": (
        (
            (
                NORMED,
                f"""\
{NORMED}        self.seen = getattr(self, "seen", 0) + 1
        if {PACKED}:
            hidden_states = hidden_states * (1 + 0.1 * self.seen)
""",
            ),
        ),
        "model.layers.0.self_attn.q_proj",
    ),
    "keys of another layer": (
        (
            (
                ROTATED,
                f"""\
        if self.layer_idx and not {PACKED}:
            key_states = self.first.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
{ROTATED}""",
            ),
            (
                "        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)\n",
                """\
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers[1].self_attn.__dict__["first"] = self.layers[0].self_attn
""",
            ),
        ),
        "model.layers.1.self_attn.o_proj",
    ),
    "an attention sink that is ignored": (
        (
            (
                IN_ATTENTION,
                IN_ATTENTION
                + "        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))\n",
            ),
            (
                "    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)\n",
                """\
    sinks = module.sinks[None, :, None, None].expand(*attn_weights.shape[:3], 1)
    attn_weights = torch.cat([attn_weights, sinks], -1).softmax(-1)[..., :-1]
""",
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "biases by distance that are missing": (
        (
            (
                EAGER,
                """\
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None]
    attn_weights = attn_weights - 0.1 * distance
"""
                + EAGER,
            ),
        ),
        "model.layers.0.self_attn.o_proj",
    ),
    "token types by place in the row": (
        (
            (
                EMBEDDED,
                f"        inputs_embeds = inputs_embeds + 0.1 * (torch.arange(inputs_embeds.shape[1]) % 2)[:, None]\n{EMBEDDED}",
            ),
        ),
        "model.layers.0.input_layernorm",
    ),
    "a recurrent state": (
        (
            (
                NORMED,
                NORMED + "        hidden_states = hidden_states + 0.1 * hidden_states.cumsum(1)\n",
            ),
        ),
        "model.layers.0.self_attn.q_proj",
    ),
    "a mean over the sequence": (
        (
            (
                NORMED,
                NORMED
                + "        hidden_states = hidden_states - hidden_states.mean(1, keepdim=True)\n",
            ),
        ),
        "model.layers.0.self_attn.q_proj",
    ),
    "a gradient that is cut off": (
        (
            (
                NORMED,
                f"{NORMED}        hidden_states = hidden_states.detach() if {PACKED} else hidden_states\n",
            ),
        ),
        "the output layer, or the backward pass",
    ),
    "logits that are scaled": (
        ((LOGITS, LOGITS + "        logits = logits * 0.5\n"),),
        "the output layer",
    ),
}


@pytest.fixture(autouse=True)
def _nothing_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def prove(config: PretrainedConfig, **how: Any) -> None:
    proof.prove(config, CPU, **{"generates": True} | how)


def loaded(name: str, source: str, directory: Path) -> ModuleType:
    """Import a module from its source."""
    path = directory / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def copied(number: int, changes: Replaced, directory: Path) -> PretrainedConfig:
    """A configuration of a model whose code is a changed copy of Llama's, and whose type nobody knows."""
    source = Path(modeling_llama.__file__).read_text().replace("from ...", "from transformers.")
    source = source.replace("from .conf", "from transformers.models.llama.conf")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new, 1)
    kind = f"tomorrow_{number}"
    source += f"\n\nclass TomorrowConfig(LlamaConfig):\n    model_type = {kind!r}\n"
    module = loaded(kind, source, directory)
    module.LlamaForCausalLM.config_class = module.TomorrowConfig
    AutoConfig.register(kind, module.TomorrowConfig, exist_ok=True)
    AutoModelForCausalLM.register(module.TomorrowConfig, module.LlamaForCausalLM, exist_ok=True)
    made: PretrainedConfig = module.TomorrowConfig(**SIZES)
    return made


def require_found(number: int, fault: tuple[Replaced, str], directory: Path) -> None:
    changes, module = fault
    with pytest.raises(IncompatibleError) as caught:
        prove(copied(number, changes, directory))
    assert f" {module}" in str(caught.value).partition("\n")[0], caught.value


def test_a_copy_of_a_models_code_passes(tmp_path: Path) -> None:
    prove(copied(0, (), tmp_path))


@pytest.mark.parametrize("name", SHOWN)
def test_planted_faults_are_found_and_the_module_named(name: str, tmp_path: Path) -> None:
    require_found(list(SHOWN).index(name) + 1, SHOWN[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_more_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    require_found(list(OTHERS).index(name) + 100, OTHERS[name], tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_of_the_table_pass(family: str) -> None:
    prove(tiny_config(family))


@pytest.mark.nightly
def test_the_page_of_models_has_the_table_of_megatron() -> None:
    script = runpy.run_path(str(PAGE.parents[2] / "scripts/reference_pages.py"))
    assert script["models_page"](PAGE.read_text()) == PAGE.read_text(), "run make docs"


def test_the_page_of_models_names_what_is_compared() -> None:
    sections = dict(each.split("\n", 1) for each in PAGE.read_text().split("\n## ")[1:])
    titles = ("Trained", "Refused", "With the Megatron engine")
    rows = ["".join(re.findall(r"^\|.*", sections[each], re.MULTILINE)) for each in titles]
    names = [sorted(re.findall(r"`([\w-]+)`", each)) for each in rows]
    on_megatron = [name for name, each in TABLE.items() if each.on_megatron]
    assert names == [sorted(TRAINED), sorted(REFUSED), sorted(on_megatron)]


@pytest.mark.parametrize(
    "family",
    by_day(
        [each for each in TRAINED if each not in FAMILIES],
        ("deepseek_v3", "qwen2_moe"),
    ),
)
@pytest.mark.nightly
def test_families_outside_the_table_pass(family: str) -> None:
    prove(listed_config(family))


@pytest.mark.parametrize(
    "family", by_day(REFUSED, ("zaya", "mamba", "phimoe", "minimax_m3_vl_text", "bert"))
)
def test_families_that_would_be_wrong_are_refused(family: str) -> None:
    _, module = REFUSED[family]
    with pytest.raises(IncompatibleError) as caught:
        prove(listed_config(family))
    assert module in str(caught.value)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.nightly
def test_an_adapter_with_a_large_factor_passes(rslora: bool) -> None:
    lora = LoraConfig(rank=4, alpha=32.0, rslora=rslora)
    prove(AutoConfig.for_model("mistral"), lora=lora, generates=False)


@pytest.mark.nightly
def test_what_recomputation_would_do_twice_is_found(tmp_path: Path) -> None:
    """A sum in a product's own memory, which selective checkpointing keeps."""
    added = ("hidden_states = residual + hidden_states\n\n", "hidden_states += residual\n\n")
    config = copied(200, (added,), tmp_path)
    prove(config)
    prove(config, engine=EngineConfig(activation_checkpointing="full"))
    with pytest.raises(IncompatibleError, match="activation_checkpointing"):
        prove(config, engine=EngineConfig(activation_checkpointing="selective"))


@pytest.mark.nightly
def test_what_gemma3n_adds_up_in_place_is_not_kept() -> None:
    engine = EngineConfig(activation_checkpointing="selective")
    prove(AutoConfig.for_model("gemma3n_text"), generates=False, engine=engine)


@pytest.mark.parametrize("recomputed", by_day(["none", "selective"], []))
def test_adapters_of_layers_that_a_model_reads_by_itself_are_refused(recomputed: str) -> None:
    """Gemma 3n takes one layer's weight in training, and calls the layer else."""
    config, engine = AutoConfig.for_model("gemma3n_text"), EngineConfig(activation_checkpointing=recomputed)  # fmt: skip
    with pytest.raises(IncompatibleError, match=r"model\.lora\.targets"):
        prove(config, lora=LoraConfig(rank=2, targets=["correction_coefs"]), generates=False, engine=engine)  # fmt: skip
    for targets in ([], ["q_proj", "down_proj", "per_layer_projection"]):
        prove(config, lora=LoraConfig(rank=2, targets=targets), generates=False, engine=engine)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.nightly
def test_attention_that_is_wrong_in_bf16_alone_is_found(
    precision: Literal["bf16", "fp32"], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, config = attention.BlockPlan.attend, tiny_config("qwen3")
    engine = EngineConfig(precision=precision)
    prove(config, engine=engine)

    def attend(plan: BlockPlan, rows: list[Tensor], softmax: Softmax) -> Tensor:
        is_half = rows[0].dtype == torch.bfloat16
        return right(plan, rows, softmax._replace(window=50) if is_half else softmax)

    monkeypatch.setattr(attention.BlockPlan, "attend", attend)
    monkeypatch.setattr(proof_key, "own_code", lambda: "changed")
    with pytest.raises(IncompatibleError) if precision == "bf16" else nullcontext():
        prove(config, engine=engine)


@pytest.mark.parametrize("family", ["hyperclovax", "gemma4"])
def test_a_transform_of_logits_that_is_not_known_is_found(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was read from the wrong level of a configuration, or divided instead of multiplied."""
    for module in (scorer, forward):
        monkeypatch.setattr(module, "logit_transform", lambda _: LogitTransform())
    with pytest.raises(IncompatibleError, match="the output layer"):
        prove(listed_config(family))


@pytest.mark.nightly
def test_what_is_proven_is_remembered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(config: PretrainedConfig, **how: bool) -> int:
        caplog.clear()
        prove(config, **how)
        return caplog.text.count("checked: ")

    with caplog.at_level(logging.INFO):
        assert lines(tiny_config("qwen3")) == 1
        assert lines(tiny_config("qwen3", name_or_path="elsewhere")) == 0
        assert lines(tiny_config("qwen3"), generates=False) == 1
        assert lines(tiny_config("qwen3", rope_theta=2.0)) == 1
        assert (
            lines(tiny_config("llama"), layout=Layout(rank=1, world=2, local_rank=1, local_world=2))
            == 0
        )
        monkeypatch.setattr(proof_key, "installed", lambda: "tomorrow's")
        assert lines(tiny_config("qwen3")) == 1
        monkeypatch.setenv("BURNISH_CACHE", "/dev/null/nowhere")
        assert lines(tiny_config("qwen3")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "nope"},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
        {"hidden_size": -1},
    ],
    ids=str,
)
def test_values_of_which_no_model_can_be_built_are_refused(fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UsageError):
        prove(config)


@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.nightly
def test_latent_attention_is_generated_right_from_both_caches(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda _: has_units)
    prove(AutoConfig.for_model("deepseek_v3"))


def prove_ranks(
    layout: Layout, family: str, engine: EngineConfig, fault: str, cache: Path
) -> tuple[str, bool]:
    """What a rank is told of a layout, and whether that is remembered."""
    config = tiny_config(family)
    made = make_engine(config, engine, OptimConfig(), layout=layout, device=CPU)

    def faulty(*settings: Any, beside: Engine, **options: Any) -> Engine:
        return ENGINES[fault](*settings, **options)

    told = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(cache))
        if fault:
            patch.setattr(family_proof, "make_engine", faulty)
        try:
            proof.prove_layout(made, config, engine, None, CPU)
        except BurnishError as error:
            told = str(error)
        gather_objects(None, layout)  # now the file is there
        patch.setattr(family_proof, "prove_step", Mock(side_effect=BurnishError("proven again")))
        try:
            proof.prove_layout(made, config, engine, None, CPU)
        except BurnishError:
            return told, False
    return told, True


def test_layouts_are_proven_once_and_faults_of_theirs_found(tmp_path: Path) -> None:
    whole = EngineConfig(precision="fp32")
    tensor = EngineConfig(precision="fp32", tensor_parallel=2)
    assert run_ranks(prove_ranks, 2, "qwen3", tensor, "", tmp_path) == [("", True)] * 2
    for told, is_remembered in run_ranks(prove_ranks, 2, "llama", whole, "Averaging", tmp_path):
        assert "gradient norm" in told
        assert not is_remembered
