"""Write `report.html`: the page of `burnish view` in one file, with its answers for one run. Needs no torch and no server."""

from __future__ import annotations

import json
import logging
import math
import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from burnish.config.document import dotted, recorded
from burnish.errors import BurnishError
from burnish.files.storage import open_regular
from burnish.redaction import redacted
from burnish.tracking.attention import find_attention
from burnish.tracking.curves import Curve, Curves
from burnish.tracking.rollouts import Row, rank, read_rollouts, rollout_files
from burnish.tracking.rundir import (
    ENDED,
    REASON,
    STATE,
    STEPS,
    TRAINER,
    RunDirectory,
    write_atomically,
)

MAX_CURVES = 1000
MAX_POINTS = 400
READ_BYTES = 32_000_000
"""Most metrics, most points of a line, and most bytes of rollout files that are read, besides the newest and the oldest one."""
log = logging.getLogger("burnish")

_PAGE = Path(__file__).parents[1] / "view" / "page"
_CONFIG_BYTES = 4 << 20
_MODEL = re.compile(r"^model:\n(?:  .*\n)*?  path: (.*)$", re.M)
_TEXT_LIMIT = 3000
_EXAMPLES = 3
_MESSAGES = 40  # of a conversation
_ASSET = re.compile(
    r'<link rel="stylesheet" href="static/(?P<style>\S+)">'
    r'|<script src="static/(?P<script>\S+)" defer></script>'
    r'|<script type="module" src="static/(?P<module>\S+)"></script>'
)
_IMPORT = re.compile(r'^import .* from "\./(\S+)";\n', re.M)
# mark the places in the page
_ANSWERS = "<!-- answers -->"
_POLICY = '<meta charset="utf-8">\n'


def write_report(run_dir: Path) -> Path:
    """Write `report.html` for a run's directory, and return its path. Raises `CorruptError` for a broken file."""
    run = RunDirectory(run_dir)
    curves = Curves(run.metrics).whole()
    name = run_dir.resolve().name
    config = redacted(config_text(run))
    environment = run.read_environment()
    status = run.read_status()
    facts = {"run": name, "name": name, "kind": environment.get(TRAINER), "model": model_of(run)}
    facts |= {"step": curves.last_step, "of": status.get(STEPS)}
    facts |= {key: status.get(key) for key in (STATE, REASON, ENDED)}
    facts["started"] = environment.get("started")
    items = _attention(run, curves, status.get(STEPS))
    facts["attention"] = len(items)
    answers = {
        "runs": {"runs": [facts]},
        "metrics": {
            name: {
                key: each.points(MAX_POINTS, 0, each.steps[-1])
                for key, each in _bounded(curves.by_name).items()
            }
        },
        "rollouts": choose_examples(run.rollouts) or {"rows": []},
        "attention": {"items": items},
        "config": {"text": {name: config}, "settings": [], "different": []},
        "environment": {"environment": environment},
    }
    # A "<" could end the element that holds the answers.
    text = json.dumps(answers, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    write_atomically(run.report, _page().replace(_ANSWERS, text))
    return run.report


def _attention(run: RunDirectory, curves: Curves, steps: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {}
    with suppress(BurnishError):
        settings = dict(dotted(recorded(run.config).model_dump(mode="json")))
    total = steps if isinstance(steps, int) else None
    found = find_attention(curves.by_name, settings | {"steps": total})
    return [each._asdict() for each in found]


def model_of(run: RunDirectory) -> str | None:
    """Return the model that a run's configuration names, even if another version wrote it."""
    match = _MODEL.search(config_text(run))
    return match[1].strip("\"'") if match and match[1] != "null" else None


def config_text(run: RunDirectory) -> str:
    """Return the beginning of a run's configuration; "" without one."""
    if not run.config.exists():
        return ""
    with open_regular(run.config) as file:
        return file.read(_CONFIG_BYTES).decode("utf-8", "replace")


def _bounded(curves: Mapping[str, Curve]) -> Mapping[str, Curve]:
    """Leave out metrics beyond `MAX_CURVES`, first parts of rewards."""
    if len(curves) <= MAX_CURVES:
        return curves
    names = sorted(curves, key=lambda name: "reward/parts/" in name)[:MAX_CURVES]
    log.warning("report.html has %d of %d metrics", MAX_CURVES, len(curves))
    return {name: curves[name] for name in names}


@cache
def _page() -> str:
    """Return the page with styles and scripts inlined, and a policy that forbids others."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(match: re.Match[str]) -> str:
        kind, name = next((kind, name) for kind, name in match.groupdict().items() if name)
        tag = kind
        text = _asset(name)
        before = ""
        if kind == "module":
            tag = "script"
            text = "".join(_modules(name, set()))
            before = f'<script type="application/json" id="frozen">{_ANSWERS}</script>\n'
        digest = b64encode(sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"{before}<{tag}{' type=module' * bool(before)}>{text}</{tag}>"

    page = _ASSET.sub(inlined, _asset("index.html"))
    sources = "; ".join(f"{tag}-src {' '.join(each)}" for tag, each in hashes.items())
    policy = f"default-src 'none'; {sources}; img-src data:"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return page.replace(_POLICY, _POLICY + meta)


def _asset(name: str) -> str:
    return (_PAGE / name).read_text("utf-8")


def _modules(name: str, seen: set[str]) -> Iterator[str]:
    """Yield a module's text after those of the modules that it imports. All share one scope."""
    if name not in seen:
        seen.add(name)
        text = _asset(name)
        for other in _IMPORT.findall(text):
            yield from _modules(other, seen)
        yield re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.M)


def choose_examples(directory: Path, count: int = _EXAMPLES) -> dict[str, Any] | None:
    """Return up to `count` rollouts of each kind from a directory of rollouts, if any. Raises `CorruptError`.

    `best` and `worst` name rows of the newest `step`, one per prompt. `changed` has an early row, a late row and both mean rewards.
    """
    groups: dict[int, dict[int, list[Row]]] = {}
    for path in _within_budget([path for _, path in rollout_files(directory)]):
        for row in read_rollouts(path):
            if not row.get("branch"):
                groups.setdefault(row["prompt_index"], {}).setdefault(row["step"], []).append(row)
    if not groups:
        return None
    by_prompt = [groups[index] for index in sorted(groups)]
    newest = max(step for by_step in by_prompt for step in by_step)
    latest = [by_step[newest] for by_step in by_prompt if newest in by_step]
    best = sorted((max(group, key=rank) for group in latest), key=rank, reverse=True)[:count]
    worst = sorted((min(group, key=rank) for group in latest), key=rank)[:count]
    scored = (
        {step: rows for step, group in by_step.items() if (rows := [*filter(_has_reward, group)])}
        for by_step in by_prompt
    )
    changes = [_change(steps[min(steps)], steps[max(steps)]) for steps in scored if steps]
    changed = sorted(changes, key=lambda change: -abs(change[3] - change[2]))[:count]
    changed = [change for change in changed if change[2] != change[3]]
    shown = (*(row for pair in changed for row in pair[:2]), *best, *worst)
    return {
        "rows": list({_name(row): _shown(row) for row in shown}.values()),
        "examples": {
            "step": newest,
            "best": list(map(_name, best)),
            "worst": list(map(_name, worst)),
            "changed": [[_name(early), _name(late), *means] for early, late, *means in changed],
        },
    }


def _within_budget(paths: list[Path]) -> list[Path]:
    alternating = [path for pair in zip(reversed(paths), paths, strict=True) for path in pair]
    alternating = alternating[: len(paths)]
    spent = list(accumulate(path.stat().st_size for path in alternating))
    return alternating[: max(2, bisect_right(spent, READ_BYTES))]


def _change(early: list[Row], late: list[Row]) -> tuple[Row, Row, float, float]:
    """Return each group's row nearest to its mean reward, of two the one farther from the other mean, and both means."""
    before, after = (fmean(map(_finite_reward, group)) for group in (early, late))

    def typical(group: list[Row], mean: float, other: float) -> Row:
        farthest_first = sorted(group, key=_finite_reward, reverse=mean > other)
        return min(farthest_first, key=lambda row: abs(_finite_reward(row) - mean))

    return typical(early, before, after), typical(late, after, before), before, after


def _has_reward(row: Row) -> bool:
    return not math.isnan(float(row["reward"]))


def _finite_reward(row: Row) -> float:
    reward = float(row["reward"])
    return reward if math.isfinite(reward) else 0.0


def _name(row: Row) -> str:
    return f"{row['step']}-{row['prompt_index']}-{row.get('sample', 0)}"


def _shown(row: Row) -> Row:
    """Return a row as the server gives it. Long texts are shortened, and then have no tokens."""
    texts = {name: row[name] for name in ("prompt", "completion", "answer") if row.get(name)}
    short: Row = {name: _shortened(text) for name, text in texts.items()}
    tokens = row.get("tokens") if len(row["completion"]) <= _TEXT_LIMIT else None
    if isinstance(row.get("conversation"), list):
        short["conversation"] = [*map(_shortened_message, row["conversation"][:_MESSAGES])]
    return row | short | {"id": _name(row), "kind": "step", "tokens": tokens}


def _shortened_message(message: Any) -> Any:
    """Return a message with a short content; one of long calls loses these."""
    if not isinstance(message, dict):
        return None
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    is_long = len(json.dumps(message.get("calls"))) > _TEXT_LIMIT
    return message | {"content": _shortened(text)} | ({"calls": []} if is_long else {})


def _shortened(text: str) -> str:
    half = _TEXT_LIMIT // 2
    left_out = f"\n[… {len(text) - 2 * half:,} characters left out …]\n"
    return text if len(text) <= _TEXT_LIMIT else text[:half] + left_out + text[-half:]
