// Runs beside each other: the menu to add one, groups of seeds, and settings that differ.

import {get} from "./data.js";
import {cells, count, h, options, plural, settingValue, table, words} from "./dom.js";
import {besideOf, changed, go, here, link} from "./place.js";

const OWN = ["seed", "name", "output_dir"], MOST_SETTINGS = 6;

// A menu of other runs to draw over this one.
export function otherRuns() {
  const add = () => go(changed({with: [...here().query.getAll("with"), choice.value]}));
  const choice = h("select", {"aria-label": "Compare with another run", onchange: add});
  choice.offer = (all, runs) => {
    const others = all.map(({run}) => run).filter((run) => !runs.includes(run));
    choice.hidden = !others.length;
    choice.replaceChildren(...options([["", "Compare with …"], ...others.map((run) => [run, run])]));
  };
  return choice;
}

// Names without the words that all of them begin with.
export function distinct(names) {
  const most = names.length > 1 ? Math.min(...names.map((name) => name.length)) - 1 : 0, [first] = names;
  let cut = 0;
  for (let i = 0; i < most && names.every((name) => name[i] === first[i]); i += 1) if (/[/_.,\s-]/.test(first[i])) cut = i + 1;
  return names.map((name) => name.slice(cut));
}

// Groups of runs whose configurations differ only in settings that every run has of its own, such as the seed.
export async function seedGroups(runs) {
  const {settings} = runs.length > 1 ? await get("config", {run: runs}) : {settings: []}, groups = new Map();
  const counted = settings.filter(({setting}) => !OWN.includes(setting));
  runs.forEach((run, i) => {
    const key = JSON.stringify(counted.map(({values}) => values[i] ?? null));
    groups.set(key, [...(groups.get(key) ?? []), run]);
  });
  return [...groups.values()].map((members) => ({runs: members, label: members.length > 1 ? commonName(members) : members[0]}));
}

// The settings that differ between compared runs.
export async function differences(runs) {
  const {settings, different, differences: ordered} = await get("config", {run: runs});
  const rows = ordered ?? settings.filter(({setting}) => different.includes(setting) && !OWN.slice(1).includes(setting));
  if (!rows.length) return [h("p.soft.differences", "All settings are equal, but names.")];
  const names = distinct(runs), heads = [["setting"], ...runs.map((run, i) => [h("span.key", {title: run, style: {"--c": `var(--c${i % 8})`}}, names[i])])];
  const row = ({setting, values}) => h("tr", cells([], [words(setting), ...values.map(settingValue)]));
  const others = rows.length > MOST_SETTINGS ? h("a.link", {href: link("config", here().run, null, besideOf(here().query))}, `All ${count(rows.length)} settings that differ`) : null;
  return [h("details.differences", {open: true}, h("summary", `${plural(rows.length, "setting")} differ${rows.length === 1 ? "s" : ""}`), table("settings", heads, rows.slice(0, MOST_SETTINGS).map(row)), others)];
}

function commonName([first, ...others]) {
  let length = 0;
  while (length < first.length && others.every((name) => name[length] === first[length])) length += 1;
  return first.slice(0, length).replace(/[\W_]*(seed|s)?[\W_]*$/, "") || first;
}
