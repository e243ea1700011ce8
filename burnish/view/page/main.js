// The frame of the page: the choice of view, the bar above it, keys, theme, and updates of running runs.

import {chartsView} from "./charts.js";
import {forget, frozen, get, listen} from "./data.js";
import {h, problem, words} from "./dom.js";
import {checkpointsView, configView} from "./facts.js";
import {logView} from "./log.js";
import {besideOf, go, here, link} from "./place.js";
import {promptView} from "./prompt.js";
import {rolloutsView} from "./rollouts.js";
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
  ["j k", "next and previous row or rollout"], ["Enter", "open it"], ["← →", "other samples of a group; other steps"], ["J K", "next and previous group of samples"], ["t", "the prompt through time"], ["m", "prompt as messages or raw"], ["/", "search"],
  ["b", "side by side"], ["x", "choose a run"], ["p", "make a run a favourite"], ["s", "smooth lines"], ["d", "dark or light"], ["g h", "all runs"],
  ...TABS.map(([, title, key]) => [`g ${key}`, title.toLowerCase()]), ["u", "up"], ["?", "these keys"],
];

const main = document.getElementById("view"), help = document.getElementById("help"), bar = document.getElementById("tabs"), root = document.documentElement;
let shown = {}, kinds = {};

async function show(live = false) {
  const place = here(), view = Object.hasOwn(VIEWS, place.view) && (place.run === null) === (place.view === "runs") ? VIEWS[place.view] : missingView;
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

// What an address shows that has no view.
function missingView(body) {
  const update = ({view, run}) => body.replaceChildren(...missing(`There is no page “${view}”${run === null ? "" : " of a run"}.`, run));
  return {update};
}

const missing = (text, run) => [
  h("div.head", h("h1", "Not found")), h("p", words(text)),
  h("p", run === null ? null : [h("a.link", {href: link("charts", run)}, "Charts of this run"), " · "], h("a.link", {href: link("runs")}, "All runs")),
];

async function failed(error) {
  if (error.name === "AbortError") return;
  const {run} = here();
  if (error.status === 404 && run !== null && !(await known()).includes(run)) {  // none of the old run stays
    shown = {};
    main.replaceChildren(problem(error), h("div", ...missing("This address names no run.", null)));
    return frame({view: "", run: null}, "Not found");
  }
  main.querySelector(":scope > .notice")?.remove();
  main.prepend(problem(error));
  if (!error.problem) console.error(error);
}

// The ids of all runs, and whether each may have rollouts.
async function known() {
  const {runs} = await get("runs");
  kinds = Object.fromEntries(runs.map(({run, kind}) => [run, kind]));
  return Object.keys(kinds);
}

// The bar: the run and its views.
function frame({view, run}, title = "Runs") {
  const at = {rollout: "rollouts", prompt: "rollouts"}[view] ?? view, name = run || "this run", beside = besideOf(here().query);
  document.title = run === null ? `${title} · Burnish` : `${name} · ${TABS.find(([id]) => id === at)?.[1] ?? ""} · Burnish`;
  document.getElementById("where").replaceChildren(run === null ? "" : h("a", {href: link("charts", run), title: name}, name));
  const tabs = run === null ? [] : TABS.filter(([id]) => id !== "rollouts" || kinds[run] !== "sft");
  const links = tabs.map(([id, title]) => h("a", {href: link(id, run, null, beside), "aria-current": id === at && "page"}, title));
  bar.replaceChildren(...links);
  bar.querySelector("[aria-current]")?.scrollIntoView({block: "nearest", inline: "center"});
  fade();
}

// Fade the end of the tabs where more of them are.
function fade() {
  bar.classList.toggle("more-left", bar.scrollLeft > 2);
  bar.classList.toggle("more-right", bar.scrollLeft + bar.clientWidth < bar.scrollWidth - 2);
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

// Paper is light and has a width of its own.
function onPaper(yes) {
  root.toggleAttribute("data-paper", yes);
  shown.made?.onPaper?.();
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
  if (performance.now() - prefix < 1500) action = key === "h" ? () => go(link("runs")) : tab && run !== null && (() => go(link(tab[0], run, null, besideOf(here().query))));
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
bar.addEventListener("scroll", fade);
addEventListener("resize", fade);
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
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
known().then((runs) => {
  const {view, run} = here();
  if (!first) return show();
  return run === null || runs.includes(run) ? frame({view, run}) : null;
}).catch(failed);
