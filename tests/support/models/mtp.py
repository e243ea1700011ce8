"""Layers for multi-token prediction (MTP): checkpoints with one, and what plain torch makes of it.

transformers has no such model. The oracle here is its decoder layer of the same type, between the formulas of arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contracts.engine import BETAS, CLIP, LR, STEPS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from burnish.boxes.box import whole
from burnish.models.names import regions
from burnish.records import Example
from support.models.tiny import save_tiny

WEIGHT = 0.1
"""λ of equation 25."""


@dataclass(frozen=True, slots=True)
class Published:
    """How files name a layer's tensors."""

    prefix: str
    inside: str
    parts: Mapping[str, str]
    copies: Mapping[str, str]


DEEPSEEK = Published(
    "model.layers.{depth}.",
    "",
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
)
QWEN = Published(
    "mtp.",
    "layers.0.",
    {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "norm": "norm",
    },
    {},
)
FORMS = {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "qwen3_next": QWEN, "qwen3_5_text": QWEN}


class MultiTokenModel(nn.Module):
    """A model of transformers and an MTP layer: equations 21 to 23."""

    def __init__(self, model: PreTrainedModel, form: Published) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.form = form
        self.depth = config.num_hidden_layers
        layers = model.model.layers
        self.like = max(n for n, each in enumerate(layers) if hasattr(each, "self_attn"))
        norm, hidden = type(model.model.norm), config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(hidden, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(layers[self.like])(config, self.like)
        self.layer.load_state_dict(layers[self.like].state_dict())

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the model [T, V], whose row t is for token t + 1; and those of the layer [T - 1, V], for token t + 2."""
        inner = self.model.model
        hidden = inner(input_ids=ids[None], use_cache=False).last_hidden_state
        embedded = inner.embed_tokens(ids[None, 1:])
        before = hidden[:, :-1]
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(before)), dim=-1))
        count = joined.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        output = self.layer(
            joined,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=inner.rotary_emb(joined, positions),
        )
        states = self.norm(output[0] if isinstance(output, tuple) else output)
        return self.model.lm_head(hidden)[0], self.model.lm_head(states)[0]

    def canonical(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The parameters and buffers, or what there is of them in `values`, by the checkpoint's names, without copies."""
        found = {}
        state = self.state_dict(keep_vars=True) if values is None else values
        own = f"model.layers.{self.like}."
        inside = self.prefix + self.form.inside
        for region in regions(self.model):
            places = [(region.name, f"model.{region.parameter}")]
            if region.name.startswith(own):
                name = inside + region.name.removeprefix(own)
                places.append((name, f"layer.{region.parameter.removeprefix(own)}"))
            for name, parameter in places:
                if parameter in state:
                    tensor = state[parameter].detach()
                    shard = region.shard_of(tensor, whole(tuple(tensor.shape)))
                    assert shard is not None
                    found[name] = shard.tensor
        for ours, theirs in self.form.parts.items():
            if f"{ours}.weight" in state:
                found[f"{self.prefix}{theirs}.weight"] = state[f"{ours}.weight"].detach()
        return found

    @property
    def prefix(self) -> str:
        """What precedes all names of the layer's tensors."""
        return self.form.prefix.format(depth=self.depth)

    def copies(self) -> dict[str, str]:
        """The tensors of the model that the files repeat, by the repetition's name."""
        return {f"{self.prefix}{n}.weight": f"{of}.weight" for n, of in self.form.copies.items()}


def load(path: Path, family: str) -> MultiTokenModel:
    """The model of a directory that `save_with_layer` wrote, in fp32."""
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = MultiTokenModel(AutoModelForCausalLM.from_pretrained(path, **how).eval(), FORMS[family])
    held = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, tensor in model.canonical().items():
            tensor.copy_(held[name])
    return model


def save_with_layer(
    path: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """Write a tiny model of a type, and a layer with random weights, as published files name them."""
    save_tiny(path, family, dtype, seed=seed, **changes)
    held = load_file(path / "model.safetensors")
    how: dict[str, Any] = {"dtype": torch.float32}
    model = MultiTokenModel(AutoModelForCausalLM.from_pretrained(path, **how), FORMS[family])
    torch.manual_seed(seed + 1)
    for name, tensor in model.canonical().items():
        if name not in held:
            kind = torch.float32 if name.endswith("correction_bias") else dtype
            held[name] = (tensor + 0.02 * torch.randn_like(tensor)).to(kind).contiguous()
    held |= {copy: held[of].clone() for copy, of in model.copies().items()}
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return path


def scores(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of targets, where the mask is set."""
    log_p = logits.float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    found = log_p.gather(1, targets[:, None])[:, 0], entropy
    return torch.where(mask, found[0], 0.0), torch.where(mask, found[1], 0.0)


def train_by_hand(model: MultiTokenModel, examples: Sequence[Example]) -> dict[str, Any]:
    """`contracts.engine.train_by_hand`, with the layer's loss: equations 24 and 25."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
    tokens = sum(int(example.loss_mask.sum()) for example in examples)
    losses, of_layer, norms, gradients = [], [], [], {}
    for _ in range(STEPS):
        total, ahead = torch.zeros(()), torch.zeros(())
        for example in examples:
            ids = torch.from_numpy(example.token_ids)
            mask = torch.from_numpy(example.loss_mask)
            own, later = model.logits(ids)
            for number, logits in enumerate((own[:-1], later[:-1]), 1):
                logprobs, entropy = scores(logits, ids[number:], mask[number:])
                value = (-logprobs - 0.01 * entropy).sum() / tokens
                total = total + (value if number == 1 else WEIGHT * value)
                ahead = ahead + (0.0 if number == 1 else value)
        total.backward()
        losses.append(total.item())
        of_layer.append(ahead.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items()}
        adamw.step()
        adamw.zero_grad()
    slots = {
        f"{slot}/{name}": tensor
        for slot in ("exp_avg", "exp_avg_sq")
        for name, tensor in model.canonical(
            {name: adamw.state[p][slot] for name, p in trained.items()}
        ).items()
    }
    weights = model.canonical()
    return {
        "losses": losses,
        "mtp_losses": of_layer,
        "norms": norms,
        "gradients": model.canonical(gradients),
        "weights": weights | {copy: weights[of] for copy, of in model.copies().items()},
        "slots": slots,
        "logprobs": {n: _said(model, example) for n, example in enumerate(examples)},
    }


@torch.no_grad()
def _said(model: MultiTokenModel, example: Example) -> tuple[Tensor, ...]:
    ids = torch.from_numpy(example.token_ids)
    found = scores(model.logits(ids)[0][:-1], ids[1:], torch.from_numpy(example.loss_mask)[1:])
    return tuple(torch.cat([torch.zeros(1), each]) for each in found)
