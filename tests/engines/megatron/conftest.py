"""Imports Megatron before the first ranks are forked: they have it then, where each would take seconds to import it."""

import burnish.engines.megatron.megatron_engine  # noqa: F401
