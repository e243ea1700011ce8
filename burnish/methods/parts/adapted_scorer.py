"""A critic or a reward model as an adapter: A and B in the backbone, and a head that is trained whole beside them."""

from __future__ import annotations

from dataclasses import replace

from burnish.models.lora.adapter import adapter_record, count_trained, first_adapter
from burnish.models.meta_init import build_on_meta
from burnish.models.value_head import value_head_name
from burnish.runs.setup import Foundation, with_assets


def adapted_scorer(scorer: Foundation, base: str | None = None) -> Foundation:
    """Return the foundation of a model with a scalar head, of which `model.lora` and the head are trained.

    `scorer` is that of the whole model. The language model under it is called `base`, or by its path. The head is one of PEFT's
    `modules_to_save`.
    """
    config = scorer.config
    head = value_head_name(build_on_meta(scorer.hf_config))
    whole = [*dict.fromkeys([*config.model.lora.modules_to_save, head])]
    lora = config.model.lora.model_copy(update={"modules_to_save": whole})
    model = config.model.model_copy(update={"lora": lora})
    record = adapter_record(model, scorer.hf_config, base)
    source = first_adapter(model, scorer.hf_config, record, config.seed, scorer.base)
    return with_assets(
        replace(
            scorer,
            config=config.model_copy(update={"model": model}),
            source=source,
            adapter=record,
            adapted=count_trained(scorer.hf_config, lora),
        )
    )
