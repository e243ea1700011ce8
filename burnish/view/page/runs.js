// The list of runs: evaluations stand below their run, favourites first, each head sorts.

import {get} from "./data.js";
import {ago, button, cells, count, fixed, h, num, searchBox, table} from "./dom.js";
import {changed, here, link, replace} from "./place.js";

const HEADLINES = ["reward/mean", "train/loss"], MOST_SPARKS = 40, SVG = "http://www.w3.org/2000/svg";
const HEADS = [
  ["", "check"], ["run", "name"], ["state", "state-of"], ["steps", "mid"], ["reward or loss, last", "right"], ["", "wide spark"],
  ["validation, last", "right"], ["best", "right mid"], ["model", "wide soft"], ["updated", "right mid soft"],
];
// What a head sorts by.
const SORTED = {
  run: ({run}) => run, state: ({state}) => state, steps: ({step}) => step, "reward or loss, last": ({reward, loss}) => num(reward ?? loss),
  "validation, last": ({validation, score}) => num(score?.value ?? validation), best: ({best}) => num(best?.value), model: ({model}) => model, updated: ({updated}) => updated,
};

// The favourites, which the browser keeps; without storage they last as long as the page.
let favourites = new Set();
function readPins() {
  try {
    favourites = new Set(JSON.parse(localStorage.getItem("pins") ?? "[]"));
  } catch { /* no storage, or not ours */ }
}

function pin(run) {
  if (!favourites.delete(run)) favourites.add(run);
  try {
    localStorage.setItem("pins", JSON.stringify([...favourites]));
  } catch { /* no storage */ }
}

// Runs in the order to show: favourites first, then by `sort`; an evaluation follows its run.
function inOrder(runs, sort) {
  const [way, name] = sort.startsWith("-") ? [-1, sort.slice(1)] : [1, sort], value = SORTED[name] ?? (() => 0);
  const there = new Set(runs.map(({run}) => run)), isChild = ({parent}) => parent !== null && parent !== undefined && there.has(parent);
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)], [none, nor] = [x, y].map((each) => each === null || each === undefined || Number.isNaN(each));
    return none || nor ? none - nor : way * (x < y ? -1 : x > y ? 1 : 0);
  };
  const sorted = [...runs].sort((a, b) => favourites.has(b.run) - favourites.has(a.run) || compare(a, b));
  return sorted.filter((run) => !isChild(run)).flatMap((run) => [run, ...sorted.filter((each) => isChild(each) && each.parent === run.run)]);
}

export function runsView(body) {
  const search = searchBox("q", "Filter runs"), compare = h("a.button.primary", {hidden: true}), total = h("span.soft");
  const list = table("runs", HEADS.map(([title, kind]) => [Object.hasOwn(SORTED, title) ? button("sort", title, () => sortBy(title)) : title, kind]), []);
  const rows = list.querySelector("tbody"), made = new Map(), nothing = h("tr", h("td.none", {colspan: HEADS.length}));
  body.append(h("div.head", h("h1", "Runs"), total), h("div.toolbar", search, compare), list);
  readPins();

  function choose(run) {
    const picked = here().query.getAll("pick");
    replace(changed({pick: picked.includes(run) ? picked.filter((each) => each !== run) : [...picked, run]}));
  }

  // A click sorts downwards, another one upwards, the third as at first.
  function sortBy(name) {
    const now = here().query.get("sort") ?? "";
    replace(changed({sort: now === `-${name}` ? name : now === name ? null : `-${name}`}));
  }

  function turnPin(run) {
    pin(run);
    replace(location.hash);
  }

  const unit = (value, name) => (value === null || value === undefined ? "–" : [fixed(value), name ? h("span.unit", name) : null]);
  const measured = (name) => name?.replace("val/", "");

  // The cells after the first two.
  function facts({state, step, of, kind, model, reward, loss, validation, validation_name, best, score, updated, parent}) {
    const done = h("i", {style: {width: `${of ? Math.min(100, (100 * step) / of) : 100}%`}}), isEvaluation = kind === "eval" || Boolean(parent);
    const steps = [h("span.progress", done), count(step), of ? h("span.faint", ` / ${count(of)}`) : null];
    const bestOne = best ? [fixed(best.value), h("span.unit", `step ${count(best.step)}`)] : "–";
    return [
      h(`span.state.${state}`, {title: state}, h("span", state)), isEvaluation ? "" : steps, isEvaluation ? "" : reward === null ? unit(loss, "loss") : unit(reward, "reward"), "",
      score ? unit(score.value, measured(score.name)) : unit(validation, measured(validation_name)), isEvaluation ? "" : bestOne, model ? h("span.path", {title: model}, h("bdi", model)) : "–", ago(updated)];
  }

  // A row keeps its elements, so that news about a run do not take them away from under a click.
  function row(about) {
    const {run, name, parent, error, reason, attention} = about, isChild = parent !== null && parent !== undefined;
    const [, folder = "", own] = /^(.*\/)?([^/]*)$/s.exec((isChild && run.startsWith(`${parent}/`) ? run.slice(parent.length + 1) : run) || name);
    if (!made.has(run)) {
      const box = h("input", {type: "checkbox", "aria-label": `Choose ${run}`, tabindex: -1, onchange: () => choose(run)});
      const star = button("pin", "★", () => turnPin(run), {"aria-label": `Favourite: ${run}`, title: "Favourite (p)", tabindex: -1});
      const label = h("a", {href: link("charts", run), "data-row": true}, h("span.soft", isChild ? folder.replace(/^evaluations\/$/, "evaluation ") : folder), own), said = h("div");
      const tr = h("tr", {"data-run": run}, cells(HEADS, [box, [h("span.named", star, label), said], ...HEADS.slice(2).map(() => "")]));
      made.set(run, {tr, box, star, said, key: null});
    }
    const {tr, box, star, said, key} = made.get(run), now = JSON.stringify(about);
    box.checked = here().query.getAll("pick").includes(run);
    tr.classList.toggle("picked", box.checked);
    tr.classList.toggle("child", isChild);
    star.setAttribute("aria-pressed", String(favourites.has(run)));
    if (now !== key) {
      const why = error ?? reason?.problem;
      said.replaceChildren(why ? h("div.failure", {title: [why, reason?.do].filter(Boolean).join("\n")}, why) : attention ? h("div.heed", `${count(attention)} to look at`) : "");
      facts(about).forEach((content, i) => HEADS[i + 2][1].includes("spark") || tr.cells[i + 2].replaceChildren(...[content].flat().filter((each) => each !== null)));
      made.get(run).key = now;
    }
    tr.cells[9].replaceChildren(ago(about.updated));
    return tr;
  }

  async function update({query}) {
    const {root, runs} = await get("runs"), q = (query.get("q") ?? "").toLowerCase(), picked = query.getAll("pick"), sort = query.get("sort") ?? "";
    const shown = inOrder(runs.filter(({run, name, state, model}) => `${run} ${name} ${state} ${model}`.toLowerCase().includes(q)), sort);
    search.follow(query);
    const wanted = shown.length ? shown.map(row) : [nothing];
    nothing.firstChild.textContent = runs.length ? "No run matches." : "No run has begun here yet.";
    wanted.forEach((tr, i) => rows.children[i] !== tr && rows.insertBefore(tr, rows.children[i] ?? null));
    while (rows.children.length > wanted.length) rows.lastChild.remove();
    for (const th of list.querySelectorAll("th")) {
      th.ariaSort = th.textContent && sort === th.textContent ? "ascending" : sort === `-${th.textContent}` ? "descending" : null;
    }
    total.textContent = `${shown.length === runs.length ? "" : `${shown.length} of `}${runs.length} in ${root}`;
    compare.hidden = picked.length < 2;
    compare.textContent = `Compare ${picked.length} runs`;
    compare.href = link("charts", picked[0] ?? "", null, {with: picked.slice(1)});
    await sparks(shown.filter(({kind}) => kind !== "eval").slice(0, MOST_SPARKS).map(({run}) => run));
  }

  async function sparks(runs) {
    const found = runs.length ? await get("metrics", {run: runs, names: HEADLINES.join(","), points: 60}) : {};
    for (const tr of rows.children) {
      const series = found[tr.dataset.run] ?? {}, name = HEADLINES.find((each) => series[each]);
      if (name) tr.querySelector(".spark").replaceChildren(spark(series[name]));
    }
  }

  const focused = (action) => () => {
    const run = document.activeElement?.closest("tr")?.dataset.run;
    if (run !== undefined) action(run);
  };
  return {update, keys: {x: focused(choose), p: focused(turnPin)}};
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
