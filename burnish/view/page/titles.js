// What charts are called, which metrics share one, and which would only repeat another.

import {num} from "./dom.js";

// Titles of charts, each with the metrics that share the chart if one run is shown.
const LEARNING = [
  ["Loss", "actor/loss", "train/loss"], ["Policy loss", "actor/pg_loss"], ["Entropy, nats", "actor/entropy"],
  ["Gradient norm", "actor/grad_norm", "train/grad_norm"], ["Response length, tokens", "response_length/mean", "response_length/max"],
  ["Truncated responses, share", "response_length/clip_ratio"], ["Groups without variance, share", "reward/zero_std_frac"],
  ["KL to the reference", "actor/kl_loss"], ["KL of the update", "actor/ppo_kl"],
  ["Clipped tokens, share", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"], ["Generator against engine, KL", "rollout/mismatch_kl"],
  ["Value loss of the critic", "critic/vf_loss"], ["Variance that the critic explains, share", "critic/explained_var"],
  ["Learning rate", "actor/lr", "train/lr", "critic/lr"],
];
const SPEED = [
  ["Tokens per second", "perf/tokens_per_s"], ["Model FLOPs utilisation, share", "perf/mfu"], ["Imbalance of ranks", "perf/imbalance"],
];
// Titles of metrics that have a chart of their own, where the words of the name do not say enough.
const TITLES = {
  "reward/mean": "Reward", "reward/std": "Reward, standard deviation", "train/loss": "Loss", "actor/loss": "Loss of the policy", "actor/pg_loss": "Policy gradient loss",
  "train/grad_norm": "Gradient norm", "actor/grad_norm": "Gradient norm of the policy", "critic/grad_norm": "Gradient norm of the critic",
  "train/lr": "Learning rate", "actor/lr": "Learning rate of the policy", "critic/lr": "Learning rate of the critic",
  "actor/kl_coef": "Weight of the KL to the reference", "actor/moe/load_imbalance": "Load of the busiest expert over the mean", "actor/moe/aux_loss": "Load-balancing loss",
  "train/moe/load_imbalance": "Load of the busiest expert over the mean", "train/moe/aux_loss": "Load-balancing loss",
  "actor/skipped": "Skipped optimizer steps", "train/skipped": "Skipped optimizer steps", "critic/skipped": "Skipped optimizer steps of the critic",
  "critic/loss": "Loss of the critic", "critic/vf_clipfrac": "Clipped values, share", "critic/values/mean": "Values, mean", "critic/returns/mean": "Returns, mean",
  "environment/turns": "Turns of a conversation", "environment/calls": "Tool calls of a conversation", "environment/failed_calls": "Failed tool calls of a conversation", "environment/calling_turns": "Turns with a tool call, share",
  "environment/failed": "Failed conversations", "environment/ended_done": "Conversations that the environment ended, share", "environment/ended_length": "Conversations at the limit of tokens, share", "environment/ended_turns": "Conversations at the limit of turns, share",
  "environment/ended_calls": "Conversations at the limit of calls, share", "environment/ended_unreadable": "Conversations with unreadable calls, share", "environment/ended_failed": "Conversations whose environment failed, share",
  "reward/errors": "Failed rewards", "reward/dropped": "Completions without a reward",
  "response_length/mean": "Response length, mean tokens", "response_length/max": "Response length, most tokens",
  "actor/pg_clipfrac": "Clipped tokens, share", "actor/pg_clipfrac_lower": "Tokens clipped below, share", "rollout/mismatch_max": "Generator against engine, largest difference",
  "rollout/mismatch_ess": "Generator against engine, effective samples, share", "rollout/mismatch_capped": "Generator against engine, capped tokens, share",
  "rollout/mismatch_rejected": "Generator against engine, tokens left out, share", "rollout/staleness/mean": "Age of completions, steps", "rollout/staleness/max": "Age of the oldest completion, steps",
  "train/tokens": "Trained tokens", "timing_s/step": "Step, seconds", "perf/wait_seconds": "Waiting for completions, seconds", "perf/max_memory_gb": "Peak memory, GB", "perf/max_memory_gb/all": "Peak memory, GB",
};
const FIRST = ["accuracy", "mean@", "exact_match", "reward", "pass@"], MOST_LINES = 6;
const ALONE = /(^|\/)(loss|response_length|reward|reward_parts|environment|dropped|errors|tokens|perplexity)(\/|$)/;
// The end of a validation's metric, after the source if there is one, and words for some.
const MEASURED = /^(?:(.+?)\/)??((?:response_length|reward_parts|environment)\/[^/]+|[^/]+)$/;
const MEASURES = {"response_length/mean": "response length, tokens", "response_length/clip_ratio": "truncated responses, share", dropped: "completions without a reward"};

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const plain = (name) => name.replace(/_/g, " ").replace(/\//g, " › ");

// A metric's title in plain words.
export function metricTitle(name) {
  const listed = [...LEARNING, ...SPEED].find((each) => each.length === 2 && each[1] === name);
  if (Object.hasOwn(TITLES, name)) return TITLES[name];
  if (listed) return listed[0];
  const [family, ...rest] = name.split("/"), words = plain(rest.join("/"));
  if (!words) return capital(plain(name));
  if (family === "val") {
    const [, source, measure] = MEASURED.exec(rest.join("/")) ?? [null, "", words];
    return `Validation${source ? ` of ${source}` : ""}${source || Object.hasOwn(MEASURES, measure) ? ":" : ""} ${measureTitle(measure)}`;
  }
  if (family === "timing_s") return `${capital(words.replace(/\./g, " › "))}, seconds`;
  if (name.startsWith("perf/max_memory_gb/")) return `Peak memory in ${plain(rest.slice(1).join("/"))}, GB`;
  if (/^perf\/slowest_(rank|share)\//.test(name)) return `Slowest rank to ${plain(rest.slice(1).join("/"))}${rest[0] === "slowest_share" ? ", time over the median" : ""}`;
  if (name.startsWith("reward/parts/")) return `Reward of ${plain(rest.slice(1).join("/"))}`;
  if (family === "environment") return `${capital(words)} of a conversation`;
  return family === "perf" ? capital(words) : capital(`${plain(family)} › ${words}`);
}

// What a validation measured, in plain words.
export const measureTitle = (measure) => MEASURES[measure] ?? plain(measure).replace(/^reward parts › /, "reward of ").replace(/^environment › /, "");

// A metric's name within a chart of several.
export const lineName = (name) => (name === "perf/max_memory_gb" ? "all" : name.replace(/^(perf\/max_memory_gb|[^/]+)\/(ended_)?/, ""));

// Whether two curves are the same number, up to rounding.
function repeats(a, b) {
  if (a.steps.length !== b.steps.length || a.steps.some((step, i) => step !== b.steps[i])) return false;
  const [ours, theirs] = [a, b].map(({values}) => values.map(num)), size = Math.max(...ours.map(Math.abs).filter(Number.isFinite), 1e-12);
  return ours.every((value, i) => Object.is(value, theirs[i]) || Math.abs(value - theirs[i]) <= 1e-5 * size);
}

// Names without those that repeat another one in every run: one reward function, no KL, one scored answer, one source.
export function withoutRepeats(names, found) {
  const pairs = [
    ...names.filter((name) => name.startsWith("reward/parts/")).map((name) => [name, "reward/mean"]), ["actor/pg_loss", "actor/loss"],
    ...names.filter((name) => name.startsWith("val/") && /mean@\d+$/.test(name)).map((name) => [name.replace(/mean@\d+$/, "reward"), name]),
    ...names.filter((name) => name.startsWith("val/") && MEASURED.exec(name.slice(4))?.[1]).map((name) => [name, `val/${MEASURED.exec(name.slice(4))[2]}`]),
  ];
  const same = ([name, other]) => Object.values(found).every((series) => !series[name] || (series[other] && repeats(series[name], series[other])));
  const gone = new Set(pairs.filter(([name, other]) => names.includes(name) && names.includes(other)).filter(same).map(([name]) => name));
  return names.filter((name) => !gone.has(name));
}

export const validationNames = (names) => names.filter((name) => name.startsWith("val/")).sort(byRank);

function byRank(a, b) {
  const rank = (name) => 10 * name.split("/").length + (FIRST.findIndex((word) => name.includes(word)) + 9) % 9;
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}

// Sections of charts: [heading, [[title, name…]…]]. If each metric has `several` lines, metrics do not share a chart.
export function arranged(names, several) {
  const left = new Set(names), alone = (name) => [metricTitle(name), name];
  const take = (specs) => specs.flatMap(([title, ...wanted]) => {
    const there = wanted.filter((name) => left.delete(name));
    return several || there.length < 2 ? there.map((name) => (wanted.length > 1 && !several ? [title, name] : alone(name))) : [[title, ...there]];
  });
  const held = validationNames(names), shares = held.filter((name) => !ALONE.test(name.slice(3)));
  const firsts = shares.filter((_, i) => i % MOST_LINES === 0);
  const validation = firsts.map((first, i) => [i ? `Validation, from ${first.slice(4)}` : "Validation", ...shares.slice(i * MOST_LINES, (i + 1) * MOST_LINES)]);
  const starting = (start) => names.filter((name) => name.startsWith(start)), spans = starting("timing_s/").filter((name) => name.split("/").length === 2 && name !== "timing_s/step");
  const learning = take([["Reward", "reward/mean"], ...validation, ["Parts of the reward", ...starting("reward/parts/")], ...held.map((name) => [metricTitle(name), name]), ...LEARNING]);
  const talks = take([["How conversations end, share", ...starting("environment/ended_")], ...starting("environment/").map((name) => [metricTitle(name), name])]);
  const speed = take([...SPEED, ["Step, seconds", "timing_s/step", ...spans], ["Peak memory, GB", ...starting("perf/max_memory_gb").sort((a, b) => a.length - b.length)]]);
  return [["Learning", learning], ["Conversations", talks], ["Speed", speed], ["More", [...left].map(alone)]];
}
