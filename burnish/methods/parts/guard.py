"""Compare the generator with the engine: both score a few completions, and the run stops if they disagree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from burnish.distributed.collectives import agree, any_rank, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.methods.parts.rollouts import sampling
from burnish.records import Completion, Prompt, Request, Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.records.seeds import derive_seed
from burnish.rollout.base import Generator

# Least number of prompts, and most tokens of a completion.
_PROMPTS = 4
_TOKENS = 16
# Nats per token. Rounding causes less, even if it sometimes routes a token to another expert.
_ROUNDING_NATS = {"fp32": 0.01, "bf16": 0.2}
# How many times the limit of the mean a single token may differ by.
_SINGLE = {"fp32": 10.0, "bf16": 2.5}

_log = logging.getLogger("burnish")


@dataclass(frozen=True, slots=True)
class Guard:
    """Compares the generator's log-probs with the engine's."""

    update: PolicyUpdate
    generator: Generator
    prompts: Sequence[Prompt]
    layout: Layout
    first: int
    """The first version of the weights that this process publishes."""

    def check(self, version: int) -> None:
        """Compare after the first and every `rollout.check_every`-th version. Collective.

        Raises `BurnishError`, naming the first tensor that differs, if the mean is above `rollout.max_disagreement`, or in fp32 a single
        token far above it. In bf16 such tokens are only named: rounding sends some to other experts.
        """
        config = self.update.config
        rollout = config.rollout
        limit = config.rollout.max_disagreement
        if limit is None or (version != self.first and version % rollout.check_every):
            return
        if limit == "auto":
            limit = _ROUNDING_NATS[config.engine.precision]
        precision = config.engine.precision
        large = limit * _SINGLE[precision]
        drawn = self._drawn()
        tokens = int(drawn.lengths.sum())
        apart = self.update.disagreement(drawn, large)
        mean = float(apart[:, 0].sum()) / max(tokens, 1)
        count = int(apart[:, 1].sum())
        worst = int(apart[:, 2].argmax())
        most, token = apart[worst, 2:]
        singles = f"{count} of {tokens} tokens by more than {large:g}, the most by {most:.3g}: token {int(token) + 1} of completion {worst + 1}"
        if mean <= limit and (not count or precision == "bf16"):
            if count and self.layout.is_main:
                _log.warning(
                    "generator and engine disagree on the log-probs of single tokens, with weights of version %d: %s. Rounding in a mixture "
                    "of experts can be the reason. If the model is none, compare the two in engine.precision=fp32",
                    version,
                    singles,
                )
            return
        name, compared = self._first_difference()
        location = f"the first tensor that differs is {name}"
        if name is None:
            location = f"all {compared} tensors that the generator reads back are equal"
        raise BurnishError(
            f"generator and engine disagree on the log-probs of the same tokens, with weights of version {version}",
            have=f"{mean:.3g} nats on average over {tokens} tokens{f'; {singles}' if count else ''}; {location}",
            want=f"rollout.max_disagreement: {limit:g} at most on average, and {large:g} for a single token",
            do="raise rollout.max_disagreement if you know why generator and engine compute differently"
            if name is None
            else "start the same command again; if the error returns, report that this tensor is published wrongly",
        )

    def _drawn(self) -> RolloutTable:
        """Return a completion of each prompt, from every rank's generator. Collective."""
        config = self.update.config
        rank = self.layout.rank
        world = self.layout.world
        asking = 1 if self.generator.called_by_rank0 else world
        seed = derive_seed(config.seed, "guard") % 2**63
        how = sampling(config.rollout, config.rollout, seed, step=0)
        replayed = config.algorithm.router_replay == "rollout"
        how = replace(how, max_tokens=min(how.max_tokens, _TOKENS), experts=replayed)
        numbers = range(max(_PROMPTS, world, config.rollout.servers))
        prompts = [self.prompts[number % len(self.prompts)] for number in numbers]
        own_numbers = numbers[rank::asking] if rank < asking else ()
        requests = [Request(number, prompts[number].token_ids) for number in own_numbers]
        drawn: list[list[Completion]] = []
        with agree(self.layout):
            drawn = self.generator.generate(requests, how) if requests else []
        pairs = zip(own_numbers, drawn, strict=True)
        own = [[Rollout(prompts[n], 0, completion, "")] for n, (completion,) in pairs]
        table = RolloutTable.of(own, rank)
        everything = RolloutTable.gathered(gather_objects(table.encoded(), self.layout), table)
        return everything.take(np.argsort([n % asking for n in numbers], kind="stable").argsort())

    def _first_difference(self) -> tuple[str | None, int]:
        """Return the first tensor that differs on any rank, and how many can be compared."""
        from burnish.boxes.gather import Gather, assembled

        published = self.update.engine.published()
        have = [*published.fixed, *published.changing]
        held = list(self.generator.checksums())
        told = gather_objects([spec for spec, _ in held], self.layout)
        specs = list(dict.fromkeys(spec for theirs in told for spec in theirs))
        for tensor in assembled(Gather(have, specs, self.layout).run(have)):
            mine = {checksum for spec, checksum in held if spec == tensor.spec}
            if any_rank(bool(mine) and mine != {tensor.checksum()}, self.layout):
                return tensor.spec.name, len(specs)
        return None, len(specs)
