// The list of runs.

import {get} from "./data.js";
import {ago, cells, count, fixed, h, num, searchBox, table} from "./dom.js";
import {changed, here, link, replace} from "./place.js";

const HEADLINES = ["reward/mean", "train/loss"], MOST_SPARKS = 40, SVG = "http://www.w3.org/2000/svg";
const HEADS = [
  ["", "check"], ["run", "name"], ["state"], ["steps", "mid"], ["reward or loss", "right"], ["", "wide spark"],
  ["validation", "right mid"], ["model", "wide soft"], ["updated", "right mid soft"],
];

export function runsView(body) {
  const search = searchBox("q", "Filter runs"), compare = h("a.button.primary", {hidden: true}), total = h("span.soft");
  const list = table("runs", HEADS, []), rows = list.querySelector("tbody");
  body.append(h("div.head", h("h1", "Runs"), total), h("div.toolbar", search, compare), list);

  function choose(run) {
    const picked = here().query.getAll("pick");
    replace(changed({pick: picked.includes(run) ? picked.filter((each) => each !== run) : [...picked, run]}));
  }

  function row({run, name, state, step, of, model, reward, loss, validation, validation_name, updated, error}, picked) {
    const [, folder = "", own] = /^(.*\/)?([^/]*)$/s.exec(run || name), isPicked = picked.includes(run);
    const box = h("input", {type: "checkbox", "aria-label": `Choose ${run}`, tabindex: -1, checked: isPicked, onchange: () => choose(run)});
    const done = h("i", {style: {width: `${of ? Math.min(100, (100 * step) / of) : 100}%`}});
    const label = h("a", {href: link("charts", run), "data-row": true}, h("span.soft", folder), own);
    const unit = (value, name_) => (value === null ? "–" : [fixed(value), h("span.unit", name_)]);
    return h("tr", {"data-run": run, class: isPicked && "picked"}, cells(HEADS, [
      box, [label, error ? h("div.failure", {title: error}, error) : null], h(`span.state.${state}`, state),
      [h("span.progress", done), count(step), of ? h("span.faint", ` / ${count(of)}`) : null],
      reward === null ? unit(loss, "loss") : unit(reward, "reward"), "", unit(validation, validation_name?.replace("val/", "")),
      model ?? "–", ago(updated)]));
  }

  async function update({query}) {
    const {root, runs} = await get("runs"), q = (query.get("q") ?? "").toLowerCase(), picked = query.getAll("pick");
    const shown = runs.filter(({run, name, state, model}) => `${run} ${name} ${state} ${model}`.toLowerCase().includes(q));
    const focused = document.activeElement?.closest("tr")?.dataset.run;
    search.follow(query);
    rows.replaceChildren(...shown.map((run) => row(run, picked)));
    const nothing = runs.length ? "No run matches." : "No run has begun here yet.";
    if (!shown.length) rows.append(h("tr", h("td.none", {colspan: HEADS.length}, nothing)));
    [...rows.children].find((each) => focused !== undefined && each.dataset.run === focused)?.querySelector("a").focus();
    total.textContent = `${shown.length === runs.length ? "" : `${shown.length} of `}${runs.length} in ${root}`;
    compare.hidden = picked.length < 2;
    compare.textContent = `Compare ${picked.length} runs`;
    compare.href = link("charts", picked[0] ?? "", null, {with: picked.slice(1)});
    await sparks(shown.slice(0, MOST_SPARKS).map(({run}) => run));
  }

  async function sparks(runs) {
    const found = runs.length ? await get("metrics", {run: runs, names: HEADLINES.join(","), points: 60}) : {};
    for (const tr of rows.children) {
      const series = found[tr.dataset.run] ?? {}, name = HEADLINES.find((each) => series[each]);
      if (name) tr.querySelector(".spark").replaceChildren(spark(series[name]));
    }
  }

  return {update, keys: {x: () => {
    const run = document.activeElement?.closest("tr")?.dataset.run;
    if (run !== undefined) choose(run);
  }}};
}

function spark({steps, values}) {
  const points = steps.map((step, i) => [step, num(values[i])]).filter(([, value]) => Number.isFinite(value)), ys = points.map(([, value]) => value);
  const [low, high, first, last] = [Math.min(...ys), Math.max(...ys), steps[0], steps.at(-1)];
  const svg = document.createElementNS(SVG, "svg"), line = svg.appendChild(document.createElementNS(SVG, "polyline"));
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("aria-hidden", "true");
  const place = ([x, y]) => `${1 + (98 * (x - first)) / (last - first || 1)},${23 - (22 * (y - low)) / (high - low || 1)}`;
  line.setAttribute("points", points.map(place).join(" "));
  return svg;
}
