"""Rules about the whole source tree."""

from __future__ import annotations

import ast
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SOURCE = Path(__file__).parents[1] / "burnish"
OTHER_MEANINGS = {"git", "gemma"}
"""Model types that are also a program's name, and the name of a rounding mode of Liger's norm."""


def test_only_the_table_of_families_names_model_types() -> None:
    types = set(CONFIG_MAPPING_NAMES) - OTHER_MEANINGS
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {node.value}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "families.py" or path.parent != SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in types
    ]
    assert found == []
