"""The Megatron-Core engine (`megatron_engine`). Importing this imports Megatron, without its warnings."""

import warnings

from burnish.errors import install, refusing

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with refusing(
        "engine.kind megatron needs a package that cannot be imported",
        want="megatron-core 0.16",
        do=f"{install('megatron')}, or set engine.kind=torch",
    ):
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
