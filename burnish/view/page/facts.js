// Checkpoints, and the configuration with the environment.

import {distinct, otherRuns} from "./compare.js";
import {frozen, get} from "./data.js";
import {button, bytes, cells, count, date, h, options, plural, searchBox, settingValue, table, words} from "./dom.js";
import {changed, go, here, link, replace} from "./place.js";

const STEPS = [["step"], ["health", "health"], ["pinned"], ["saved", "mid soft"], ["size", "right"], ["files", "right mid"], ["layout", "mid soft"]];
const MOST_OF_A_DIFF_LINE = 2000;

export function checkpointsView(body) {
  const row = (step, latest) => h("tr", {tabindex: -1, "data-row": true}, cells(STEPS, [
    [h("b", count(step.step)), step.step === latest ? h("span.unit", "latest") : null],
    h(`span.${step.healthy ? "good" : "bad"}`, words(step.problem ? `${step.damaged ? "damaged: " : ""}${step.problem}` : step.healthy ? "committed" : "unhealthy")),
    step.pinned ? h("span.warn", words(step.pinned)) : h("span.faint", "–"),
    date(step.saved), bytes(step.bytes ?? 0), count(step.files), step.processes ? `${count(step.processes)} process${step.processes === 1 ? "" : "es"}` : "–"]));

  async function update({run}) {
    const {steps, problem: wrong} = await get("checkpoints", {run}), latest = steps.findLast((step) => step.healthy)?.step, size = steps.map((step) => step.bytes ?? 0).reduce((a, b) => a + b, 0);
    body.replaceChildren(
      h("div.head", h("h1", "Checkpoints"), h("span.soft", steps.length ? `${count(steps.length)}, ${bytes(size)}` : "")),
      wrong ? h("div.notice", words(wrong)) : "",
      steps.length ? table("steps", STEPS, [...steps].reverse().map((step) => row(step, latest))) : h("p.none", "No step has been committed yet."));
  }
  return {update};
}

export function configView(body) {
  const search = searchBox("q", "Filter settings"), other = otherRuns(), settings = h("div"), rest = h("div");
  const only = button("toggle", "Differences only", () => replace(changed({all: here().query.get("all") ? null : 1})));
  body.append(h("div.head", h("h1", "Configuration")), h("div.toolbar", search, only, frozen ? null : other), settings, rest);

  async function update({run, query}) {
    const runs = [run, ...query.getAll("with")], several = runs.length > 1, q = (query.get("q") ?? "").toLowerCase(), everything = query.get("all") || !several;
    const [{settings: all, different, text}, around, {runs: known}] = await Promise.all([get("config", {run: runs}), get("environment", {run}), get("runs")]);
    const without = (gone) => go(changed({with: runs.slice(1).filter((each) => each !== gone)}));
    const names = distinct(runs), head = (each, i) => [h("a", {href: link("config", each), title: each}, names[i] || "this run"), i ? button("plain", "×", () => without(each), {"aria-label": `Remove ${each}`}) : null];
    const heads = several ? [[plural(different.length, "difference")], ...runs.map((each, i) => [head(each, i)])] : [];
    const shown = all.filter(({setting}) => setting.toLowerCase().includes(q) && (everything || different.includes(setting)));
    const row = ({setting, values}) => h("tr", {class: several && different.includes(setting) && "different"}, cells([], [words(setting), ...values.map(settingValue)]));
    search.follow(query);
    other.offer(known, runs);
    only.hidden = !several;
    only.setAttribute("aria-pressed", String(!everything));
    settings.replaceChildren(table("settings", heads, shown.map(row)), !shown.length && all.length ? h("p.none", "No setting matches.") : "");
    rest.replaceChildren(...(several ? [] : surroundings(text[run] ?? "", around, !all.length)));
  }
  return {update};
}

function surroundings(yaml, {environment, diff}, open) {
  const facts = Object.entries(environment ?? {}).filter(([, value]) => value !== null);
  const row = ([name, value]) => h("tr", cells([], [words(name), words([value].flat().join(" "))]));
  const kind = (text) => (/^(\+\+\+|---|diff |index |@@)/.test(text) ? ".soft" : {"+": ".good", "-": ".bad"}[text[0]] ?? "");
  const changes = (diff ?? "").split("\n").map((text) => h(`div${kind(text)}`, words(text, MOST_OF_A_DIFF_LINE)));
  return [
    h("h2", "Environment"), table("settings", [], facts.map(row)),
    ...(diff ? [h("h2", "Uncommitted changes"), h("div.log", changes)] : []),
    ...(yaml ? [h("details", {open}, h("summary", "config.yaml"), h("div.text", words(yaml)))] : [])];
}
