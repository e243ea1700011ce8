"""Write the tables of docs/guides/recipes.md: for each machine and model the settings that the planner finds.

    PYTHONPATH=. python scripts/recipes.py [--check]

The models' sizes stand below, so nothing is downloaded. `--check` changes nothing, and fails if the page has other tables.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.planning_cases import SHAPES
from burnish.config.load import read_config
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan.devices import GIB, parse_devices
from burnish.plan.layout_search import Plan, Planner

_END = "<!-- end of the table -->"
PAGE = Path(__file__).parents[1] / "docs/guides/recipes.md"
MACHINES = {
    "1×24 GB": "1xRTX4090-24G",
    "1×80 GB": "1xH100-80G",
    "8×80 GB": "8xH100-80G",
    "8×141 GB": "8xH200-141G",
    "64×80 GB": "64xH100-80G",
}
"""Devices as `burnish plan --devices` takes them."""
_DENSE = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12288, 36, 32),
    "14B": (5120, 17408, 40, 40),
    "32B": (5120, 25600, 64, 64),
}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        **_DENSE,
        **dict(zip(_NAMES, sizes, strict=True)),
        "tie_word_embeddings": name in ("0.6B", "1.7B", "4B"),
    }
    for name, sizes in _SIZES.items()
}
MODELS["30B-A3B"] = {"model_type": "qwen3_moe", **SHAPES["Qwen3-30B-A3B"]}
"""By name after Qwen/Qwen3-, the fields of its config.json that say its size."""
SAVERS: dict[str, Sequence[Sequence[str]]] = {
    "sft": (
        [],
        ["optim.moments=bf16"],
        ["model.lora.rank=32"],
        ["model.lora.rank=32", "model.lora.quantize_base=nf4"],
    ),
    "rl": (
        [],
        *(
            [*more, *([f"rollout.tensor_parallel={ranks}"] if ranks > 1 else [])]
            for more in (["engine.offload_during_rollout=true"], ["model.lora.rank=32"])
            for ranks in (1, 2, 4, 8)
        ),
    ),
}
"""By method what is added to its settings until the run fits, from the first on."""


def with_tables(page: str) -> str:
    """Return the page with a table after each of its two configurations."""
    for method, title in (("sft", "sft.yaml"), ("rl", "grpo.yaml")):
        before, _, rest = page.partition(f'title="{title}"\n')
        document, _, rest = rest.partition("```\n")
        rest = rest.partition(_END)[2]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / title
            path.write_text(document)
            table = "\n".join(_table(method, path))
        page = f'{before}title="{title}"\n{document}```\n\n{table}\n{_END}{rest}'
    return page


def _table(method: str, path: Path) -> Iterator[str]:
    yield "| devices | Qwen3 | settings | memory | tokens/s |"
    yield "|---|---|---|---|---|"
    for machine, devices in MACHINES.items():
        for model in MODELS:
            if (found := _quickest(method, path, devices, model)) is None:
                continue
            plan, tokens, settings = found
            text = " ".join(f"`{each}`" for each in settings) or "as above"
            speed = f"{float(f'{tokens / plan.step_seconds:.2g}'):,.0f}"
            yield f"| {machine} | {model} | {text} | {plan.need / GIB:.0f} GiB | {speed} |"


def _quickest(
    method: str, path: Path, devices: str, model: str
) -> tuple[Plan, int, list[str]] | None:
    """Return the quickest plan that fits, with the tokens of a step and its settings; None if there is none."""
    for saver in SAVERS[method]:
        config = read_config(path, [f"model.path=Qwen/Qwen3-{model}", *saver])
        shape = ModelShape.of(MODELS[model])
        planner = Planner(shape, config, METHODS[method], parse_devices(devices))
        plan = next(iter(planner.all_plans()), None)
        if plan is not None and plan.fits:
            usual = replace(plan, engine=config.engine).overrides()
            own = [each for each in plan.overrides() if each not in usual]
            return plan, planner.work.sequences * planner.work.length, [*saver, *own]
    return None


def main() -> None:
    """Write the tables, or compare them."""
    text = PAGE.read_text()
    written = with_tables(text)
    if "--check" in sys.argv:
        sys.exit(0 if written == text else "docs/guides/recipes.md: run python scripts/recipes.py")
    PAGE.write_text(written)


if __name__ == "__main__":
    main()
