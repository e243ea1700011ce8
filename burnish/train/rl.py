"""Reinforcement learning with verifiable rewards: GRPO and kin, and PPO.

One step: generate a group of completions for each prompt, score them, turn rewards into advantages, update critic and policy,
and publish the weights to the generator. Every process runs the same function. Left out: generation ahead of training, turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from burnish.algorithms.dapo import overlong_penalty, select_groups
from burnish.algorithms.kl import adapted
from burnish.algorithms.loss import policy_loss_fn
from burnish.algorithms.schedule import learning_rate
from burnish.checkpoint.layout import MAIN
from burnish.config.schema import OverlongConfig, RunConfig
from burnish.data.loader import Loader
from burnish.data.tasks import PromptDataset
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Engine, Part
from burnish.errors import UsageError
from burnish.records import Rollout
from burnish.rewards.overview import rollout_stats
from burnish.rewards.pool import RewardPool
from burnish.tracking.stats import Max, Stats
from burnish.train.collect import Collector
from burnish.train.critic import CRITIC, Critic
from burnish.train.evaluate import held_out_prompts, prompt_validation
from burnish.train.fingerprints import Inputs
from burnish.train.localize import with_local_inputs
from burnish.train.offload import Parking
from burnish.train.policy_update import (
    Policy,
    PolicyUpdate,
    policy_stats,
)
from burnish.train.reward_models import Judge, load_judge
from burnish.train.run import Run, Work, open_run
from burnish.train.setup import (
    Foundation,
    Learner,
    lay_foundation,
    make_collector,
    make_engine,
    prompt_dataset,
    sampling,
)
from burnish.train.trainer_state import weights_version


def train(config: RunConfig) -> None:
    """Run reinforcement learning as `config` says; resumes where its run directory left off."""
    local = with_local_inputs(config)
    launch(lambda layout, device: _train(config, local, layout, device), config.distributed)


def _train(config: RunConfig, local: RunConfig, layout: Layout, device: torch.device) -> None:
    with open_run(config, "rl", layout, device) as run, RewardPool(local.reward) as pool:
        with run.progress.phase("setup", 4) as bar:
            foundation = lay_foundation(local, config)
            bar.advance()
            dataset = prompt_dataset(foundation, local.data.train, "data.train")
            pool.check_columns(dataset.rows.columns, "data.train")
            held_out = held_out_prompts(foundation, pool)
            bar.advance()
            by_epoch = config.steps is None and not config.algorithm.dynamic_sampling.enabled
            loader = Loader(len(dataset), config.seed, config.data.shuffle, by_epoch=by_epoch)
            total = config.steps or loader.takes(config.batch.prompts, config.epochs)
            inputs = Inputs.of(foundation.tokenizer, dataset, local.model.path, config.algorithm)
            policy, critic, judge, parked = _models(foundation, run, inputs, total)
            bar.advance()
            collector = make_collector(
                foundation, pool, layout, device, run.stopper, run.progress, judge
            )
            version = weights_version(run.position.step, config.critic.warmup_steps)
            collector.generator.load_weights(policy.engine.published(), version)
            loader.cursor = run.position.cursor
            update = PolicyUpdate(policy, critic, config)
            kl = config.algorithm.kl
            kl_coef = kl.coef if run.position.kl_coef is None else run.position.kl_coef
            waiting = config.critic.warmup_steps
            loss = policy_loss_fn(config.algorithm, config.rollout.max_response_length)
            validate = prompt_validation(foundation, collector, held_out, run.write_validation)
            run.validate = parked.around(validate)
            bar.advance()
        run.start()
        for step in run.steps():
            learning = step >= waiting
            with run.spans("rollout"), parked():
                groups, left_out = collect_groups(dataset, loader, collector, config, step)
            with run.spans("advantages"):
                credit = update.assign_credit(groups, kl_coef)
                batches = update.minibatches(groups, credit)
                if learning:
                    batches = update.with_logprobs(batches, step)
            run.check_stop()
            stats, updates = credit.stats, update.in_epochs(batches, step)
            with run.spans("update"), run.progress.phase("update", len(updates)) as bar:
                for batch in updates:
                    if critic is not None:
                        stats = stats.merge(critic.update(batch, step))
                    if learning:
                        lr = learning_rate(step - waiting, total - waiting, config.optim)
                        learned = policy.engine.forward_backward(batch, loss)
                        learned = learned.merge(policy.engine.optim_step(lr))
                        stats = stats.merge(policy_stats(learned))
                    bar.advance()
            if learning:
                with run.spans("publish"):
                    collector.generator.load_weights(policy.engine.published(), step + 1)
            rollouts = [rollout for group in groups for rollout in group]
            generated = [rollout for group in left_out for rollout in group] + rollouts
            run.write_rollouts(rollouts, credit.means)
            if kl.target is not None:
                stats = stats.merge(Stats({"actor/kl_coef": Max(torch.tensor(kl_coef))}))
                kl_coef = adapted(kl_coef, credit.kl, len(rollouts), kl)
            run.finish(
                stats.merge(rollout_stats(generated)),
                cursor=loader.cursor,
                work=Work.of(batches),
                kl_coef=None if kl.target is None else kl_coef,
            )
        run.complete()


def _models(
    foundation: Foundation, run: Run, inputs: Inputs, total_steps: int
) -> tuple[Policy, Critic | None, Judge, Parking]:
    """Return the policy, the critic, the reward models, and the models to park; weights are resumed or initial."""
    config = foundation.config
    engine = make_engine(foundation, config.optim, run.layout, run.device)
    learners = {MAIN: Learner(engine, foundation)}
    critic = None
    if config.algorithm.advantage == "gae":
        critic = Critic.make(foundation, total_steps, run.layout, run.device, engine)
        learners[CRITIC] = critic.learner
    if run.begin(learners, inputs, total_steps) is None:
        for learner in learners.values():
            learner.engine.load(learner.foundation.source, Part.WEIGHTS)
    judge = load_judge(config, run.layout, run.device, engine)
    reference = _reference(foundation, engine, run)
    forward = None
    if reference is not None:
        forward = partial(reference.forward, adapter=reference is not engine)
    engines = {id(each): each for each in (reference, *(le.engine for le in learners.values()))}
    parking = Parking([e for e in engines.values() if e is not None and config.engine.park])
    return Policy(engine, forward, foundation.costs), critic, judge, parking


def _reference(foundation: Foundation, engine: Engine, run: Run) -> Engine | None:
    """Return the frozen initial model if KL needs it; with a fresh adapter it is `engine`, with the adapter off."""
    config, adapter = foundation.config, foundation.config.model.adapter
    if config.algorithm.kl.coef == 0:
        return None
    if adapter and adapter.path is None:
        return engine
    run.intact.require(*foundation.beginnings)
    reference = make_engine(foundation, None, run.layout, run.device, engine)
    reference.load(foundation.base, Part.FROZEN)
    reference.load(foundation.source, Part.WEIGHTS)
    return reference


def collect_groups(
    dataset: PromptDataset, loader: Loader, collector: Collector, config: RunConfig, step: int
) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
    """Return the scored groups of a step, and those left out. Collective; the same on every rank.

    Dynamic sampling replaces groups of equal rewards by groups of the next prompts, in a bounded number of rounds. It compares
    rewards before the penalty for length.
    """
    how = replace(
        sampling(config.rollout, config.rollout, config.seed, step),
        experts=config.algorithm.router_replay == "rollout",
    )
    dynamic = config.algorithm.dynamic_sampling
    shaped = partial(
        _shaped, limit=config.rollout.max_response_length, overlong=config.algorithm.overlong
    )
    groups: list[list[Rollout]] = []
    wanted, refills = config.batch.prompts, 0
    while True:
        first_key = loader.cursor
        prompts = [dataset[index] for index in loader.take(wanted)]
        collected = collector.collect(prompts, first_key, config.rollout.n, how)
        if config.algorithm.advantage == "remax":
            greedy = collector.collect(prompts, first_key, 1, replace(how, temperature=0.0))
            baselines = [shaped(rollout).reward for (rollout,) in greedy]
            collected = _with_greedy_rewards(collected, baselines)
        groups += collected
        rewards = compared(groups, dynamic.part, config.reward.part_names)
        selection = select_groups(rewards, config.batch.prompts, refills, dynamic)
        if selection.refill == 0:
            found = [[shaped(rollout) for rollout in group] for group in groups]
            chosen = [found[index] for index in selection.keep]
            return chosen, [g for i, g in enumerate(found) if i not in selection.keep]
        wanted, refills = selection.refill, refills + 1


def _with_greedy_rewards(
    groups: Sequence[Sequence[Rollout]], baselines: Sequence[float]
) -> list[list[Rollout]]:
    """Note in every rollout the reward of its prompt's greedy completion."""
    return [
        [replace(rollout, greedy_reward=baseline) for rollout in group]
        for group, baseline in zip(groups, baselines, strict=True)
    ]


def compared(
    groups: Sequence[Sequence[Rollout]], part: str | None, names: Sequence[str]
) -> list[list[float]]:
    """Return the numbers that dynamic sampling compares: the reward, or its part `algorithm.dynamic_sampling.part`.

    `names` are the parts of all rewards. Raises `UsageError` if this part is neither there nor in any completion.
    """
    if part is None:
        return [[rollout.reward for rollout in group] for group in groups]
    parts = [
        rollout.reward_parts for group in groups for rollout in group if not rollout.reward_error
    ]
    known = {name for each in parts for name in each}
    if parts and part not in known | {*names}:
        raise UsageError(
            "algorithm.dynamic_sampling.part is no part of any reward",
            have=f"algorithm.dynamic_sampling.part: {part}",
            want=f"one of {', '.join(sorted(known))}",
            do="set algorithm.dynamic_sampling.part to one of them, or remove it",
        )
    found = [[rollout.reward_parts.get(part) for rollout in group] for group in groups]
    return [[value for value in group if value is not None] for group in found]


def _shaped(rollout: Rollout, *, limit: int, overlong: OverlongConfig) -> Rollout:
    """Return the rollout with the penalty for its length in its reward."""
    penalty = overlong_penalty(len(rollout.completion.token_ids), limit, overlong)
    return replace(rollout, reward=rollout.reward + penalty) if penalty else rollout
