// Lists of rollouts: with filters, and of a report.

import {endOf} from "./conversation.js";
import {frozen, get} from "./data.js";
import {button, count, h, later, options, plural, rewardChip, searchBox, short, words} from "./dom.js";
import {changed, go, here, link, replace} from "./place.js";
import {filtersOf, marginOf, readRollout, sideOf, toRollout} from "./rollout.js";

const SORTS = [
  ["", "newest first"], ["step", "oldest first"], ["-reward", "best first"], ["reward", "worst first"],
  ["-length", "longest first"], ["length", "shortest first"],
];
const SORTS_OF_PAIRS = [["margin", "smallest margin first"], ["-margin", "largest margin first"]];
const NARROW = 760, WIDE = 1100, MOST_OF_AN_EXCERPT = 300, ASK_AGAIN_MS = 1000;

function item(row, beside = null) {
  const facts = [`step ${count(row.step)}`, `prompt ${row.prompt_index}`, row.turns ? plural(row.turns, "turn") : null, `${count(row.length)} tokens`].filter(Boolean).map((fact) => h("span", fact));
  const excerpt = row.completion.slice(0, MOST_OF_AN_EXCERPT).trim().replace(/\s+/g, " ");
  return h("a.item", {href: toRollout(row, beside), "data-row": true, "data-id": row.id, "data-group": `${row.step}/${row.prompt_index}`},
    rewardChip(row.reward),
    h("span.meta", facts, sideOf(row) ? h("span", `${sideOf(row)}, margin ${short(marginOf(row))}`) : null, row.end && endOf(row).isWarning ? h("span.warn", words(endOf(row).text)) : row.stop_reason === "length" ? h("span.warn", "cut off") : null,
      row.error || row.reward_error ? h("span.bad", row.end === "failed" ? "dropped" : "reward failed") : null, row.source ? h("span", words(row.source)) : null),
    h("span.excerpt", {dir: "auto"}, words(excerpt || "empty")));
}

export function rolloutsView(body) {
  const list = h("div"), total = h("div.count", {role: "status"}), reader = h("article.reader"), more = button("more", "More", () => load(true));
  const form = h("form.filters", {onsubmit: (event) => event.preventDefault()}), notes = h("div.notes");
  body.classList.add("rollouts");
  body.append(...(frozen ? [] : [h("details.fold", {open: innerWidth > WIDE}, h("summary", "Filters"), form)]), h("div.list", total, notes, list, more), reader);
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

  // Fill the filters; look again as long as the server reads the newest steps, which may have more sources.
  async function know(run, kind, isFirst) {
    const facets = await get("facets", {run, kind}), asked = here().query.get("source") ?? "";
    if (isFirst) fill(form, facets);
    notes.replaceChildren(...notesOf(facets, isFirst));
    const order = form.querySelector("[name=sort]"), chosen = here().query.get("sort") ?? "";
    if (facets.pairs && order.options.length === SORTS.length) order.append(...options(SORTS_OF_PAIRS));
    if (order !== document.activeElement) order.value = chosen;
    const source = form.querySelector("[name=source]"), known = [...new Set([...facets.sources, asked])].filter((name) => name);
    if (source === document.activeElement) return again(run, kind);
    source.replaceChildren(...options([["", "all"], ...known.map((name) => [name, name])]));
    source.value = asked;
    source.parentElement.hidden = facets.sources.length < 2;
    if (facets.indexed < 1) again(run, kind);
  }

  function again(run, kind) {
    const isShown = () => body.isConnected && kind === (here().query.get("kind") ?? "");
    setTimeout(() => isShown() && know(run, kind, false).catch(() => again(run, kind)), ASK_AGAIN_MS);
  }

  // The rollout to show: the chosen one, or on a wide page the first one.
  const current = () => here().argument ?? (innerWidth > NARROW ? rows[0]?.id : null) ?? null;

  async function update({view, run, argument, query}, live) {
    const filters = JSON.stringify(filtersOf(query));
    body.classList.toggle("reading", view === "rollout");
    const kind = query.get("kind") ?? "";
    if (!frozen && kind !== filled) await know(run, kind, true);
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

  // Go on by one rollout, or to the first one of another group: a prompt's samples of a step.
  async function move(by, isGroup = false) {
    const links = [...list.querySelectorAll(".item")], group = (i) => links[i]?.dataset.group, at = links.findIndex((each) => each.dataset.id === current());
    let next = at + by;
    while (isGroup && at >= 0 && links[next] && group(next) === group(at)) next += by;
    while (isGroup && by < 0 && next > 0 && group(next - 1) === group(next)) next -= 1;
    if (links[next]) replace(links[next].getAttribute("href"));
    else if (next > 0 && cursor) {
      await load(true);
      await move(by, isGroup);
    }
  }

  const sample = (by) => () => {
    const links = [...reader.querySelectorAll(".column:first-child .samples a")];
    links[links.findIndex((each) => each.hasAttribute("aria-current")) + by]?.click();
  };
  const press = (selector) => () => reader.querySelector(selector)?.click();
  return {update, keys: {
    j: () => move(1), k: () => move(-1), J: () => move(1, true), K: () => move(-1, true), ArrowLeft: sample(-1), ArrowRight: sample(1),
    b: press(".beside"), m: press(".raw"), t: press(".through-time"),
  }};
}

// The filters.
function fill(form, {steps, validations}) {
  const change = () => later(() => {
    const values = [...form.querySelectorAll("[name]")].map(({name, value}) => [name, value.trim()]);
    replace(changed(Object.fromEntries(values), {...here(), view: "rollouts", argument: null}));
  });
  const field = (name, label) => h("input", {name, type: "number", step: "any", placeholder: label, "aria-label": name.replace("_", " "), oninput: change});
  const select = (name, label, choices) => h("label", label, h("select", {name, onchange: change}, options(choices)));
  const group = (title, ...fields) => h("fieldset", h("legend", title), fields);

  const range = (title, name) => group(title, h("div.pair", field(`min_${name}`, "from"), field(`max_${name}`, "to")));
  const search = searchBox("text", "Search prompts and answers");
  search.name = "text";
  form.replaceChildren(...[
    search,
    validations.length ? select("kind", "Of", [["", steps?.[2] ? "training" : "validation"], ["validation", "validation"]].slice(steps?.[2] ? 0 : 1)) : null,
    select("sort", "Order", SORTS), select("source", "Source", []),
    range("Reward", "reward"), range("Length, tokens", "length"),
    group(steps?.[2] ? `Step, ${count(steps[0])} to ${count(steps[1])}` : "Step", h("div.pair", field("from_step", "from"), field("to_step", "to"))),
    group("Prompt", field("prompt", "number of the prompt")), button("button", "Clear", () => go(link("rollouts", here().run))),
  ].filter(Boolean));
}

// What a list does not show: files that cannot be read, steps that are not read yet, orders that stop early, steps without rollouts.
function notesOf({indexed, older, problems, written}, isFirst) {
  return [
    ...problems.map((each) => h("p.bad", words(each))),
    indexed < 1 && !isFirst ? h("p.faint", `The newest steps are being read: ${Math.floor(100 * indexed)} %`) : null,
    older ? h("p.faint", `Orders by reward and length have the newest steps, without ${count(older)} older ones. Choose steps to order those.`) : null,
    written?.text ? h("p.faint", words(written.text)) : null,
  ].filter(Boolean);
}

// What a report keeps: the best, the worst, and the prompts whose rewards changed most.
async function examples(list, run) {
  const {rows, examples: found} = await get("rollouts", {run}), row = (id) => rows.find((each) => each.id === id);
  if (!found) list.replaceChildren(h("p.none", "No rollouts have been written yet."));
  else {
    const pairs = found.changed.flatMap(([early, late, before, after]) =>
      [h("h3", `mean reward ${short(before)} → ${short(after)}`), item(row(early), late), item(row(late), early)]);
    const [best, worst] = [found.best, found.worst].map((ids) => ids.map((id) => item(row(id))));
    list.replaceChildren(...(pairs.length ? [h("h2", "Changed most"), ...pairs] : []),
      h("h2", `Best, step ${count(found.step)}`), ...best, h("h2", `Worst, step ${count(found.step)}`), ...worst);
  }
  return {rows, next: null, total: rows.length};
}
