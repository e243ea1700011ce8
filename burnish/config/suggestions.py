"""Answer an unknown key: a name of another framework, or a misspelt one. Only errors load this."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from burnish.config.document import one_line
from burnish.config.foreign_names import (
    explain_foreign,
    foreign_names,
    known_ending,
    translate_setting,
)
from burnish.config.keys import is_default, known_keys, plain_name

METHODS_ELSEWHERE: Mapping[str, str] = {
    **{
        name: f"write burnish dpo with method.loss={{{name}: 1.0}}"
        for name in ("ipo", "kto", "orpo", "simpo")
    },
    **dict.fromkeys(("raft", "rejection"), "write burnish rejection-sampling"),
    "grpo": "write burnish rl, whose default is GRPO",
    "ppo": "write burnish rl with algorithm.advantage=gae, which trains a critic",
    "train": "write burnish sft or burnish rl",
}
"""What to do instead of a command that another framework has."""
_OF_METHODS: Mapping[str, str] = {
    "center_rewards_coefficient": "center",
    "loss_type": "loss",
    "pref_beta": "beta",
    "pref_loss": "loss",
    "rl_beta": "beta",
}
"""Settings of methods that other frameworks call otherwise."""
_LONGEST = 100
"""Most characters of a name that could be a misspelt key."""
_LEAST_LIKENESS = 0.75
# A likeness of last parts counts a little less than one of whole names, which also decides between equals.
_OF_LAST_PARTS = 0.92
_OF_WHOLE_NAMES = 0.1


def suggestion(name: str, value: Any = None, own: Collection[str] = ()) -> tuple[str, str]:
    """Return `want` and `do` of the error for an unknown key (`trainer.save_freq`, `rolout.n`) and its value.

    `own` are the settings of the method's own. They count before those of other methods.
    """
    name = plain_name(name)
    if name in own:
        text = "VALUE" if value is None else one_line(value)
        return f"method.{name}, a setting of this method", f"write method.{name}={text}"
    if _OF_METHODS.get(name) in own:
        key = f"method.{_OF_METHODS[name]}"
        return f"{key}, which is called {name} elsewhere", f"set {key}"
    # Another framework's name of a sampling setting does not say which completions are meant.
    if {f"rollout.{name}", f"evaluation.{name}"} <= known_keys().keys():
        return _of_unknown(name)
    settings = None if value is None else translate_setting(name, value)
    if settings is not None and all(is_default(*setting) for setting in settings.items()):
        return "no setting, because this is the default", "leave it out"
    ending = known_ending(name)
    if ending is None:
        return _of_unknown(name)
    want, do = _of_known(ending)
    if settings:
        words = " ".join(f"{key}={one_line(meant)}" for key, meant in settings.items())
        do = f"write {words}"
    return want, do


def _of_known(ending: str) -> tuple[str, str]:
    """Return `want` and `do` for a name that a table of foreign names has, or that ends in a known key."""
    tables = foreign_names()
    want = explain_foreign(ending)
    if ending in tables.renamed:
        return want, f"write {tables.renamed[ending]}"
    if ending in tables.different:
        return want, f"set {want.partition(':')[0]}"
    if ending in tables.absent:
        return want, "leave it out"
    return "a known key", f"did you mean {ending}?"


def _of_unknown(name: str) -> tuple[str, str]:
    """Return `want` and `do` for a name of which no ending is known."""
    known = known_keys()
    namesakes = [key for key in known if key.rpartition(".")[2] == name]
    if len(namesakes) > 1:
        return "a known key", f"did you mean {' or '.join(namesakes)}?"
    if near := nearest(name):
        return "a known key", f"did you mean {near}?"
    section = known.get(name.rpartition(".")[0])
    if section is not None and section.section:
        want = f"one of {', '.join(section.section)}"
        return want, f"see `burnish config explain {section.name}`"
    return "a known key", "see `burnish config explain` for all keys"


def meant_by_path(path: str) -> str:
    """Return advice on a path that is no configuration: it may be data, a model or a run."""
    if path.endswith((".jsonl", ".json", ".parquet", ".csv", ".arrow")):
        return f"data are data.train={path}"
    if Path(path, "config.json").is_file():
        return f"a model is model.path={path}"
    if Path(path).is_dir():
        return f"give a file in it, as {Path(path) / 'config.yaml'}"
    if not path.endswith((".yaml", ".yml")) and path.count("/") == 1:
        return f"a model is model.path={path}"
    return "give the file first, then key=value overrides"


def nearest(name: str) -> str | None:
    """Return the known key most like `name`, or None.

    A key's last part and the whole key are compared; the better match counts. Names of other frameworks count by their last part.
    """
    if len(name) > _LONGEST:
        return None
    last = name.rpartition(".")[2]
    scores: dict[str, float] = {}
    for key, known in known_keys().items():
        if known.section and name.startswith(f"{key}."):
            continue  # the section is right, and the name in it is wrong
        whole = _likeness(name, key)
        of_last = _OF_LAST_PARTS * _likeness(last, key.rpartition(".")[2])
        scores[key] = max(whole, of_last) + _OF_WHOLE_NAMES * whole
    for elsewhere, key in foreign_names().renamed.items():
        if key in scores:
            scores[key] = max(scores[key], _OF_LAST_PARTS * _likeness(last, elsewhere))
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= _LEAST_LIKENESS else None


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
