"""Find what needs attention in a run's numbers, and the setting that helps. Loads no torch.

The rules are careful: each looks at means over several steps, and none speaks of what a good run shows as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from burnish.tracking.curves import Curve

_FEW = 10
"""Steps of a mean, and least steps of most rules."""
_FEWEST = 3
"""Steps after which a reward that has never differed is named."""
_MANY = 50
_SOLVED = 0.9
"""A mean reward from which on little entropy and groups of equal rewards are what one wants."""

Numbers = Mapping[str, Curve]
Settings = Mapping[str, Any]


class Attention(NamedTuple):
    """Something in a run that needs attention."""

    key: str
    """The name of its rule."""
    text: str
    setting: str | None
    """What to set, as the command line takes it."""
    also: str | None
    """What to look at."""
    metric: str
    """The number that shows it."""
    step: int
    """The last step that was looked at."""


def find_attention(numbers: Numbers, settings: Settings) -> list[Attention]:
    """Return what needs attention, the most severe first. `settings` are a run's, by dotted names; `steps` is the total."""
    return [found for rule in _RULES for found in rule(numbers, settings)]


def is_due(step: int) -> bool:
    """Return whether to look after a step: ever more rarely, since each look goes through all steps."""
    return step % max(1, step // 50) == 0


def sentence(found: Attention) -> str:
    """Return it as one sentence, with what to set and where to look."""
    advice = "; ".join(filter(None, [found.setting and f"try {found.setting}", found.also]))
    return f"{found.text}: {advice}" if advice else found.text


def _values(numbers: Numbers, name: str) -> list[float]:
    """Return the finite values of a metric's steps, without the measurement before training."""
    curve = numbers.get(name)
    if curve is None:
        return []
    known = curve.values[:]  # another thread may read more meanwhile
    pairs = zip(curve.steps, known, strict=False)
    return [value for step, value in pairs if step > 0 and math.isfinite(value)]


def _last_step(numbers: Numbers, name: str) -> int:
    return numbers[name].steps[-1]


def _means(values: list[float], count: int) -> list[float]:
    """Return the means of `count` values after each other."""
    return [fmean(values[i : i + count]) for i in range(len(values) - count + 1)]


def _noise(values: list[float]) -> float:
    """Return how far one step is from the next."""
    return median(abs(after - before) for before, after in pairwise(values))


def _patience(settings: Settings) -> int:
    """Return after how many steps a model should have learned what ends by itself."""
    return max(_FEW, (settings.get("steps") or 0) // 4)


def _is_solved(numbers: Numbers) -> bool:
    rewards = _values(numbers, "reward/mean")[-_FEW:]
    return bool(rewards) and fmean(rewards) >= _SOLVED


def _rises(numbers: Numbers) -> bool:
    """Return whether the reward is well above that of the first steps: what may be wrong does not keep it from learning."""
    rewards = _values(numbers, "reward/mean")
    return len(rewards) >= _FEW and fmean(rewards[-5:]) > 1.2 * fmean(rewards[:5]) > 0


def _found(
    numbers: Numbers,
    key: str,
    metric: str,
    text: str,
    setting: str | None = None,
    also: str | None = None,
) -> Attention:
    return Attention(key, text, setting, also, metric, _last_step(numbers, metric))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: float, name: str) -> str:
    return f"{number:.0f} {name}{'' if round(number) == 1 else 's'}"


def _rate(settings: Settings, factor: float) -> str | None:
    lr = settings.get("optim.lr")
    return f"optim.lr={lr * factor:.2g}" if isinstance(lr, int | float) and lr else None


def _lost_steps(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    for metric in ("actor/skipped", "train/skipped"):
        if skipped := sum(_values(numbers, metric)):
            text = f"{_count(skipped, 'optimizer step')} skipped: a gradient was not finite"
            yield _found(numbers, "skipped", metric, text, _rate(settings, 0.5), "engine.precision")
    for metric, key in (("train/loss", "nan_loss"), ("actor/loss", "nan_loss")):
        curve = numbers.get(metric)
        if curve is not None and len(curve.values) and not math.isfinite(curve.values[-1]):
            text = f"the loss of step {curve.steps[-1]} is not finite"
            yield _found(numbers, key, metric, text, _rate(settings, 0.5))


def _lost_rewards(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    errors = _values(numbers, "reward/errors")[-_FEW:]
    if lost := sum(errors):
        also = "reward_error of these rollouts says why"
        text = f"a reward failed on {_count(lost, 'completion')} in the last {_count(len(errors), 'step')}"
        yield _found(numbers, "reward_errors", "reward/errors", text, None, also)


def _cut_off(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    metric = "response_length/clip_ratio"
    values = _values(numbers, metric)
    if len(values) < _patience(settings) or _is_solved(numbers):
        return
    share = fmean(values[-_FEW:])
    # A model that learns to stop is no reason to raise the limit.
    highest = max(_means(values, 5))
    is_falling = highest - fmean(values[-5:]) > max(0.03 * highest, 2 * _noise(values))
    limit = settings.get("rollout.max_response_length")
    if share >= 0.3 and not (is_falling or _rises(numbers)):
        setting = f"rollout.max_response_length={2 * limit}" if isinstance(limit, int) else None
        text = f"{_percent(share)} of completions are cut off at {limit} tokens"
        yield _found(numbers, "cut_off", metric, text, setting)


def _no_variance(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    metric = "reward/zero_std_frac"
    values = _values(numbers, metric)
    enabled = settings.get("algorithm.dynamic_sampling.enabled")
    means = {*_values(numbers, "reward/mean")}
    if settings.get("distill.teachers"):  # which teach where rewards are equal too
        return
    if len(values) >= _FEWEST and min(values) == 1.0 and len(means) == 1:
        text = f"every completion so far has the reward {means.pop():.3g}, so nothing is learned"
        yield _found(numbers, "constant_reward", metric, text, None, "look at the reward function")
        return
    if len(values) < _patience(settings) or enabled or _is_solved(numbers):
        return
    share = fmean(values[-_FEW:])
    # Where the reward rises, groups become equal because they are solved.
    if share >= (0.7 if _rises(numbers) else 0.5):
        also = "rewards that differ within a group, easier or harder prompts"
        text = f"{_percent(share)} of groups teach nothing: their completions have equal rewards"
        setting = "algorithm.dynamic_sampling.enabled=true"
        yield _found(numbers, "no_variance", metric, text, setting, also)


def _reward_moves(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    metric = "reward/mean"
    values = _values(numbers, metric)
    if len(values) < 3 * _FEW:
        return
    means = _means(values, _FEW)
    noise = _noise(values)
    start = means[0]
    best = max(means)
    last = means[-1]
    if best > start and best - last > max(0.5 * (best - start), 6 * noise):
        text = f"the reward fell from {best:.3g} to {last:.3g}"
        yield _found(numbers, "reward_falls", metric, text, _rate(settings, 0.5))
    before = values[-2 * _FEW : -5]
    after = values[-5:]
    spread = max(values) - min(values)
    jump = min(after) - max(before)
    if jump > 0.3 * spread and jump > 10 * noise > 0:
        text = f"the reward jumped from {max(before):.3g} to {min(after):.3g}"
        also = "read the completions of these steps: has the model found a trick?"
        yield _found(numbers, "reward_jumps", metric, text, None, also)


def _entropy(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    metric = "actor/entropy"
    values = _values(numbers, metric)
    if len(values) < 2 * _FEW or _is_solved(numbers):
        return
    first = fmean(values[:5])
    last = fmean(values[-_FEW:])
    if last < 0.05 and last < 0.2 * first:
        text = f"the entropy fell from {first:.2g} to {last:.2g}: completions hardly differ"
        coef = settings.get("algorithm.entropy_coef") or 0.001
        setting = f"algorithm.entropy_coef={2 * coef:g}"
        yield _found(numbers, "entropy", metric, text, setting, "algorithm.clip_high=0.28")


def _distances(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    mismatch = _values(numbers, "rollout/mismatch_kl")[-_FEW:]
    if len(mismatch) == _FEW and median(mismatch) > 0.05:
        setting = None if settings.get("algorithm.mismatch_cap") else "algorithm.mismatch_cap=2"
        text = f"the generator's policy is not the engine's: their divergence is {median(mismatch):.2g}"
        yield _found(numbers, "mismatch", "rollout/mismatch_kl", text, setting)
    moved = _values(numbers, "actor/ppo_kl")[-_FEW:]
    if len(moved) == _FEW and abs(median(moved)) > 0.1:
        text = f"a step changes the policy by a divergence of {median(moved):.2g}"
        yield _found(numbers, "ppo_kl", "actor/ppo_kl", text, _rate(settings, 0.5))


def _gradients(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    for metric in ("actor/grad_norm", "train/grad_norm"):
        norms = [value for value in _values(numbers, metric)[-_MANY:] if value > 0]
        if len(norms) < 2 * _FEW:
            continue
        usual = median(norms)
        limit = max(20 * usual, settings.get("optim.max_grad_norm") or 1.0)
        if (count := sum(norm > limit for norm in norms)) >= 3:
            text = (
                f"the gradient norm was above 20 times its median in {count} of {len(norms)} steps"
            )
            yield _found(numbers, "gradients", metric, text, _rate(settings, 0.5))


def _validation(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    curve = numbers.get("val/loss")
    trained = numbers.get("train/loss")
    if curve is None or trained is None or len(curve.values) < 4:
        return
    known = [*zip(curve.values[:], curve.steps, strict=False)]
    low, best = min(known)
    last, step = known[-1]
    rising = all(after > before for (before, _), (after, _) in pairwise(known[-3:]))
    then, now = (
        [value for at, value in zip(trained.steps, trained.values, strict=False) if at <= until]
        for until in (best, step)
    )
    falls = bool(then) and fmean(now[-_FEW:]) < fmean(then[-_FEW:])
    if rising and falls and last > 1.03 * low:
        text = f"the model learns its rows by heart: val/loss rose from {low:.4g} (step {best}) to {last:.4g}"
        also = "checkpoint.keep_best keeps the best step"
        yield _found(numbers, "overfit", "val/loss", text, f"steps={best}" if best else None, also)


def _stuck(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    warmup = settings.get("optim.warmup_steps")
    steps = settings.get("steps")
    values = _values(numbers, "train/loss")
    waited = warmup if isinstance(warmup, int) else 0
    if isinstance(warmup, str) and isinstance(steps, int):
        waited = steps // 5
    values = values[waited:]
    if len(values) < 16 or (isinstance(steps, int) and len(values) < 0.1 * steps):
        return
    third = len(values) // 3
    first = fmean(values[:third])
    last = fmean(values[-third:])
    if first > 0.1 and abs(first - last) < 0.003 * first:
        lr = settings.get("optim.lr")
        text = f"the loss has not moved in {len(values)} steps ({first:.4g} → {last:.4g}) at optim.lr={lr}"
        yield _found(numbers, "stuck", "train/loss", text, _rate(settings, 10))


def _speed(numbers: Numbers, settings: Settings) -> Iterator[Attention]:
    metric = "perf/tokens_per_s"
    rates = _values(numbers, metric)
    if len(rates) < _MANY:
        return
    before = median(rates[_FEW : 3 * _FEW])
    now = median(rates[-_FEW:])
    if now < 0.4 * before:
        text = f"the update slowed from {before:,.0f} to {now:,.0f} tokens a second"
        also = "the timeline, and what else uses the machine"
        yield _found(numbers, "slow", metric, text, None, also)


_RULES: tuple[Callable[[Numbers, Settings], Iterator[Attention]], ...] = (
    _lost_steps,
    _lost_rewards,
    _reward_moves,
    _cut_off,
    _no_variance,
    _validation,
    _stuck,
    _entropy,
    _distances,
    _gradients,
    _speed,
)
