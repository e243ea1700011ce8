// The horizontal axis of charts: steps, time or tokens.

import {get} from "./data.js";
import {count, duration, num, short} from "./dom.js";

export const AXES = [["", "by step"], ["time", "by time"], ["tokens", "by tokens"]];
const POINTS_OF_AN_AXIS = 4000, SECONDS = "timing_s/step", TOKENS = "train/tokens", RATE = "perf/tokens_per_s", UPDATE = "timing_s/update";

// How a place on the axis is said.
export const AXIS_WORDS = {
  "": (x) => `step ${count(Math.round(x))}`, time: (x) => `after ${duration(x)}`, tokens: (x) => `after ${short(x)} tokens`,
};
export const AXIS_TICKS = {time: (x) => (x ? duration(x) : "0"), tokens: short};

// Return, for each run, a function from a step to its place on the axis; null for a run that did not write where its steps are.
export async function places(runs, axis) {
  if (!axis) return Object.fromEntries(runs.map((run) => [run, (step) => step]));
  const found = await get("metrics", {run: runs, names: [SECONDS, TOKENS, RATE, UPDATE].join(","), points: POINTS_OF_AN_AXIS});
  return Object.fromEntries(runs.map((run) => [run, along(axis === "time" ? found[run][SECONDS] : tokensOf(found[run]))]));
}

// Tokens of each step: counted, or from the rate of the update and its seconds.
function tokensOf({[TOKENS]: counted, [RATE]: rate, [UPDATE]: update}) {
  if (counted || !rate || !update) return counted;
  const seconds = new Map(update.steps.map((step, i) => [step, num(update.values[i])]));
  return {steps: rate.steps, values: rate.values.map((value, i) => num(value) * (seconds.get(rate.steps[i]) ?? 0))};
}

// The sum up to a step of what each step adds; between two known steps it grows evenly. A mean counts for the steps of its bucket.
function along(series) {
  if (!series?.steps.length) return null;
  const {steps, values} = series, ends = [];
  values.forEach((value, i) => ends.push((ends[i - 1] ?? 0) + (num(value) || 0) * (i ? steps[i] - steps[i - 1] : (steps[1] ?? steps[0] + 1) - steps[0])));
  const known = new Map(steps.map((step, i) => [step, ends[i]]));
  return (step) => {
    if (known.has(step)) return known.get(step);
    const after = steps.findIndex((each) => each >= step);
    if (after < 1) return after ? ends.at(-1) : 0;
    return ends[after - 1] + ((ends[after] - ends[after - 1]) * (step - steps[after - 1])) / (steps[after] - steps[after - 1]);
  };
}
