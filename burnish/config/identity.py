"""Whether two configurations describe the same run, so that it may be continued.

Only the configuration that began a run continues it. `MAY_CHANGE` lists the settings that change how fast, how long or how visibly
it works, and not what a step computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import IncompatibleError, UsageError

MAY_CHANGE = frozenset(
    {
        "name",
        "output_dir",
        "steps",
        "epochs",
        "resume",
        "model.path",
        "model.tokenizer",
        "model.trust_remote_code",
        "model.lora.publish",
        "engine.kind",
        "engine.max_skipped_steps",
        "engine.activation_checkpointing",
        "engine.activation_offload",
        "engine.optimizer_offload",
        "engine.park",
        "engine.replicas",
        "engine.sequence_parallel",
        "engine.tensor_parallel",
        "engine.megatron_sequence_parallel",
        "engine.pipeline_parallel",
        "engine.virtual_stages",
        "engine.expert_parallel",
        "engine.expert_tensor_parallel",
        "engine.layers",
        "engine.reshard_after_forward",
        "engine.reduce_each_microbatch",
        "engine.logprob_chunk",
        "data.train",
        "data.validation",
        "batch.tokens_per_device",
        "rollout.slots",
        "reward.timeout_seconds",
        "reward.workers",
        "reward.concurrency",
        "reward.max_failed_rounds",
        "evaluation",
        "checkpoint",
        "tracking",
        "distributed",
    }
)
"""Settings, and whole sections, that may differ between two attempts at one run.

`steps` and `epochs` are among them so that a run can be prolonged; with a decaying learning rate
the remaining steps then follow the longer schedule. Validation reads the weights and never changes
them. `name` and `output_dir` say where a run lies, and a directory may be moved. Model, tokenizer and data may move as well:
`burnish.train.fingerprints` compares their content."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting in which two configurations differ."""

    key: str
    """Its dotted key."""
    before: Any
    """Its value in the first, as plain YAML values."""
    after: Any
    """Its value in the second."""


def digest(config: RunConfig) -> str:
    """sha256, in hex, of the settings that define what the run computes."""
    return hashlib.sha256(_canonical(dict(_defining(config))).encode()).hexdigest()


def difference(before: RunConfig, after: RunConfig) -> list[SettingDifference]:
    """The defining settings in which two configurations differ; empty where `digest` agrees."""
    wanted = dict(_defining(after))
    return [
        SettingDifference(key, value, wanted[key])
        for key, value in _defining(before)
        if _canonical(value) != _canonical(wanted[key])
    ]


def require_same_run(run_dir: PurePath, recorded: RunConfig, config: RunConfig) -> None:
    """Refuse a run directory whose recorded configuration describes another run.

    Raises `IncompatibleError` with a table of the settings that differ.
    """
    found = difference(recorded, config)
    if not found:
        return
    raise IncompatibleError(
        f"{run_dir} belongs to another configuration\n{_table(found)}",
        have=f"a run that differs in {', '.join(each.key for each in found)}",
        want="the configuration that began this run",
        do="restore the settings above, or give this run a name of its own with name=NAME; "
        "model.path=RUN_DIR/checkpoints/STEP/model lets it begin with what the other learned",
    )


def require_may_resume(run_dir: PurePath, steps: Sequence[str], config: RunConfig) -> None:
    """Refuse a run directory that holds `steps` (their names, oldest first) where `resume` is never.

    Raises `UsageError`.
    """
    if steps and config.resume == "never":
        raise UsageError(
            f"{run_dir} holds checkpoints, and resume is never",
            have=f"{len(steps)}, the newest {steps[-1]}",
            want="a directory without checkpoints",
            do="set resume=auto to continue, or name=NAME to begin another run",
        )


def _table(found: list[SettingDifference]) -> str:
    rows = [("setting", "have", "want")]
    rows += [(each.key, _cell(each.before), _cell(each.after)) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {key:<{widths[0]}}  {have:<{widths[1]}}  {want}" for key, have, want in rows]
    return "\n".join(lines)


def _cell(value: Any, limit: int = 40) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _canonical(value: Any) -> str:
    """The same text for the same value, whatever the order of its keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _defining(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and plain value of every setting that may not change."""
    for field in type(section).model_fields:
        name = prefix + field
        value = getattr(section, field)
        if name in MAY_CHANGE:
            continue
        if isinstance(value, Section):
            yield from _defining(value, f"{name}.")
        else:
            yield name, section.model_dump(mode="json", include={field})[field]
