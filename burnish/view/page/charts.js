// Charts of one run, or of several runs drawn over each other.

import {get} from "./data.js";
import {button, cells, count, date, duration, h, mean, num, options, plural, searchBox, short, table, words} from "./dom.js";
import {changed, go, here, link, replace} from "./place.js";
import {draw, line, together} from "./plot.js";

// Titles of charts, each with the metrics that share the chart if one run is shown.
const LEARNING = [
  ["Loss", "actor/loss", "train/loss"], ["Policy loss", "actor/pg_loss"], ["Entropy, nats", "actor/entropy"],
  ["Gradient norm", "actor/grad_norm", "train/grad_norm"], ["Response length, tokens", "response_length/mean", "response_length/max"],
  ["Truncated responses, share", "response_length/clip_ratio"], ["Groups without variance, share", "reward/zero_std_frac"],
  ["KL to the reference", "actor/kl_loss"], ["KL of the update", "actor/ppo_kl"],
  ["Clipped tokens, share", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"], ["Generator against engine, KL", "rollout/mismatch_kl"],
  ["Value loss of the critic", "critic/vf_loss"], ["Variance that the critic explains, share", "critic/explained_var"],
  ["Learning rate", "actor/lr", "train/lr", "critic/lr"],
];
const SPEED = [
  ["Tokens per second", "perf/tokens_per_s"], ["Model FLOPs utilisation", "perf/mfu"],
  ["Imbalance of ranks", "perf/imbalance"], ["Peak memory, GB", "perf/max_memory_gb"],
];
const TROUBLES = [
  ["Optimizer steps skipped for a gradient norm that was not finite", "actor/skipped", "critic/skipped", "train/skipped"],
  ["Rollouts on which a reward failed", "reward/errors"], ["Rollouts without a reward, left out of the update", "reward/dropped"],
];
const TOGGLES = [["smooth", "Smooth", "1"], ["log", "Log scale", "0"], ["group", "Group seeds", "1"]];
const FIRST = ["accuracy", "mean@", "exact_match", "reward", "pass@"], OWN = ["seed", "name", "output_dir"], POINTS = 400, MOST_LINES = 6;

const near = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) {
    target.near = isIntersecting;
    if (isIntersecting) target.paint();
  }
}, {rootMargin: "300px"});

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

export function chartsView(body) {
  const setting = (name) => (here().query.get(name) ?? TOGGLES.find(([each]) => each === name)[2]) === "1";
  const turn = (name, usual) => replace(changed({[name]: setting(name) === (usual === "1") ? String(1 - usual) : null}));
  const toggles = TOGGLES.map(([name, title, usual]) => button("toggle", title, () => turn(name, usual)));
  const zoomed = (from, to) => go(changed({from, to})), zoom = button("chip", "", () => zoomed(null, null), {title: "Show all steps"});
  const search = searchBox("names", "Filter metrics"), other = otherRuns(), cards = new Map();
  const head = h("div"), legend = h("div.legend.runs-legend"), grid = h("div");
  body.append(head, h("div.toolbar", search, toggles, zoom, other), legend, grid);

  async function update({run, query}) {
    const runs = [...new Set([run, ...query.getAll("with")])], [from, to] = [query.get("from"), query.get("to")];
    const named = await get("metrics", {run: runs}), names = [...new Set(runs.flatMap((each) => named[each].names))];
    const metrics = (ends) => (names.length ? get("metrics", {run: runs, names: names.join(","), points: POINTS, ...ends}) : {});
    const [found, groups, {runs: all}, {environment}] = await Promise.all([metrics({from, to}), seedGroups(runs), get("runs"), get("environment", {run})]);
    const canGroup = groups.length < runs.length;
    const shown = canGroup && setting("group") ? groups : runs.map((each) => ({label: each, runs: [each]}));
    toggles.forEach((each, i) => each.setAttribute("aria-pressed", String(setting(TOGGLES[i][0]))));
    toggles[2].hidden = !canGroup;
    zoom.hidden = from === null;
    zoom.textContent = `steps ${count(Number(from))} to ${count(Number(to))} ×`;
    search.follow(query);
    other.offer(all, runs);
    legend.hidden = runs.length < 2;
    legend.replaceChildren(...shown.map(({label, runs: members}, i) => h("span.key", {style: {"--c": `var(--c${i % 8})`}},
      members.length > 1 ? [label, h("span.unit", plural(members.length, "seed"))] : h("a", {href: link("charts", label)}, label),
      button("plain", "×", () => without(runs, members), {"aria-label": `Remove ${label}`}))));
    const about = all.find((each) => each.run === run) ?? {};
    if (runs.length > 1) head.replaceChildren(h("div.head", h("h1", plural(runs.length, "run"))));
    else if (from === null || !head.firstChild) {
      const whole = from === null ? found : await metrics({});
      head.replaceChildren(...summary(run, about, whole[run] ?? {}, environment));
    }
    layout(names, found, shown, query);
  }

  function without(runs, gone) {
    const [first, ...rest] = runs.filter((each) => !gone.includes(each));
    go(first === undefined ? link("runs") : changed({with: rest}, {...here(), run: first}));
  }

  function layout(names, found, shown, query) {
    const wanted = (query.get("names") ?? "").toLowerCase().split(",").map((each) => each.trim()).filter(Boolean);
    const matching = names.filter((name) => !wanted.length || wanted.some((each) => name.toLowerCase().includes(each)));
    const flat = matching.filter((name) => isFlat(name, found)), several = shown.length > 1 || shown[0].runs.length > 1;
    const smoothed = setting("smooth"), options_ = {smoothed, log: setting("log"), zoomed}, used = new Set(), top = scrollY;
    const ofOne = (names_) => names_.map((name, i) => line(name.slice(name.indexOf("/") + 1), found[shown[0].runs[0]][name], i));
    const figure = ([title, ...drawn]) => {
      const card = cards.get(title) ?? makeCard(title);
      const lines = () => (drawn.length > 1 ? ofOne(drawn) : shown.flatMap((group, i) => linesOf(group, drawn[0], found, i, smoothed)));
      cards.set(title, Object.assign(card, {stale: true, several, lines, options: options_}));
      used.add(title);
      card.node.classList.toggle("open", title === query.get("open"));
      return card.node;
    };
    const sections = arranged(matching.filter((name) => !flat.includes(name)), several).filter(([, charts]) => charts.length);
    const blocks = sections.map(([heading, charts]) => h("section", h("h2", heading), h("div.charts", charts.map(figure))));
    for (const title of cards.keys()) if (!used.has(title)) cards.delete(title);
    if (flat.length) blocks.push(h("p.flat", h("b", "Always 0"), flat.map((name) => h("code", name))));
    if (!blocks.length) blocks.push(h("p.none", names.length ? "No metric matches." : "No metrics have been written yet."));
    grid.replaceChildren(...blocks);
    scrollTo(0, top);
    for (const {host} of cards.values()) if (host.near) host.paint();
  }

  function makeCard(title) {
    const values = h("span.now"), step = h("span.at"), names = h("div.legend"), host = h("div.plot");
    const enlarge = () => replace(changed({open: here().query.get("open") === title ? null : title}));
    const caption = button("caption", title, enlarge, {title: "Larger or smaller"});
    const card = {host, node: h("figure.chart", h("figcaption", caption, step, values), names, host)};
    host.paint = () => {
      if (!card.stale) return;
      card.stale = false;
      const lines = card.lines(), outputs = lines.map(() => h("b"));
      const key = ({label, colour: c}, i) => h("span.key", {title: label, style: {"--c": `var(--c${c})`}}, card.several ? "" : `${label} `, outputs[i]);
      values.replaceChildren(...(lines.length === 1 ? outputs : []));
      names.replaceChildren(...(lines.length === 1 ? [] : lines.map(key)));
      draw(host, lines, card.options, (now, where) => {
        step.textContent = where === null ? "" : `step ${count(where)}`;
        now.forEach((value, i) => (outputs[i].textContent = short(value)));
      });
    };
    near.observe(host);
    return card;
  }

  return {update, keys: {s: () => turn("smooth", "1")}};
}

function isFlat(name, found) {
  const numbers = Object.values(found).flatMap((series) => ["values", "low", "high"].flatMap((part) => series[name]?.[part] ?? []));
  return numbers.every((value) => value === 0);
}

// Groups of runs whose configurations differ only in settings that every run has of its own, such as the seed.
async function seedGroups(runs) {
  const {settings} = runs.length > 1 ? await get("config", {run: runs}) : {settings: []}, groups = new Map();
  const counted = settings.filter(({setting}) => !OWN.includes(setting));
  runs.forEach((run, i) => {
    const key = JSON.stringify(counted.map(({values}) => values[i] ?? null));
    groups.set(key, [...(groups.get(key) ?? []), run]);
  });
  return [...groups.values()].map((members) => ({runs: members, label: members.length > 1 ? commonName(members) : members[0]}));
}

function commonName([first, ...others]) {
  let length = 0;
  while (length < first.length && others.every((name) => name[length] === first[length])) length += 1;
  return first.slice(0, length).replace(/[\W_]*(seed|s)?[\W_]*$/, "") || first;
}

// Sections of charts: [heading, [[title, name…]…]]. If each metric has `several` lines, metrics do not share a chart.
function arranged(names, several) {
  const left = new Set(names), take = (specs) => specs.flatMap(([title, ...wanted]) => {
    const there = wanted.filter((name) => left.delete(name));
    return there.length > 1 && several ? there.map((name) => [name, name]) : there.length ? [[title, ...there]] : [];
  });
  const held = names.filter((name) => name.startsWith("val/")).sort(byRank), alone = held.filter((name) => /loss|length\/(mean|max)/.test(name));
  const shares = held.filter((name) => !alone.includes(name)), firsts = shares.filter((_, i) => i % MOST_LINES === 0);
  const validation = firsts.map((first, i) => [i ? `Validation, from ${first.slice(4)}` : "Validation", ...shares.slice(i * MOST_LINES, (i + 1) * MOST_LINES)]);
  const parts = names.filter((name) => name.startsWith("reward/parts/")), spans = names.filter((name) => /^timing_s\/[^/]+$/.test(name) && name !== "timing_s/step");
  const own = alone.map((name) => [`Validation ${name.slice(4)}`, name]);
  const learning = take([["Reward", "reward/mean"], ...validation, ["Parts of the reward", ...parts], ...own, ...LEARNING]);
  const speed = take([...SPEED, ["Seconds per step", "timing_s/step", ...spans]]);
  const others = Object.entries(Object.groupBy([...left], (name) => name.split("/")[0]));
  return [["Learning", learning], ["Speed", speed], ...others.map(([prefix, rest]) => [prefix, rest.map((name) => [name, name])])];
}

function byRank(a, b) {
  const rank = (name) => 10 * name.split("/").length + (FIRST.findIndex((word) => name.includes(word)) + 9) % 9;
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}

// The line of a run, or the mean of several seeds with a band.
function linesOf({label, runs}, name, found, i, smoothed) {
  const lines = runs.filter((run) => found[run]?.[name]).map((run) => line(label, found[run][name], i));
  return lines.length > 1 ? [{...lines[0], ...together(lines, smoothed)}] : lines;
}

// The head of a run's page: the run's state, its problems and its main numbers.
function summary(run, about, found, environment = {}) {
  const {device, processes = 1, host, started} = environment, facts = [about.model, device && `${processes} × ${device}`, host, started && date(started)];
  const total = (name) => (found[name]?.values ?? []).map(num).reduce((sum, value, i) => {  // a mean counts for the steps of its bucket
    const {steps} = found[name], width = i ? steps[i] - steps[i - 1] : (steps[1] ?? steps[0] + 1) - steps[0];
    return sum + (value > 0 ? value * width : 0);
  }, 0);
  const troubles = TROUBLES.map(([title, ...names]) => [title, Math.round(names.map(total).reduce((a, b) => a + b))]).filter(([, n]) => n);
  const notices = [about.error, ...troubles.map(([title, n]) => `${title}: ${count(n)}`)].filter(Boolean);
  const tile = ([label, value, before, note]) => h("div.tile",
    h("div.label", label), h("div.value", before ? h("span.before", `${before} → `) : null, value), h("div.note", note));
  return [
    h("div.head", h("h1", about.name ?? run), about.state ? h(`span.state.${about.state}`, about.state) : null,
      h("span.facts", facts.filter(Boolean).map((fact) => h("span", words(fact))))),
    ...notices.map((notice) => h("div.notice", words(notice))), h("div.tiles", tiles(found, about).map(tile)), ...validations(found)];
}

const validationsOf = (found) => Object.keys(found).filter((name) => name.startsWith("val/")).sort(byRank);

// The main numbers: [label, value, value before, note].
function tiles(found, {step, of}) {
  const finite = (name) => (found[name]?.values ?? []).map(num).filter(Number.isFinite), made = [];
  const [held] = validationsOf(found), name = ["reward/mean", "train/loss", "actor/loss"].find((each) => found[each]);
  if (held) {
    const {values} = found[held];
    made.push([`Validation ${held.slice(4)}`, short(values.at(-1)), values.length > 1 ? short(values[0]) : "", "held-out data"]);
  }
  if (name) {
    const values = finite(name), few = Math.max(1, Math.floor(values.length / 20)), label = name === "reward/mean" ? "Training reward" : "Training loss";
    const [before, after] = [values.slice(0, few), values.slice(-few)].map((some) => short(some.length ? mean(some) : NaN));
    made.push([label, after, values.length > 1 ? before : "", few > 1 ? "mean of a 20th of the steps" : "one step"]);
  }
  const last = Math.max(step ?? 0, ...Object.values(found).map(({steps}) => steps.at(-1)));
  const seconds = finite("timing_s/step"), rates = finite("perf/tokens_per_s").sort((a, b) => a - b);
  made.push(["Steps", count(last), "", of ? `of ${count(of)}` : ""]);
  if (seconds.length) made.push(["Time in steps", duration(mean(seconds) * last), "", `${short(mean(seconds))} s per step`]);
  if (rates.length) made.push(["Tokens per second", short(rates[rates.length >> 1]), "", "median step"]);
  return made;
}

// The first and last values of a validation's metrics.
function validations(found) {
  const names = validationsOf(found), heads = [["metric"], ["first", "right"], ["last", "right"], ["change", "right"]];
  const rows = names.map((name) => {
    const {steps, values} = found[name], change = num(values.at(-1)) - num(values[0]);
    const cell = (i) => [short(values.at(i)), h("span.unit", `step ${count(steps.at(i))}`)];
    return h("tr", cells(heads, [name.slice(4), cell(0), cell(-1), `${change > 0 ? "+" : ""}${short(change)}`]));
  });
  return names.length > 1 ? [h("details", h("summary", "Validation"), table("narrow", heads, rows))] : [];
}
