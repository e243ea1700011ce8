// Where the time of a step goes, on every rank.

import {get} from "./data.js";
import {button, cells, count, duration, h, mean, short, table, words} from "./dom.js";
import {besideOf, here, link, replace} from "./place.js";

const LANE = 22, LEAST_PART = 0.004;

export const own = (name) => name.split("/").at(-1).replace(/^execute_tool /, "");
const kind = ({name}) => name.split(/[/ ]/)[0];
const kindsOf = (spans) => [...new Set(spans.map(kind))];

// Spans as bars, a lane for each rank and a row for each depth in it. `tell(span)` gets the span under the pointer. `kinds` have their colours in order.
export function lanes(ranks, tell = null, kinds = kindsOf(ranks.flatMap(({spans}) => spans))) {
  const all = ranks.flatMap(({spans}) => spans), first = Math.min(...all.map(({start}) => start));
  const width = Math.max(...all.map(({start, seconds}) => start + seconds)) - first || 1, share = (seconds) => `${(100 * seconds) / width}%`;
  const bar = (span) => {
    const told = tell && (() => tell(span)), {start, seconds, name, depth = 0, error} = span;
    const style = {left: start - first < 0.98 * width ? share(start - first) : `min(${share(start - first)}, 100% - 11px)`, width: share(seconds), top: `${LANE * depth}px`, "--c": `var(--c${kinds.indexOf(kind(span)) % 8})`};
    const on = told ? {onclick: told, onpointerenter: told, onfocus: told} : {tabindex: -1};
    return h(`button.span${error ? ".bad" : ""}`, {type: "button", title: `${name}: ${duration(seconds)}`, style, ...on}, words(own(name)));
  };
  const height = (spans) => `${LANE * (1 + Math.max(0, ...spans.map(({depth = 0}) => depth)))}px`;
  return h("div.lanes",
    ranks.map(({rank, spans}) => h("div.lane", rank === undefined ? null : h("span.rank", `rank ${rank}`), h("div.track", {style: {height: height(spans)}}, spans.map(bar)))),
    h("div.ruler", [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", part ? duration(part * width) : "0"))));
}

export function timelineView(body) {
  const title = h("h1"), shown = h("div"), stack = h("div"), slider = h("input", {type: "range", min: 0, "aria-label": "Step", oninput: () => visit(slider.value)});
  let steps = [];
  const at = (step) => link("timeline", here().run, step, besideOf(here().query)), visit = (i) => steps[i] !== undefined && replace(at(steps[i])), move = (by) => visit(Number(slider.value) + by);
  const [before, after] = [["‹", -1, "Step before"], ["›", 1, "Next step"]].map(([text, by, label]) => button("button", text, () => move(by), {"aria-label": label}));
  body.append(h("div.head", title, before, after, slider), shown, stack);

  async function update({run, argument}) {
    if (argument === null) ({steps} = await get("timeline", {run}));
    const step = argument ?? steps.at(-1), answer = await get("timeline", {run, step});
    steps = answer.steps;
    slider.max = steps.length - 1;
    slider.value = steps.findIndex((each) => each >= step);
    title.textContent = step === undefined ? "Timeline" : `Step ${count(Number(step))}`;
    const {steps: recent, phases} = answer.recent, kinds = kindsOf([...phases, ...answer.ranks.flatMap(({spans}) => spans)]);
    stack.replaceChildren(...(recent.length > 1 ? stacked(recent, phases, kinds, Number(step), at) : []));
    if (answer.ranks.length) shown.replaceChildren(lanes(answer.ranks, null, kinds), spread(answer.ranks));
    else shown.replaceChildren(h("p.none", "No times have been written yet."));
  }
  return {update, keys: {ArrowLeft: () => move(-1), ArrowRight: () => move(1)}};
}

// The seconds of several steps as bars beside each other, each of its phases. A bar is a link to its step.
function stacked(steps, phases, kinds, current, at) {
  const totals = steps.map((_, i) => phases.map(({seconds}) => seconds[i]).reduce((a, b) => a + b, 0)), most = Math.max(...totals) || 1;
  const colour = (phase) => ({"--c": `var(--c${kinds.indexOf(kind(phase)) % 8})`}), timed = phases.filter(({seconds}) => seconds.some((each) => each > LEAST_PART * most));
  const bar = (step, i) => {
    const parts = phases.filter(({seconds}) => seconds[i] > 0).sort((a, b) => b.seconds[i] - a.seconds[i]).map(({name, seconds}) => `${name} ${duration(seconds[i])}`);
    const said = `Step ${count(step)}: ${duration(totals[i])}`, part = (phase) => h("i", {style: {...colour(phase), height: `${(100 * phase.seconds[i]) / most}%`}});
    return h("a.bar", {href: at(step), title: [said, ...parts].join("\n"), "aria-label": said, "aria-current": step === current && "step"}, h("span.phases", timed.map(part)), h("span.step", String(step)));
  };
  return [
    h("h2", `Last ${count(steps.length)} steps`), h("div.legend", timed.map((phase) => h("span.key", {style: colour(phase)}, phase.name))),
    h("div.stack", h("div.scale-of", h("span", duration(most)), h("span", duration(most / 2)), h("span", "0")), h("div.bars", steps.map(bar)))];
}

// Seconds of each part, and how they differ between ranks.
function spread(ranks) {
  const parts = new Map(), several = [["least", "right mid"], ["most", "right"], ["most over mean", "right"]].filter(() => ranks.length > 1);
  const heads = [["part"], [ranks.length > 1 ? "mean" : "time", "right"], ["share", "right"], ...several];
  ranks.forEach(({spans}, i) => spans.forEach(({name, seconds, depth = 0}) => {
    const part = parts.get(name) ?? {depth, by: ranks.map(() => 0)};
    part.by[i] += seconds;
    parts.set(name, part);
  }));
  const names = [...parts.keys()], within = (name) => names.filter((each) => each.startsWith(`${name}/`) && !each.slice(name.length + 1).includes("/"));
  const rows = (some) => some.flatMap((name) => {
    const {depth, by} = parts.get(name), label = h("span", {style: {"padding-left": `${16 * depth}px`}}, words(own(name)));
    const values = [duration(mean(by)), `${Math.round((100 * mean(by)) / whole)} %`, duration(Math.min(...by)), duration(Math.max(...by)), short(Math.max(...by) / (mean(by) || 1))];
    return [h("tr", cells(heads, [label, ...values.slice(0, heads.length - 1)])), ...rows(within(name))];
  });
  const outer = names.filter((name) => !parts.has(name.slice(0, Math.max(0, name.lastIndexOf("/"))))), whole = outer.map((name) => mean(parts.get(name).by)).reduce((a, b) => a + b, 0) || 1;
  return table("narrow", heads, rows(outer));
}
