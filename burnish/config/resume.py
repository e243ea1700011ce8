"""Decide whether a configuration may resume another's run.

Settings that are not `MayChange` decide. Model, tokenizer and data may move: `burnish.runs.trainer_state` compares content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from burnish.config.credentials import without_credentials
from burnish.config.schema import RunConfig
from burnish.config.section import MAY_CHANGE, Section
from burnish.errors import IncompatibleError, UsageError, table


def digest(config: RunConfig) -> str:
    """Return sha256, in hex, of the deciding settings."""
    return hashlib.sha256(_canonical(dict(_deciding(config))).encode()).hexdigest()


def settings_difference(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the deciding settings that differ, with both values, by dotted key."""
    had = dict(_deciding(before))
    wanted = dict(_deciding(after))
    pairs = {key: (had.get(key), wanted.get(key)) for key in {**had, **wanted}}
    return {key: (a, b) for key, (a, b) in pairs.items() if _canonical(a) != _canonical(b)}


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run's trainer and configuration, to compare with a directory's."""

    trainer: str
    """The name of the method."""
    config: RunConfig

    def require_trainer(self, place: object, recorded: object) -> None:
        """Raise `IncompatibleError` if another command trains the run at `place`."""
        if recorded != self.trainer:
            raise IncompatibleError(
                f"{place} holds a run of another kind",
                have=f"burnish {recorded}",
                want=f"burnish {self.trainer}",
                do="set name=NAME to begin another run",
            )

    def require_same(self, run_dir: PurePath, recorded: RunConfig) -> None:
        """Raise `IncompatibleError`, with a table, if another run's configuration is recorded."""
        differing = settings_difference(recorded, self.config)
        if not differing:
            return
        rows = [("setting", "have", "want")]
        rows += [(key, *_cells(before, after)) for key, (before, after) in differing.items()]
        lines = [f"{run_dir} belongs to another configuration", *table(rows)]
        raise IncompatibleError(
            "\n  ".join(lines),
            have=f"a run that differs in {', '.join(differing)}",
            want="the configuration that began this run",
            do="restore the settings above, set resume=fresh to begin anew, or name=NAME for another run; "
            "model.path=RUN_DIR lets it begin with what the other learned",
        )

    def require_may_resume(self, run_dir: PurePath, steps: Sequence[str]) -> None:
        """Raise `UsageError` if there are `steps` (names, oldest first) and `resume` is never."""
        if steps and self.config.resume == "never":
            raise UsageError(
                f"{run_dir} holds checkpoints, and resume is never",
                have=f"{len(steps)}, the newest {steps[-1]}",
                want="a directory without checkpoints",
                do="set resume=auto to continue, resume=fresh to begin anew, or name=NAME for another run",
            )


def _cells(before: Any, after: Any, limit: int = 40) -> tuple[str, str]:
    """Return two values as text, long ones only around their difference."""
    a, b = (json.dumps(value, ensure_ascii=False) for value in (before, after))
    same = next((at for at, pair in enumerate(zip(a, b, strict=False)) if len({*pair}) > 1), 0)
    start = max(0, same - limit // 2) if max(len(a), len(b)) > limit else 0

    def cut(text: str) -> str:
        shown = text[start : start + limit]
        return f"{'…' if start else ''}{shown}{'…' if start + limit < len(text) else ''}"

    return cut(a), cut(b)


def _canonical(value: Any) -> str:
    """Return equal text for equal values, in any order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _deciding(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting that may not change, without credentials, which may."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if field.json_schema_extra == MAY_CHANGE:
            continue
        if name == "method" and not value:  # earlier versions had no such setting
            continue
        if isinstance(value, Section):
            yield from _deciding(value, f"{prefix}{name}.")
        else:
            value = section.model_dump(mode="json", include={name})[name]
            yield prefix + name, without_credentials(value)
    for name, value in (section.model_extra or {}).items():
        yield prefix + name, without_credentials(value, name)
