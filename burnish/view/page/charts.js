// Charts of one run, or of several runs drawn over each other.

import {AXES, AXIS_WORDS, places} from "./axis.js";
import {differences, distinct, otherRuns, seedGroups} from "./compare.js";
import {get} from "./data.js";
import {button, count, h, options, plural, searchBox, short} from "./dom.js";
import {changed, go, here, link, replace} from "./place.js";
import {draw, line, together} from "./plot.js";
import {runHead} from "./summary.js";
import {arranged, lineName, metricTitle, validationNames, withoutRepeats} from "./titles.js";

const TOGGLES = [["smooth", "Smooth", "1"], ["log", "Log scale", "0"], ["group", "Group seeds", "1"]];
const POINTS = 400, MOST_BANDS = 2, ALWAYS_SHOWN = ["reward/mean", "train/loss"];

const near = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) {
    target.near = isIntersecting;
    if (isIntersecting) target.paint();
  }
}, {rootMargin: "300px"});

export function chartsView(body) {
  const setting = (name) => (here().query.get(name) ?? TOGGLES.find(([each]) => each === name)[2]) === "1";
  const turn = (name, usual) => replace(changed({[name]: setting(name) === (usual === "1") ? String(1 - usual) : null}));
  const toggles = TOGGLES.map(([name, title, usual]) => button("toggle", title, () => turn(name, usual)));
  const zoomed = (from, to) => go(changed({from, to})), zoom = button("chip", "", () => zoomed(null, null), {title: "Show all steps"});
  const axes = h("select", {"aria-label": "Horizontal axis", onchange: () => replace(changed({x: axes.value}))}, options(AXES));
  const search = searchBox("names", "Filter metrics"), other = otherRuns(), cards = new Map();
  const head = h("div"), toolbar = h("div.toolbar", search, toggles, axes, zoom, other), legend = h("div.legend.runs-legend"), grid = h("div");
  body.append(head, toolbar, legend, grid);
  let opened = null;

  async function update({run, query}) {
    const runs = [...new Set([run, ...query.getAll("with")])], [from, to] = [query.get("from"), query.get("to")];
    const named = await get("metrics", {run: runs}), names = [...new Set(runs.flatMap((each) => named[each].names))];
    const metrics = (ends) => (names.length ? get("metrics", {run: runs, names: names.join(","), points: POINTS, ...ends}) : {});
    const wanted = Object.hasOwn(AXIS_WORDS, query.get("x") ?? "") ? query.get("x") ?? "" : "";
    const [found, groups, {runs: all}, along] = await Promise.all([metrics({from, to}), seedGroups(runs), get("runs"), places(runs, wanted)]);
    const nowhere = runs.filter((each) => !along[each]), axis = nowhere.length === runs.length ? "" : wanted, place = axis ? along : await places(runs, "");
    const canGroup = groups.length < runs.length;
    const grouped = canGroup && setting("group") ? groups : runs.map((each) => ({label: each, runs: [each]})), brief = distinct(grouped.map(({label}) => label));
    const shown = grouped.map((group, i) => ({...group, brief: brief[i]}));
    toggles.forEach((each, i) => each.setAttribute("aria-pressed", String(setting(TOGGLES[i][0]))));
    toggles[2].hidden = !canGroup;
    zoom.hidden = from === null;
    zoom.textContent = `steps ${count(Number(from))} to ${count(Number(to))} ×`;
    search.follow(query);
    other.offer(all, runs);
    legend.hidden = runs.length < 2;
    legend.replaceChildren(...shown.map(({label, runs: members, ...group}, i) => h("span.key", {title: label, style: {"--c": `var(--c${i % 8})`}},
      members.length > 1 ? [group.brief, h("span.unit", plural(members.length, "seed"))] : h("a", {href: link("charts", label)}, group.brief),
      button("plain", "×", () => without(runs, members), {"aria-label": `Remove ${label}`}))));
    const about = all.find((each) => each.run === run) ?? {};
    axes.value = axis;
    if (runs.length > 1) fill(h("div.head", h("h1", plural(runs.length, "run"))), ...(await differences(runs)));
    else if (from === null || !head.firstChild) fill(...(await runHead(run, about, (from === null ? found : await metrics({}))[run] ?? {})));
    toolbar.hidden = runs.length === 1 && about.kind === "eval";  // the table of its head has all of an evaluation's numbers
    if (toolbar.hidden) grid.replaceChildren();
    else layout(names, found, shown, query, axis, place);
    if (nowhere.length) grid.prepend(h("p.soft", axis ? `${nowhere.join(", ")} wrote no ${wanted}: left out.` : `The run wrote no ${wanted}: charts are by step.`));
  }

  // Fill the head; a table that was open or closed stays so.
  function fill(...nodes) {
    const before = head.querySelector("details"), after = nodes.find((node) => node.localName === "details");
    if (after && before?.className === after.className) after.open = before.open;
    head.replaceChildren(...nodes);
  }

  function without(runs, gone) {
    const [first, ...rest] = runs.filter((each) => !gone.includes(each));
    go(first === undefined ? link("runs") : changed({with: rest}, {...here(), run: first}));
  }

  function layout(names, found, shown, query, axis, place) {
    const wanted = (query.get("names") ?? "").toLowerCase().split(",").map((each) => each.trim()).filter(Boolean);
    const called = (name) => `${name} ${metricTitle(name)}`.toLowerCase();
    const placed = Object.entries(found).filter(([run]) => place[run]).map(([, series]) => series);
    const matching = names.filter((name) => placed.some((series) => series[name])).filter((name) => !wanted.length || wanted.some((each) => called(name).includes(each)));
    const main = [...ALWAYS_SHOWN, validationNames(names)[0]], flat = matching.filter((name) => !main.includes(name) && isFlat(name, found)), several = shown.length > 1 || shown[0].runs.length > 1;
    const smoothed = setting("smooth"), options_ = {smoothed, log: setting("log"), axis, zoomed: axis ? null : zoomed}, used = new Set(), top = scrollY;
    const [one] = shown[0].runs, bands = (names_, drawn) => (names_.length <= MOST_BANDS ? drawn : {...drawn, low: false, high: false});
    const ofOne = (names_) => names_.map((name, i) => bands(names_, line(lineName(name), found[one][name], i, place[one])));
    const figure = ([title, ...drawn]) => {
      const key = drawn[0], card = cards.get(key) ?? makeCard(key);
      const lines = () => (drawn.length > 1 ? ofOne(drawn) : shown.flatMap((group, i) => linesOf(group, key, found, i, smoothed, place)));
      card.caption.textContent = title;
      card.caption.title = `${drawn.join(", ")}: larger or smaller`;
      cards.set(key, Object.assign(card, {stale: true, several, lines, options: options_}));
      used.add(key);
      card.node.classList.toggle("open", drawn.includes(query.get("open")));
      return card.node;
    };
    const sections = arranged(withoutRepeats(matching.filter((name) => !flat.includes(name)), found), several).filter(([, charts]) => charts.length);
    const blocks = sections.map(([heading, charts]) => h("section", h("h2", heading), h("div.charts", charts.map(figure))));
    for (const key of cards.keys()) if (!used.has(key)) cards.delete(key);
    if (flat.length) blocks.push(h("p.flat", h("b", "Always 0"), flat.map((name) => h("span", {title: name}, metricTitle(name)))));
    if (!blocks.length) blocks.push(h("p.none", names.length ? "No metric matches." : "No metrics have been written."));
    grid.replaceChildren(...blocks);
    scrollTo(0, top);
    for (const {host, node} of cards.values()) if (host.near || node.matches(".open")) host.paint();
    if (query.get("open") !== opened) grid.querySelector(".open")?.scrollIntoView({block: "nearest"});
    opened = query.get("open");
  }

  function makeCard(key) {
    const values = h("span.now"), step = h("span.at"), names = h("div.legend"), host = h("div.plot");
    const enlarge = () => replace(changed({open: card.node.classList.contains("open") ? null : key}));
    const caption = button("caption", "", enlarge);
    const card = {host, caption, node: h("figure.chart", h("figcaption", caption, step, values), names, host)};
    host.paint = () => {
      if (!card.stale) return;
      card.stale = false;
      const lines = card.lines(), outputs = lines.map(() => h("b"));
      const key = ({label, colour: c}, i) => h("span.key", {title: label, style: {"--c": `var(--c${c})`}}, h("span.name-of-line", `${label} `), outputs[i]);
      const alone = lines.length === 1 && !card.several;
      values.replaceChildren(...(alone ? outputs : []));
      names.replaceChildren(...(alone ? [] : lines.map(key)));
      draw(host, lines, card.options, (now, where) => {
        step.textContent = where === null ? "" : AXIS_WORDS[card.options.axis](where);
        now.forEach((value, i) => (outputs[i].textContent = short(value)));
      });
    };
    near.observe(host);
    return card;
  }

  // Paper shows every chart, also those that nobody has scrolled to, and in light colours.
  function onPaper() {
    for (const card of cards.values()) {
      card.host.form = null;
      card.stale = true;
      card.host.paint();
    }
  }

  return {update, onPaper, keys: {s: () => turn("smooth", "1")}};
}

function isFlat(name, found) {
  const numbers = Object.values(found).flatMap((series) => ["values", "low", "high"].flatMap((part) => series[name]?.[part] ?? []));
  return numbers.every((value) => value === 0);
}

// The line of a run, or the mean of several seeds with a band.
function linesOf({brief, runs}, name, found, i, smoothed, place) {
  const lines = runs.filter((run) => found[run]?.[name] && place[run]).map((run) => line(brief, found[run][name], i, place[run]));
  return lines.length > 1 ? [{...lines[0], ...together(lines, smoothed)}] : lines;
}
