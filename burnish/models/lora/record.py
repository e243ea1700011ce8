"""What is written down about an adapter: which model it belongs to, and how it lies on it.

It goes into a checkpoint twice: into `adapter_config.json`, which is PEFT's, and into the state of
the run, where resuming compares it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError
from burnish.files.safetensors import model_digest
from burnish.models.lora.adapter import Targets, peft_config
from burnish.models.lora.adapter_names import ADAPTER_CONFIG, BASE_PATH
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
        """What `model.lora` makes of the model at `model.path`, a copy of what is at `url` where there is one.

        Raises `IncompatibleError` for layers that it has not.
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
    """Refuse a checkpoint whose adapter is another than the run's, or that has one where the run has none.

    Raises `IncompatibleError` with a table of what differs. The model may have moved.
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
