// Lists of rollouts: with filters, of a report, and of one prompt over the steps.

import {frozen, get} from "./data.js";
import {button, count, fixed, h, later, mean, num, options, passage, plural, rewardChip, searchBox, words} from "./dom.js";
import {changed, go, here, link, replace} from "./place.js";
import {draw} from "./plot.js";
import {answerOf, filtersOf, readRollout, toRollout} from "./rollout.js";

const SORTS = [
  ["", "newest first"], ["step", "oldest first"], ["-reward", "best first"], ["reward", "worst first"],
  ["-length", "longest first"], ["length", "shortest first"],
];
const NARROW = 760, WIDE = 1100, MOST_OF_AN_EXCERPT = 300, SAMPLES = 200;

function item(row, beside = null) {
  const facts = [`step ${count(row.step)}`, `prompt ${row.prompt_index}`, `${count(row.length)} tokens`].map((fact) => h("span", fact));
  const excerpt = row.completion.slice(0, MOST_OF_AN_EXCERPT).trim().replace(/\s+/g, " ");
  return h("a.item", {href: toRollout(row, beside), "data-row": true, "data-id": row.id},
    rewardChip(row.reward),
    h("span.meta", facts, row.stop_reason === "length" ? h("span.warn", "cut off") : null,
      row.error || row.reward_error ? h("span.bad", "reward failed") : null, row.source ? h("span", words(row.source)) : null),
    h("span.excerpt", {dir: "auto"}, words(excerpt || "empty")));
}

export function rolloutsView(body) {
  const list = h("div"), total = h("div.count", {role: "status"}), reader = h("article.reader"), more = button("more", "More", () => load(true));
  const form = h("form.filters", {onsubmit: (event) => event.preventDefault()});
  body.classList.add("rollouts");
  body.append(...(frozen ? [] : [h("details.fold", {open: innerWidth > WIDE}, h("summary", "Filters"), form)]), h("div.list", total, list, more), reader);
  let rows = [], cursor = null, known = 0, unread = 0, newest = null, listed = null, read = null, filled = null;

  async function load(further = false) {
    const {run, query} = here();
    const answer = frozen ? await examples(list, run) : await get("rollouts", {run, ...filtersOf(query), cursor: further ? cursor : null});
    if (!further) [known, unread, newest] = [answer.total, answer.unread, answer.newest ?? null];
    rows = further ? [...rows, ...answer.rows] : answer.rows;
    cursor = answer.next;
    more.hidden = !cursor;
    if (frozen) return;
    if (!further) list.replaceChildren();
    list.append(...answer.rows.map((row) => item(row)));
    total.textContent = known === null ? `${count(rows.length)}${cursor ? " or more" : ""} rollouts` : plural(known, "rollout") + (unread ? `, and more at ${plural(unread, "step")} that were not read` : "");
    if (!rows.length && cursor) await load(true);
    else if (!rows.length) list.append(h("p.none", Object.keys(filtersOf(query)).length ? "No rollout matches." : "No rollouts have been written yet."));
  }

  // The rollout to show: the chosen one, or on a wide page the first one.
  const current = () => here().argument ?? (innerWidth > NARROW ? rows[0]?.id : null) ?? null;

  async function update({view, run, argument, query}, live) {
    const filters = JSON.stringify(filtersOf(query));
    body.classList.toggle("reading", view === "rollout");
    const kind = query.get("kind") ?? "";
    if (!frozen && kind !== filled) fill(form, await get("facets", {run, kind}));
    filled = kind;
    for (const field of form.querySelectorAll("[name]")) if (field !== document.activeElement) field.value = query.get(field.name) ?? "";
    if (filters !== listed) await load();
    else if (live) await fresher(run, query);
    listed = filters;
    const id = current(), wanted = JSON.stringify([id, query.get("beside"), query.get("colour"), query.get("raw")]);
    for (const each of list.querySelectorAll(".item")) {
      if (each.dataset.id === id) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
    if (argument !== null) list.querySelector("[aria-current]")?.scrollIntoView({block: "nearest"});
    if (wanted !== read) reader.replaceChildren(...(id === null ? [] : await readRollout(run, id, query)));
    read = wanted;
  }

  // New rollouts do not move the list while it is read; a button shows them.
  async function fresher(run, query) {
    const from = Math.max(newest === null ? 0 : newest + 1, Number(query.get("from_step") ?? 0));
    const {total: fresh} = await get("rollouts", {run, ...filtersOf(query), from_step: from, limit: 1});
    if (fresh) total.replaceChildren(button("chip", `Show ${count(fresh)} new`, () => load()));
  }

  async function move(by) {
    const links = () => [...list.querySelectorAll(".item")], next = links().findIndex((each) => each.dataset.id === current()) + by;
    if (next >= links().length && cursor) await load(true);
    if (next >= 0 && links()[next]) replace(links()[next].getAttribute("href"));
  }

  const sample = (by) => () => {
    const links = [...reader.querySelectorAll(".column:first-child .samples a")];
    links[links.findIndex((each) => each.hasAttribute("aria-current")) + by]?.click();
  };
  const beside = () => reader.querySelector(".beside")?.click();
  return {update, keys: {j: () => move(1), k: () => move(-1), ArrowLeft: sample(-1), ArrowRight: sample(1), b: beside}};
}

// The filters.
function fill(form, {sources = [], steps, validations = [], indexed, older = 0, problems = []}) {
  const change = () => later(() => {
    const values = [...form.querySelectorAll("[name]")].map(({name, value}) => [name, value.trim()]);
    replace(changed(Object.fromEntries(values), {...here(), view: "rollouts", argument: null}));
  });
  const field = (name, label) => h("input", {name, type: "number", step: "any", placeholder: label, "aria-label": name.replace("_", " "), oninput: change});
  const select = (name, label, choices) => h("label", label, h("select", {name, onchange: change}, options(choices)));
  const group = (title, ...fields) => h("fieldset", h("legend", title), fields);

  const range = (title, name) => group(title, h("div.pair", field(`min_${name}`, "from"), field(`max_${name}`, "to")));
  const search = searchBox("text", "Search prompts and answers"), known = sources.map((name) => [name, name || "none"]);
  search.name = "text";
  form.replaceChildren(...[
    search,
    validations.length ? select("kind", "Of", [["", steps?.[2] ? "training" : "validation"], ["validation", "validation"]].slice(steps?.[2] ? 0 : 1)) : null,
    select("sort", "Order", SORTS), known.length > 1 ? select("source", "Source", [["", "all"], ...known]) : null,
    range("Reward", "reward"), range("Length, tokens", "length"),
    group(steps?.[2] ? `Step, ${count(steps[0])} to ${count(steps[1])}` : "Step", h("div.pair", field("from_step", "from"), field("to_step", "to"))),
    group("Prompt", field("prompt", "number of the prompt")), button("button", "Clear", () => go(link("rollouts", here().run))),
    ...problems.map((each) => h("p.bad", words(each))), indexed > 0 && indexed < 1 ? h("p.faint", `${Math.floor(100 * indexed)} % of the newest steps are read`) : null,
    older ? h("p.faint", `Orders by reward and length have the newest steps, without ${count(older)} older ones. Choose steps to order those.`) : null,
  ].filter(Boolean));
}

// What a report keeps: the best, the worst, and the prompts whose rewards changed most.
async function examples(list, run) {
  const {rows, examples: found} = await get("rollouts", {run}), row = (id) => rows.find((each) => each.id === id);
  if (!found) list.replaceChildren(h("p.none", "No rollouts have been written yet."));
  else {
    const pairs = found.changed.flatMap(([early, late, before, after]) =>
      [h("h3", `mean reward ${fixed(before)} → ${fixed(after)}`), item(row(early), late), item(row(late), early)]);
    const [best, worst] = [found.best, found.worst].map((ids) => ids.map((id) => item(row(id))));
    list.replaceChildren(...(pairs.length ? [h("h2", "Changed most"), ...pairs] : []),
      h("h2", `Best, step ${count(found.step)}`), ...best, h("h2", `Worst, step ${count(found.step)}`), ...worst);
  }
  return {rows, next: null, total: rows.length};
}

// One prompt's answers over the steps.
export function promptView(body) {
  const head = h("div.head"), text = h("div"), host = h("div.plot"), now = h("span.now"), where = h("span.at"), steps = h("div.by-step");
  const chart = h("figure.chart", h("figcaption", h("span.caption", "Mean reward"), where, now), host), more = button("more", "More", () => load(here()));
  body.append(head, text, chart, steps, more);
  let groups = new Map(), cursor = null, shown = null;

  async function load({run, argument, query}) {
    const found = await get("rollouts", {run, kind: query.get("kind"), prompt: argument, sort: "step", limit: SAMPLES, cursor});
    for (const row of found.rows) groups.set(row.step, [...(groups.get(row.step) ?? []), row]);
    cursor = found.next;
    more.hidden = !cursor;
    const all = [...groups].map(([step, rows]) => {
      const rewards = rows.map((row) => num(row.reward)).filter(Number.isFinite);
      return {step, rows: rows.sort((a, b) => a.sample - b.sample), reward: rewards.length ? mean(rewards) : NaN};
    });
    const number = all.map(({rows}) => rows.length).reduce((a, b) => a + b, 0), line = {colour: 0, calm: true, steps: all.map(({step}) => step), values: all.map(({reward}) => reward)};
    head.replaceChildren(h("h1", `Prompt ${argument}`), h("span.soft", number ? `${plural(number, "answer")} at ${plural(all.length, "step")}` : "No answer of it was kept."));
    chart.hidden = all.length < 2;
    if (all.length > 1) draw(host, [line], {}, ([value], step) => {
      now.textContent = fixed(value);
      where.textContent = step === null ? "" : `step ${count(step)}`;
    });
    const section = ({step, rows, reward}) => h("section", h("h2", `Step ${count(step)}`, h("span.soft", `mean ${fixed(reward)}`)), h("div", rows.map((row) => item(row))));
    steps.replaceChildren(...all.map(section));
    return all[0]?.rows[0];
  }

  async function update(place, live) {
    const key = JSON.stringify([place.argument, place.query.get("kind")]);
    if (live || key === shown) return;
    [groups, cursor, shown] = [new Map(), null, key];
    const first = await load(place), whole = first && (await get("rollout", {run: place.run, id: first.id}));
    text.replaceChildren(...(whole ? [passage(whole.prompt, ".prompt"), answerOf(whole)] : []));
  }
  return {update};
}
