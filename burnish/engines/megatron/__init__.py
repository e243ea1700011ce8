"""The Megatron-Core engine (`megatron_engine`). Importing this imports Megatron, without its warnings."""

import warnings

from packaging.version import Version

from burnish.errors import UsageError, install, refusing

_OLDEST = "0.16.1"
_WANT = f"megatron-core {_OLDEST} to 0.19"
_DO = f"{install('megatron')}, or set engine.kind=torch"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with refusing(
        "engine.kind megatron needs a package that cannot be imported",
        want=_WANT,
        do=_DO,
    ):
        import megatron.core.distributed
        import megatron.core.models.common.language_module.language_module
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel
        import megatron.core.transformer.multi_latent_attention

VERSION = Version(megatron.core.__version__)
"""Of the installed Megatron-Core."""
if Version(_OLDEST) > VERSION:
    raise UsageError(
        "engine.kind megatron needs a newer Megatron-Core",
        have=f"megatron-core {VERSION}",
        want=_WANT,
        do=_DO,
    )
