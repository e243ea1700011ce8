// The head of a run's page: state, reason, problems, what needs attention, and the main numbers.

import {frozen, get} from "./data.js";
import {cells, copyButton, count, date, duration, h, mean, num, problem, short, table, words} from "./dom.js";
import {changed, link} from "./place.js";
import {measureTitle, validationNames, withoutRepeats} from "./titles.js";

const TROUBLES = [
  ["Optimizer steps skipped for a gradient norm that was not finite", "actor/skipped", "critic/skipped", "train/skipped"],
  ["Rollouts on which a reward failed", "reward/errors"], ["Rollouts without a reward, left out of the update", "reward/dropped"],
];

// The head of the page of `run`, which the list describes as `about`, with its curves.
export async function runHead(run, about, found) {
  const [{environment}, {items = []}] = await Promise.all([get("environment", {run}), about.attention ? get("attention", {run}) : {}]);
  const {device, processes = 1, host, started} = environment ?? {}, facts = [about.model, device && `${processes} × ${device}`, host, started && date(started), about.state === "silent" && `last written ${date(about.ended)}`];
  const total = (name) => (found[name]?.values ?? []).map(num).reduce((sum, value, i) => {  // a mean counts for the steps of its bucket
    const {steps} = found[name], width = i ? steps[i] - steps[i - 1] : (steps[1] ?? steps[0] + 1) - steps[0];
    return sum + (value > 0 ? value * width : 0);
  }, 0);
  const told = items.map(({metric}) => metric), troubles = TROUBLES.filter(([, ...names]) => !names.some((name) => told.includes(name))).map(([title, ...names]) => [title, Math.round(names.map(total).reduce((a, b) => a + b))]).filter(([, n]) => n);
  const notices = [about.error, ...troubles.map(([title, n]) => `${title}: ${count(n)}`)].filter(Boolean);
  const tile = ([label, value, before, note]) => h("div.tile",
    h("div.label", label), h("div.value", before ? h("span.before", `${before} → `) : null, value), h("div.note", note));
  return [
    h("div.head", h("h1", about.name ?? run), about.state ? h(`span.state.${about.state}`, about.state) : null,
      h("span.facts", facts.filter(Boolean).map((fact) => h("span", words(fact))))),
    failure(about), ...notices.map((notice) => h("div.notice", words(notice))), attention(items),
    h("div.tiles", tiles(found, about).map(tile)), ...validations(found, about)].filter(Boolean);
}

// Why a run failed, and where to read more.
function failure({run, reason}) {
  if (!reason) return null;
  const where = reason.step === null || reason.step === undefined ? "before the first step" : `in step ${count(reason.step)}`;
  const notice = problem({...reason, message: reason.problem});
  notice.prepend(h("div.where", `The run failed ${where}.`, frozen ? null : h("a.link", {href: link("log", run)}, "Log")));
  return notice;
}

// What one could do better, each with the setting to paste.
function attention(items) {
  const setting = (text) => h("span.paste", h("code", words(text)), copyButton(() => text, `Copy ${text}`));
  const chart = (metric) => h("a.link", {href: changed({open: metric})}, "Chart");
  const row = ({text, also, metric, setting: paste}) => h("li", h("div", words(text)), h("div.help", paste ? setting(paste) : null, also ? h("span.soft", words(paste ? `also: ${also}` : also)) : null, metric ? chart(metric) : null));
  return items.length ? h("section.attention", {"aria-label": "What needs attention"}, h("h2", "What needs attention"), h("ul", items.map(row))) : null;
}

const validationsOf = (found) => validationNames(withoutRepeats(Object.keys(found), {run: found}));
const isEvaluation = ({kind, parent}) => kind === "eval" || Boolean(parent);

// The main numbers: [label, value, value before, note].
function tiles(found, about) {
  const finite = (name) => (found[name]?.values ?? []).map(num).filter(Number.isFinite), made = [];
  const {step, of} = about, [held] = validationsOf(found), name = ["reward/mean", "train/loss", "actor/loss"].find((each) => found[each]);
  if (held) {
    const {steps, values} = found[held], known = finite(held), best = /loss|perplexity/.test(held) ? Math.min(...known) : Math.max(...known);
    made.push([`Validation ${measureTitle(held.slice(4))}`, short(values.at(-1)), values.length > 1 ? short(values[0]) : "",
      known.length > 1 ? `last; best ${short(best)} at step ${count(steps[values.findIndex((value) => num(value) === best)])}` : "held-out data"]);
  }
  if (name) {
    const values = finite(name), few = Math.max(1, Math.floor(values.length / 20)), label = name === "reward/mean" ? "Training reward" : "Training loss";
    const [before, after] = [values.slice(0, few), values.slice(-few)].map((some) => short(some.length ? mean(some) : NaN));
    made.push([label, after, values.length > 1 ? before : "", few > 1 ? "mean of a 20th of the steps" : "one step"]);
  }
  const last = Math.max(step ?? 0, ...Object.values(found).map(({steps}) => steps.at(-1)));
  const seconds = finite("timing_s/step"), rates = finite("perf/tokens_per_s").sort((a, b) => a - b);
  made.push(isEvaluation(about) ? ["Step", count(last), "", "that was measured"] : ["Steps", count(last), "", of ? `of ${count(of)}` : ""]);
  if (seconds.length) made.push(["Time in steps", duration(mean(seconds) * last), "", `${short(mean(seconds))} s per step`]);
  if (rates.length) made.push(["Tokens per second", short(rates[rates.length >> 1]), "", "median step"]);
  return made;
}

// The first and last values of a validation's metrics.
function validations(found, about) {
  const names = validationsOf(found), once = isEvaluation(about), heads = once ? [["metric"], ["", "right"]] : [["metric"], ["first", "right"], ["last", "right"], ["change", "right"]];
  const rows = names.map((name) => {
    const {steps, values} = found[name], change = num(values.at(-1)) - num(values[0]);
    const cell = (i) => [short(values.at(i)), h("span.unit", `step ${count(steps.at(i))}`)];
    return h("tr", cells(heads, [measureTitle(name.slice(4)), ...(once ? [short(values.at(-1))] : [cell(0), cell(-1), `${change > 0 ? "+" : ""}${short(change)}`])]));
  });
  return names.length > 1 ? [h("details", {open: once}, h("summary", "Validation"), table("narrow", heads, rows))] : [];
}
