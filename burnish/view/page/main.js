// The frame of the page: the choice of view, the bar above it, keys, theme, and updates of running runs.

import {chartsView} from "./charts.js";
import {forget, frozen, get, listen} from "./data.js";
import {h, problem} from "./dom.js";
import {checkpointsView, configView, logView} from "./facts.js";
import {go, here, link} from "./place.js";
import {promptView, rolloutsView} from "./rollouts.js";
import {runsView} from "./runs.js";
import {timelineView} from "./timeline.js";

// A view makes its elements once: view(body) returns `update(place, live)` and keys.
const VIEWS = {
  runs: runsView, charts: chartsView, rollouts: rolloutsView, rollout: rolloutsView, prompt: promptView,
  timeline: timelineView, checkpoints: checkpointsView, log: logView, config: configView,
};
const TABS = [
  ["charts", "Charts", "c"], ["rollouts", "Rollouts", "r"], ["timeline", "Timeline", "t"],
  ["checkpoints", "Checkpoints", "k"], ["log", "Log", "l"], ["config", "Configuration", "f"],
].filter(([view]) => !frozen || ["charts", "rollouts", "config"].includes(view));
const KEYS = [
  ["j k", "next and previous row or rollout"], ["Enter", "open it"], ["← →", "other samples of a prompt; other steps"], ["/", "search"],
  ["b", "side by side"], ["x", "choose a run"], ["s", "smooth lines"], ["d", "dark or light"], ["g h", "all runs"],
  ...TABS.map(([, title, key]) => [`g ${key}`, title.toLowerCase()]), ["u", "up"], ["?", "these keys"],
];

const main = document.getElementById("view"), help = document.getElementById("help"), root = document.documentElement;
let shown = {}, kinds = {};

async function show(live = false) {
  const place = here(), view = VIEWS[place.view] ?? runsView;
  if (frozen && place.run === null) return location.replace(link("charts", Object.keys(kinds)[0]));
  if (!live) forget();
  try {
    if (shown.view !== view || shown.run !== place.run) {
      const body = h("div", {"aria-busy": "true"});
      main.replaceChildren(body);
      scrollTo(0, 0);
      shown = {view, run: place.run, body, made: view(body)};
    }
    frame(place);
    const {made, body} = shown;
    await made.update(place, live);
    body.removeAttribute("aria-busy");
    main.querySelector(":scope > .notice")?.remove();
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  if (error.name === "AbortError") return;
  main.querySelector(":scope > .notice")?.remove();
  main.prepend(problem(error));
  if (!error.problem) console.error(error);
}

// The bar: the run and its views.
function frame({view, run}) {
  const at = {rollout: "rollouts", prompt: "rollouts"}[view] ?? view, name = run || "this run";
  document.title = run === null ? "Runs · Burnish" : `${name} · ${TABS.find(([id]) => id === at)?.[1] ?? ""} · Burnish`;
  document.getElementById("where").replaceChildren(run === null ? "" : h("a", {href: link("charts", run), title: name}, name));
  const tabs = run === null ? [] : TABS.filter(([id]) => id !== "rollouts" || kinds[run] !== "sft");
  const links = tabs.map(([id, title]) => h("a", {href: link(id, run), "aria-current": id === at && "page"}, title));
  document.getElementById("tabs").replaceChildren(...links);
  document.querySelector("#tabs [aria-current]")?.scrollIntoView({block: "nearest", inline: "center"});
}

// Choose light or dark, or the earlier choice; a browser without storage forgets the choice.
function theme(wanted) {
  try {
    if (wanted) localStorage.setItem("theme", wanted);
    wanted ??= localStorage.getItem("theme");
  } catch { /* no storage */ }
  if (wanted) root.dataset.theme = wanted;
}

function redraw() {
  shown = {};
  show();
}

function turn() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
  redraw();
}

// Move the focus among the view's rows.
function step(by) {
  const rows = [...main.querySelectorAll("[data-row]")].filter((row) => row.offsetParent), at = rows.indexOf(document.activeElement);
  rows[at < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, at + by))]?.focus();
}

function up({view, run, query} = here()) {
  go(["rollout", "prompt"].includes(view) ? link("rollouts", run, null, query) : link("runs"));
}

const common = {
  j: () => step(1), k: () => step(-1), d: turn, u: () => up(), "?": () => help.showModal(),
  "/": () => [...main.querySelectorAll("[data-search]")].find((each) => each.offsetParent)?.focus(),
};
let prefix = -Infinity;

function pressed(event) {
  const {key, target} = event, {run} = here(), tab = TABS.find(([, , letter]) => letter === key);
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (target.closest("input:not([type=checkbox], [type=range]), select")) return key === "Escape" && target.blur();
  if (target.matches("input") && key.startsWith("Arrow")) return;
  let action = shown.made?.keys?.[key] ?? common[key];
  if (performance.now() - prefix < 1500) action = key === "h" ? () => go(link("runs")) : tab && run !== null && (() => go(link(tab[0], run)));
  prefix = key === "g" ? performance.now() : -Infinity;
  if (!action) return;
  event.preventDefault();
  action();
}

let due = false, news = new Set();
// A run has new steps: update its view, at most once a second.
function grown(run) {
  news.add(run);
  if (due) return;
  due = true;
  setTimeout(() => {
    const {run: at, query} = here();
    if (at === null || [at, ...query.getAll("with")].some((each) => news.has(each))) show(true);
    due = false;
    news = new Set();
  }, 1000);
}

theme();
const keysShown = (keys) => keys.split(" ").map((key) => h("kbd", key));
help.append(h("h2", "Keys"), h("dl", KEYS.map(([keys, what]) => h("div", h("dt", keysShown(keys)), h("dd", what)))));
help.addEventListener("click", () => help.close());
document.getElementById("theme").addEventListener("click", turn);
document.getElementById("keys").addEventListener("click", () => help.showModal());
addEventListener("keydown", pressed);
addEventListener("hashchange", () => show());
addEventListener("unhandledrejection", (event) => { event.preventDefault(); failed(event.reason); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
listen(grown, (yes) => {
  const light = document.getElementById("live");
  light.className = yes ? "on" : "off";
  light.textContent = yes ? "live" : "no server";
});
root.toggleAttribute("data-frozen", frozen);
const first = frozen ? null : show();
get("runs").then(({runs}) => {
  kinds = Object.fromEntries(runs.map(({run, kind}) => [run, kind]));
  return first ? frame(here()) : show();
}).catch(failed);
