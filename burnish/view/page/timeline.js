// Where the time of a step goes, on every rank.

import {get} from "./data.js";
import {button, cells, count, duration, h, mean, short, table, words} from "./dom.js";
import {here, link, replace} from "./place.js";

const LANE = 22;

export const own = (name) => name.split("/").at(-1);

// Spans as bars, a lane for each rank and a row for each depth in it. `tell(span)` gets the span under the pointer.
export function lanes(ranks, tell = null) {
  const all = ranks.flatMap(({spans}) => spans), first = Math.min(...all.map(({start}) => start));
  const width = Math.max(...all.map(({start, seconds}) => start + seconds)) - first || 1, share = (seconds) => `${(100 * seconds) / width}%`;
  const kind = ({name}) => name.split(/[/ ]/)[0], kinds = [...new Set(all.map(kind))];
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
  const title = h("h1"), shown = h("div"), slider = h("input", {type: "range", min: 0, "aria-label": "Step", oninput: () => visit(slider.value)});
  let steps = [];
  const visit = (i) => steps[i] !== undefined && replace(link("timeline", here().run, steps[i])), move = (by) => visit(Number(slider.value) + by);
  const [before, after] = [["‹", -1, "Step before"], ["›", 1, "Next step"]].map(([text, by, label]) => button("button", text, () => move(by), {"aria-label": label}));
  body.append(h("div.head", title, before, after, slider), shown);

  async function update({run, argument}) {
    if (argument === null) ({steps} = await get("timeline", {run}));
    const step = argument ?? steps.at(-1), answer = await get("timeline", {run, step});
    steps = answer.steps;
    slider.max = steps.length - 1;
    slider.value = steps.findIndex((each) => each >= step);
    title.textContent = step === undefined ? "Timeline" : `Step ${count(Number(step))}`;
    if (answer.ranks.length) shown.replaceChildren(lanes(answer.ranks), spread(answer.ranks));
    else shown.replaceChildren(h("p.none", "No times have been written yet."));
  }
  return {update, keys: {ArrowLeft: () => move(-1), ArrowRight: () => move(1)}};
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
