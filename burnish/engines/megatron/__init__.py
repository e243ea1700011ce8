"""The Megatron-Core engine (`megatron_engine`). Importing this imports Megatron, without its warnings."""

import warnings

from burnish.errors import UsageError, install

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            "engine.kind megatron needs a package that is not installed",
            have=f"no module {error.name}",
            want="megatron-core 0.16",
            do=f"{install('megatron')}, or set engine.kind=torch",
        ) from error
