"""An adapter on disk: what a checkpoint records of it, and where its first values come from.

The record goes into a checkpoint twice: into PEFT's adapter_config.json, and into state.json, where resuming compares it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.boxes.shards import ShardSource, TensorSpec
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError, few
from burnish.files.safetensors import model_digest
from burnish.files.strict_json import parse_json
from burnish.models.loading import SafetensorsSource
from burnish.models.lora.adapter import Adapter, FreshAdapter, Targets, peft_config
from burnish.models.lora.adapter_config import ADAPTER_CONFIG, ADAPTER_STATE, BASE_PATH
from burnish.models.meta_init import build_on_meta


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter as checkpoints describe it."""

    base: str
    """Path or URL of the model that it belongs to."""
    base_digest: str
    """`model_digest` of it."""
    rank: int
    """Width."""
    alpha: float
    """See `LoraConfig`."""
    rslora: bool
    """See `LoraConfig`."""
    targets: list[str]
    """What is adapted, as PEFT knows it: last parts of the names of layers, last two of those of experts' parameters."""

    @classmethod
    def of(
        cls, model: ModelConfig, hf_config: PretrainedConfig, url: str | None = None
    ) -> AdapterRecord:
        """Return the record of `model.lora` on the model at `model.path`, which may be a copy of `url`.

        Raises `IncompatibleError` for layers that it lacks.
        """
        kinds, lora = Targets.of(build_on_meta(hf_config), model.lora).kinds, model.lora
        base = Path(model.path or "").expanduser().absolute()
        return cls(url or str(base), model_digest(base), lora.rank, lora.alpha, lora.rslora, kinds)

    def as_state(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write what makes a directory of weights one that PEFT loads: its configuration, and the tokenizer."""
        lora = LoraConfig(rank=self.rank, alpha=self.alpha, rslora=self.rslora)
        values = peft_config(lora, self.targets).to_dict()
        values |= {BASE_PATH: self.base, "inference_mode": True}
        values["target_modules"] = sorted(values["target_modules"])  # a set, which JSON has not
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=2, sort_keys=True)
        (directory / ADAPTER_CONFIG).write_text(text + "\n")
        tokenizer.save_pretrained(directory)


def require_same_adapter(
    recorded: Mapping[str, Any] | None, wanted: AdapterRecord | None, where: PurePath
) -> None:
    """Refuse a checkpoint with another adapter than the run's, or with one if the run has none.

    Raises `IncompatibleError` with a table. The base model may have moved.
    """
    have, want = dict(recorded or {}), {} if wanted is None else wanted.as_state()
    keys = [key for key in {**want, **have} if key != "base" and have.get(key) != want.get(key)]
    if not keys:
        return
    rows = [("", "have", "want")]
    if "base_digest" in keys:
        rows.append(("base", str(have.get("base", "-")), str(want.get("base", "-"))))
    rows += [(key, str(have.get(key, "-")), str(want.get(key, "-"))) for key in keys]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {k:<{widths[0]}}  {h:<{widths[1]}}  {w}" for k, h, w in rows)
    kinds = ["an adapter" if each else "a whole model" for each in (have, want)]
    raise IncompatibleError(
        f"{where} holds {'another adapter than' if have and want else 'not what'} this run trains\n{table}",
        have=f"{kinds[0]} that differs in {', '.join(keys)}" if have and want else kinds[0],
        want=kinds[1],
        do="restore model.path and model.lora, or begin another run with name=NAME",
    )


_STATE = "state.json"
# Of a run's step, beside `model/`, which is the adapter.

_log = logging.getLogger(__name__)


def first_adapter(
    model: ModelConfig, hf_config: PretrainedConfig, adapter: AdapterRecord, seed: int
) -> ShardSource:
    """Return the initial values of `model.lora`, checked before any is read.

    Raises `IncompatibleError` for an adapter of another model or with other tensors, and as `SafetensorsSource.check` does.
    """
    if model.lora.path is None:
        return FreshAdapter(seed)
    directory = Path(model.lora.path).expanduser()
    _require_same_base(directory, adapter)
    source = SafetensorsSource(directory)
    weights = Adapter(build_on_meta(hf_config), model.lora).weights
    extra = source.check(TensorSpec(each.name, each.shape, torch.float32) for each in weights)
    if extra:
        raise IncompatibleError(
            f"{directory} adapts more than what is trained here",
            have=few(extra),
            want=f"A and B of {', '.join(adapter.targets)}",
            do="start from an adapter of linear layers, the output layer not among them",
        )
    return source


def _require_same_base(directory: Path, adapter: AdapterRecord) -> None:
    """Raise if the adapter belongs to another model; warn if that cannot be known."""
    digest = _base_digest(directory)
    if digest is None:
        _log.warning(
            "%s does not say which model it belongs to in a way that can be compared; it is taken to be %s",
            directory,
            adapter.base,
        )
    elif digest != adapter.base_digest:
        raise IncompatibleError(
            f"the adapter {directory} belongs to another model",
            have=f"a model with the digest {digest[:16]}...",
            want=f"{adapter.base}, with {adapter.base_digest[:16]}...",
            do="set model.path to the model that it was trained on",
        )


def _recorded_digest(state: Path) -> str | None:
    """Return the digest that a run wrote into `state`; None for a file of any other program."""
    try:
        found: Any = json.loads(state.read_bytes())
    except (OSError, ValueError):
        return None
    recorded = found.get(ADAPTER_STATE) if isinstance(found, dict) else None
    digest = recorded.get("base_digest") if isinstance(recorded, dict) else None
    return digest if isinstance(digest, str) else None


def _base_digest(directory: Path) -> str | None:
    """Return the digest of the adapter's model: as its run recorded it, else of the model that its configuration names."""
    digest = _recorded_digest(directory.parent / _STATE)
    if digest is not None:
        return digest
    described = directory / ADAPTER_CONFIG
    base = parse_json(described.read_bytes(), str(described)).get(BASE_PATH)
    if not base or not (Path(base).expanduser() / "config.json").is_file():
        return None
    return model_digest(Path(base).expanduser())
