"""Reinforcement learning with verifiable rewards: GRPO, its variants, and PPO.

A step generates completions for each prompt, scores them, turns rewards into advantages, updates critic and policy, and publishes
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import torch

from burnish.algorithms.base import Advantage, load_advantage
from burnish.algorithms.kl import adapted
from burnish.algorithms.schedule import learning_rate
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import RunConfig
from burnish.data.loader import Loader
from burnish.distributed.collectives import agree
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, LossFn
from burnish.methods.parts.generators import make_collector
from burnish.methods.parts.guard import Guard
from burnish.methods.parts.policy_update import CRITIC, PolicyUpdate, policy_stats
from burnish.methods.parts.rollouts import GroupSampler, Judge, RolloutQueue
from burnish.methods.rl import RL
from burnish.records import Batch
from burnish.runs.download_inputs import local_inputs
from burnish.runs.model_card import model_card
from burnish.runs.run import Run, Validation, counted
from burnish.runs.session import Session, open_run
from burnish.runs.setup import (
    Foundation,
    Learner,
    lay_foundation,
    load_start,
    make_loader,
    make_run_engine,
    reward_pool,
    train_dataset,
    validation_dataset,
)
from burnish.runs.trainer_state import Fingerprints, weights_version
from burnish.tracking.stats import Max, Stats

if TYPE_CHECKING:
    from burnish.runs.frozen_engines import LoadedModel


def train(method: RL, config: RunConfig, layout: Layout, device: torch.device) -> None:
    """Train with rewards as `config` says, from where its run directory left off. Collective."""
    config, local = local_inputs(config, device, layout, method=method)
    with ExitStack() as stack:
        session = stack.enter_context(open_run(config, method, layout, device))
        pool = stack.enter_context(
            reward_pool(local.reward, local.rollout.environment, session.spans.move)
        )
        progress = session.progress
        advantage = load_advantage(config.algorithm.advantage)
        loss = method.loss(config)
        with progress.phase("setup", 4) as bar:
            card = model_card(method, config)
            frozen = method.frozen(local)
            foundation = lay_foundation(
                local, layout, device, given=config.model, card=card, beside=frozen
            )
            bar.advance()
            read = partial(method.dataset, foundation, pool=pool, progress=progress)
            dataset = train_dataset(read, local.data)
            held_out = validation_dataset(read, local.data) if local.data.validation else None
            # A broken reward ends the run here, and not after the first generation.
            pool.require_answer(dataset[0], dataset.first_row)
            bar.advance()
            by_epoch = method.stays_in_epoch(config)
            size = method.rows_per_step(config)
            loader = make_loader(dataset, config.data, config.seed, size, by_epoch=by_epoch)
            total = config.steps or loader.takes(size, config.epochs)
            formula = config.algorithm, local.reward.functions
            fingerprints = Fingerprints.of(
                foundation.tokenizer,
                dataset,
                local.model.path,
                *formula,
                method=method.source,
                functions=method.functions(config),
            )
            lengths = total, loader.epoch_steps(size)
            run, update, judge, engines, beside = _models(
                foundation, session, fingerprints, *lengths, method, advantage
            )
            # The models are loaded before the loader knows its place: only the step that was loaded says which rows come next.
            loader.state = run.state.cursor
            bar.advance()
            collector = make_collector(
                foundation, pool, session.stopper.check, progress, judge, session.spans
            )
            stack.callback(collector.generator.close)
            if config.engine.offload_during_rollout:
                collector = replace(collector, offloads=engines)
            version = weights_version(run.state.step, config.critic.warmup_steps)
            check = Guard(update, collector.generator, dataset, layout, version).check
            sampler = GroupSampler(config, collector, dataset, loader)
            queue = stack.enter_context(closing(RolloutQueue(sampler, total, check)))
            queue.restore(run.pending, run.partial)
            # A generator's copy of the weights is in no checkpoint. It comes from the engine, at a start as after every step.
            queue.publish(update.engine.published(), version)
            training = _Training(
                method, config, session, run, update, queue, loader, loss, beside, total
            )
            validate: Validation | None = None
            if held_out:
                from burnish.methods.parts.validation import prompt_validation

                validate = prompt_validation(foundation, collector, held_out, queue.idle)
            bar.advance()
        with run.training(validate, queue):
            for step in run.steps():
                training.learn(step)
        with agree(layout):
            collector.failures.require_answer()


@dataclass(frozen=True, slots=True)
class _Training:
    """What a step needs."""

    method: RL
    config: RunConfig
    session: Session
    run: Run
    update: PolicyUpdate
    queue: RolloutQueue
    loader: Loader
    loss: LossFn
    beside: Mapping[str, LoadedModel]
    """The frozen models, by setting."""
    total: int
    """Number of steps."""

    def learn(self, step: int) -> None:
        """Take a step: draw completions, learn from them, publish the weights. Collective."""
        config = self.config
        spans = self.session.spans
        update = self.update
        kl = config.algorithm.kl
        adaptive = None if kl.target is None else self.run.state.kl_coef
        kl_coef = kl.coef if adaptive is None else adaptive
        learning = step >= config.critic.warmup_steps
        with spans("rollout"):
            drawn = self.queue.take(step)
        with spans("advantages"):
            learned_from = self.method.select(config, drawn.groups)
            batches = update.minibatches(learned_from)
            credit = update.assign_credit(learned_from, batches, kl_coef)
            batches = credit.batches
            if learning:
                batches = update.with_logprobs(batches, step)
                if update.teachers is not None:
                    batches = update.teachers.answered(batches, learned_from)
                batches = [self.method.prepare(config, batch, self.beside) for batch in batches]
        # The last look at signals in this step. An update that has begun is finished, because the weights in its middle
        # belong to no step.
        self.session.stopper.check_all()
        with spans("update"):
            stats = self._update(
                update.in_epochs(batches, step), step, credit.stats, learning=learning
            )
        if learning:
            with spans("publish"):
                self.queue.publish(update.engine.published(), step + 1)
        if kl.target is not None:
            stats = stats.merge(Stats({"actor/kl_coef": Max(torch.tensor(kl_coef))}))
            kl_coef = adapted(kl_coef, credit.kl, int(learned_from.is_scored.sum()), kl)
        self.run.finish(
            stats.merge(self.queue.stats(drawn)),
            cursor=self.loader.state,
            batches=batches,
            kl_coef=None if kl.target is None else kl_coef,
            rollouts=drawn.groups,
            advantages=credit.advantages,
            by_token=credit.by_token,
        )

    def _update(
        self, batches: Sequence[Batch], step: int, stats: Stats, *, learning: bool
    ) -> Stats:
        """Update the critic, and the policy if it is `learning`; return `stats` and theirs. Collective."""
        config = self.config
        waiting = config.critic.warmup_steps
        count = sum(len(batch.microbatches) for batch in batches) if learning else None
        with self.session.progress.phase("update", count) as bar:
            for batch in batches:
                if self.update.critic is not None:
                    stats = stats.merge(self.update.critic.update(batch, step))
                if learning:
                    # A function of the step, with no state of its own: so it is right after any resume.
                    lr = learning_rate(step - waiting, self.total - waiting, config.optim)
                    engine = self.update.engine
                    seeded = replace(batch, seed=config.seed)
                    learned = engine.forward_backward(seeded, counted(self.loss, bar))
                    stats = stats.merge(policy_stats(learned.merge(engine.optim_step(lr))))
        return stats


def _models(
    foundation: Foundation,
    session: Session,
    fingerprints: Fingerprints,
    total_steps: int,
    epoch_steps: Fraction,
    method: RL,
    advantage: Advantage | None,
) -> tuple[Run, PolicyUpdate, Judge | None, Sequence[Engine], Mapping[str, LoadedModel]]:
    """Load the models. Return the run, its update, its reward models, the engines that do not generate or judge, and the frozen models by setting."""
    config = foundation.config
    engine = make_run_engine(foundation, config.optim)
    learners: dict[str, Learner] = {MAIN: Learner(engine, foundation)}
    critic = None
    if config.algorithm.advantage.name == "gae":
        from burnish.methods.parts.critic import Critic

        critic = Critic.make(foundation, total_steps, engine)
        learners[CRITIC] = critic
    run = Run(session, learners, fingerprints, total_steps, epoch_steps)
    engines = [each.engine for each in learners.values()]
    loaded: Mapping[str, LoadedModel] = {}
    if foundation.beside:
        from burnish.runs.frozen_engines import load_beside

        loaded = load_beside(foundation, engine)
        late = [each.setting for each in foundation.beside if each.phase == "log-probs"]
        engines += [loaded[setting].engine for setting in late]
    judge: Judge | None = None
    if config.reward.models:
        from burnish.methods.parts.judges import load_judge

        judge = load_judge(foundation, loaded)
    reference = None
    if config.algorithm.kl.coef > 0 or method.keeps_start(config):
        initial = load_start(foundation, engine, session.intact)
        reference = partial(initial.forward, adapter=initial is not engine)
        engines += [initial] if initial is not engine else []
    teachers = None
    if config.distill.teachers:
        from burnish.methods.parts.distillation import load_teachers

        teachers = load_teachers(foundation, engine, loaded, session.intact)
        engines += teachers.engines
    costs = foundation.costs
    update = PolicyUpdate(
        engine, reference, critic, costs, config, advantage, teachers, method.in_pairs
    )
    return run, update, judge, engines, loaded
