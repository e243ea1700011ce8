"""Fingerprints of a run's inputs: data, tokenizer, model and formula by content, not by path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import AlgorithmConfig, RewardFunctionConfig
from burnish.data.tasks import ExampleDataset, Mixture, PromptDataset
from burnish.errors import BurnishError, IncompatibleError
from burnish.files.safetensors import model_digest
from burnish.functions import fingerprint
from burnish.rewards.signature import BUILTINS

INPUTS = "inputs"
"""The key of state.json that holds the fingerprints."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Digests of a run's inputs."""

    vocabulary: str
    """Digest of every token with its id, and of the ids of bos, eos and pad."""
    tokenizer: str
    """Digest of the tokenizer's rules and chat template."""
    samples: int
    """Number of samples to train on; for streamed data, of bytes."""
    data: str
    """Digest of the samples' tokens and answers, in order; for streamed data, of the list of files."""
    formula: str = ""
    """Digest of the files of the functions that algorithm.advantage and algorithm.policy_loss name."""
    model: str = ""
    """Digest of the model that training started from; "" if its weights are not on this machine."""
    rewards: str = ""
    """Digest of the files of reward functions."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: ExampleDataset | PromptDataset | Mixture[Any],
        model: str | None,
        algorithm: AlgorithmConfig | None = None,
        rewards: Iterable[RewardFunctionConfig] = (),
    ) -> Inputs:
        """Fingerprint the inputs. `model` is a local directory."""
        special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        vocabulary = [sorted(tokenizer.get_vocab().items()), special]
        rules = [_rules(tokenizer), tokenizer.chat_template]
        formula = "" if algorithm is None else _formula_digest(algorithm)
        digests = _digest(vocabulary), _digest(rules), len(data), data.digest
        scores = [fingerprint(each.function, "reward.functions", BUILTINS) for each in rewards]
        return cls(*digests, formula, _weights_digest(model), _digest(scores))

    def changed_since(self, recorded: Any, where: PurePath) -> list[str]:
        """Return the changed inputs that are allowed to change, worded for a warning.

        Raises `IncompatibleError` if vocabulary, formula or number of samples changed.
        """
        names = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        if not isinstance(recorded, Mapping) or {k: type(v) for k, v in recorded.items()} != names:
            raise IncompatibleError(
                f"{where} does not say what it was trained on",
                want=f"the {INPUTS} that this version of Burnish writes",
                do=f"begin another run with name=NAME model.path={where}/model",
            )
        before = Inputs(**recorded)
        if self.vocabulary != before.vocabulary:
            raise IncompatibleError(
                f"{where} was trained with another vocabulary",
                have="token ids that mean something else",
                want="the tokenizer that the run began with",
                do="restore model.tokenizer, or begin another run with name=NAME",
            )
        if self.samples != before.samples:
            raise IncompatibleError(
                f"{where} was trained on other data",
                have=f"{before.samples} samples, and a position among them (of streamed data, bytes)",
                want=f"{self.samples} samples, as data.train holds",
                do="restore data.train and the settings that leave samples out, or begin another run with name=NAME",
            )
        if self.formula != before.formula:
            raise IncompatibleError(
                f"{where} was trained with another formula",
                have="a function of algorithm.advantage or algorithm.policy_loss with other content",
                want="the file that the run began with",
                do="restore the file, or begin another run with name=NAME",
            )
        told = []
        if self.tokenizer != before.tokenizer:
            told.append("the tokenizer's rules or its chat template")
        if self.data != before.data:
            told.append("the content of data.train")
        if self.model and before.model and self.model != before.model:
            told.append("the model at model.path")
        if self.rewards != before.rewards:
            told.append("the files of reward.functions")
        return told

    def as_state(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def _formula_digest(algorithm: AlgorithmConfig) -> str:
    names = {
        "algorithm.advantage": algorithm.advantage,
        "algorithm.policy_loss": algorithm.policy_loss,
    }
    found = {s: fingerprint(name, s) for s, name in names.items() if ":" in name}
    return _digest(found) if found else ""


def _weights_digest(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return model_digest(Path(path).expanduser())
    except (BurnishError, OSError):
        return ""


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a fast tokenizer's rules, except padding and truncation, which calls change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
