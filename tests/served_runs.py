"""Runs whose completions come from other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_files import RL

QUICK = {**RL, "steps": 4, "evaluation": {"every": 2}}


def written(work: Path, name: str, settings: dict[str, Any], **rollout: Any) -> str:
    """Write a configuration; return its path."""
    file = work / f"{name}.yaml"
    given = {**QUICK, **settings, "name": name}
    file.write_text(json.dumps({**given, "rollout": {**given["rollout"], **rollout}}))
    return str(file)
