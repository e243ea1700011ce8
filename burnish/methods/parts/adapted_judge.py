"""A reward model as an adapter: A and B in the backbone, and a head that is trained whole beside them."""

from __future__ import annotations

from dataclasses import replace

from burnish.models.lora.adapter import adapter_record, count_trained, first_adapter
from burnish.models.meta_init import build_on_meta
from burnish.models.value_head import value_head_name
from burnish.runs.setup import Foundation, with_assets


def adapted_judge(judge: Foundation, base: str) -> Foundation:
    """Return the foundation of a reward model of which `model.lora` and the head are trained; `base` is what the language model is called.

    `judge` is that of the whole model. The head is one of PEFT's `modules_to_save`.
    """
    config = judge.config
    head = value_head_name(build_on_meta(judge.hf_config))
    whole = [*dict.fromkeys([*config.model.lora.modules_to_save, head])]
    lora = config.model.lora.model_copy(update={"modules_to_save": whole})
    model = config.model.model_copy(update={"lora": lora})
    record = {**adapter_record(model, judge.hf_config), "base": base}
    source = first_adapter(model, judge.hf_config, record, config.seed, judge.base)
    return with_assets(
        replace(
            judge,
            config=config.model_copy(update={"model": model}),
            source=source,
            adapter=record,
            adapted=count_trained(judge.hf_config, lora),
        )
    )
