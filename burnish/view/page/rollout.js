// One rollout, and perhaps another one beside it: prompt, answers, rewards, tokens, trace.

import {conversationShown, messagesIn, numbersOf, sharedMessages} from "./conversation.js";
import {frozen, get} from "./data.js";
import {button, copyButton, count, duration, h, num, options, passage, rewardChip, short, words} from "./dom.js";
import {promptShown} from "./messages.js";
import {changed, here, link, replace} from "./place.js";
import {lanes, own} from "./timeline.js";

const FILTERS = ["kind", "text", "source", "from_step", "to_step", "prompt", "min_reward", "max_reward", "min_length", "max_length", "sort"];
// What has a place of its own.
const KNOWN = new Set([
  "id", "kind", "step", "prompt_index", "sample", "prompt", "completion", "answer", "reward", "reward_parts", "reward_error", "advantage", "stop_reason",
  "length", "weights_version", "source", "columns", "tokens", "trace", "error", "end", "metrics", "conversation", "later_versions", "branch",
]), MOST_OF_A_COLUMN = 400;
const NAMES = {logprobs: "log-prob", advantages: "advantage", old_values: "old value"};
const ONE_SIDED = ["logprobs", "entropy"], MOST_TOKENS = 4000, SHARED = 24, STRONGEST = 60;

export const filtersOf = (query) => Object.fromEntries([...query].filter(([name]) => FILTERS.includes(name)));

// The link to a rollout, with the list's filters and the colour of tokens.
export const toRollout = (row, beside = null) => link("rollout", here().run, row.id, {...filtersOf(here().query), colour: here().query.get("colour"), raw: here().query.get("raw"), beside});

// Of an answer of a pair: by how much the chosen one has the higher reward, and which of them it is. Of a single answer: how far it is on its label's side.
export const marginOf = ({margin, reward_parts}) => margin ?? reward_parts?.margin ?? null;
const labelOf = ({label, reward_parts}) => label ?? reward_parts?.label ?? null;
export const sideOf = (row) => (marginOf(row) === null || row.sample > 1 ? null : labelOf(row) === null ? ["chosen", "rejected"][row.sample] : labelOf(row) > 0 ? "desirable" : "undesirable");

export const answerOf = ({answer}) => (answer === null || answer === undefined ? "" : h("p.answer", h("span.soft", "Answer "), words(answer)));

// What else the row of the data has, and what another program has written beside.
function columnsOf(row) {
  const others = Object.entries({...row.columns, ...Object.fromEntries(Object.entries(row).filter(([name]) => !KNOWN.has(name)))}).filter(([, value]) => value !== null);
  const shown = (value) => words(typeof value === "string" ? value : JSON.stringify(value), MOST_OF_A_COLUMN);
  return others.length ? h("dl.row-columns", others.map(([name, value]) => h("div", h("dt", words(name)), h("dd", {dir: "auto"}, shown(value))))) : "";
}

// The elements of the rollout `id`, and of the rollout beside it that `query` names.
export async function readRollout(run, id, query) {
  let [row, other] = await Promise.all([id, query.get("beside")].map((each) => each && get("rollout", {run, id: each})));
  const {rows} = await get("rollouts", {run, kind: row.kind, step: row.step, prompt: row.prompt_index, limit: 200});
  const siblings = rows.sort((a, b) => a.sample - b.sample || (a.branch ?? 0) - (b.branch ?? 0)), next = siblings.find((each) => each.sample !== row.sample) ?? siblings.find((each) => each.id !== id);
  const isPair = sideOf(row) !== null && siblings.length === 2;
  if (isPair) [row, other] = await Promise.all(siblings.map((each) => get("rollout", {run, id: each.id})));
  const colour = query.get("colour"), arrays = arraysOf({...row.tokens, ...other?.tokens});
  const wanted = arrays.find((name) => colour && name.startsWith(colour)) ?? "";
  const choice = h("select", {onchange: () => replace(changed({colour: choice.value}))}, options([["", "nothing"], ...arrays.map((name) => [name, titleOf(name)])]));
  choice.value = wanted;
  const sizes = [row, other].flatMap((each) => each?.tokens?.[wanted] ?? []).map((value) => Math.abs(num(value))).filter(Number.isFinite).sort((a, b) => a - b);
  const most = sizes[Math.floor(0.98 * sizes.length)] || sizes.at(-1) || 1;
  let shared = 0;
  const isTalk = messagesIn(row).length > 0;
  while (!isTalk && other && shared < row.completion.length && row.completion[shared] === other.completion[shared]) shared += 1;
  if (isTalk) shared = sharedMessages(row, other);
  const isValidation = row.kind === "validation", prompt = `prompt ${row.prompt_index}`;
  return [
    h("div.head",
      h("a.back", {href: link("rollouts", run, null, filtersOf(query))}, "‹ List"),
      h("h1", `${isValidation ? "Validation at step" : "Step"} ${count(row.step)}`),
      frozen ? h("span.soft", prompt) : h("a.link.through-time", {href: link("prompt", run, row.prompt_index, {kind: isValidation && row.kind, sample: row.sample, raw: query.get("raw")}), title: "What it said at each step (t)"}, `${prompt} through time`),
      row.source ? h("span.soft", words(row.source)) : null, h("span.space"),
      arrays.length ? h("label", "Colour tokens by ", choice) : null,
      isPair ? h("span", h("span.soft", "margin "), short(marginOf(row))) : other || next ? h("a.button.beside", {href: toRollout(row, other ? null : next.id), title: "b"}, other ? "One only" : "Side by side") : null),
    promptShown(row.prompt), answerOf(row), columnsOf(row),
    h(`div.columns${other ? ".two" : ""}`,
      column(row, siblings, (sibling) => toRollout(sibling, other?.id), {wanted, most, shared}),
      other ? column(other, siblings, (sibling) => toRollout(row, sibling.id), {wanted, most, shared}) : null)];
}

const arraysOf = (tokens) => Object.keys(tokens).filter((name) => name !== "texts" && name !== "by_model");
const titleOf = (name) => NAMES[name] ?? name.replace(/_/g, " ").replace(/s$/, "");

function column(row, siblings, to, {wanted, most, shared}) {
  const talk = messagesIn(row), isRaw = here().query.get("raw") === "1";
  const sample = (each) => h("a", {"aria-current": each.id === row.id && "true", href: to(each), title: `sample ${each.sample}${each.branch ? `, branch ${each.branch}: other token ids of the same conversation` : ""}`}, rewardChip(each.reward));
  const facts = [
    sideOf(row) ? ["", sideOf(row)] : ["sample", row.sample], ["branch", row.branch], ["turns", talk.length ? count(talk.filter(({role}) => role === "assistant").length) : null], ["tokens", row.length && count(row.length)], ["ended by", talk.length ? null : row.stop_reason],
    ["advantage", row.advantage === undefined || row.advantage === null ? null : short(row.advantage)], ["weights", row.weights_version],
  ].filter(([, value]) => value !== null && value !== undefined);
  const parts = Object.entries(row.reward_parts ?? {}).map(([name, value]) => h("div", h("dt", words(name)), h("dd", rewardChip(value))));
  const numbers = numbersOf(row).map(([name, value]) => h("div", h("dt", words(name)), h("dd", value)));
  return h("section.column",
    siblings.length > 1 ? h("nav.samples", {"aria-label": "Samples of this prompt"}, siblings.map(sample)) : null,
    h("div.facts", rewardChip(row.reward), facts.map(([name, value]) => h("span", h("span.soft", `${name} `), value)),
      copyButton(() => row.completion, "Copy the completion"), frozen ? null : copyButton(() => new URL(toRollout(row), location).href, "Copy the link to this rollout", "Link")),
    h("dl.parts", parts, numbers),
    row.reward_error ? h("div.notice", h("strong", row.end === "failed" ? "The environment failed" : "A reward function failed"), h("div.mono", words(row.reward_error))) : null,
    row.tokens?.[wanted] ? tokens(row.tokens, wanted, most, talk) : talk.length && !isRaw ? conversationShown(row, shared) : completion(row.completion, talk.length ? 0 : shared),
    sideOf(row) ? null : trace(row.trace));
}

// A completion; its beginning is grey if the completion beside it begins in the same way.
function completion(text, shared) {
  if (shared < SHARED) return passage(text);
  return h("div.text", {dir: "auto"}, h("span.shared", {title: "The same in both"}, words(text.slice(0, shared))), words(text.slice(shared)));
}

// Tokens, each on a colour as strong as its number is large relative to `most`; those of an environment have none. Shows the number under the pointer.
function tokens(all, wanted, most, talk) {
  const arrays = arraysOf(all), isHeard = (i) => all.by_model?.[i] === false, values = all[wanted].map(num);
  const signed = !ONE_SIDED.includes(wanted), far = wanted === "logprobs" ? `−${short(most)}` : short(most);
  const told = h("output", "Point at a token.");
  const tell = ({target: {dataset: {i}}}) => {
    if (i === undefined) return;
    const numbers = isHeard(i) ? [h("span.soft", "the environment's, not trained on")] : arrays.map((each) => h("span", h("span.soft", `${titleOf(each)} `), short(all[each][i])));
    told.replaceChildren(h("span.soft", count(Number(i) + 1)), h("q", words(all.texts[i])), ...numbers);
  };
  // Where earlier turns stand in other branches, the last ones of the conversation are here.
  const own = all.by_model?.filter((isSaid, i) => isSaid && !all.by_model[i - 1]).length ?? 0;
  let turns = Math.max(0, talk.filter(({role}) => role === "assistant").length - own);
  const mark = (i) => all.by_model && (i === 0 || isHeard(i) !== isHeard(i - 1)) && h("span.mark", isHeard(i) ? "environment" : `turn ${(turns += 1)}`);
  const token = (text, i) => {
    const value = values[i], share = Math.round(STRONGEST * Math.min(1, Math.abs(value) / most)) || 0;
    const kind = isHeard(i) ? "heard" : !Number.isFinite(value) ? "broken" : !signed ? "size" : value > 0 ? "plus" : "minus";
    return [mark(i), h(`span.${kind}`, {"data-i": i, style: {"--share": `${share}%`}}, words(text))].filter(Boolean);
  };
  const box = h("div.text.tokens", {dir: "auto", onpointerover: tell}, all.texts.slice(0, MOST_TOKENS).map(token));
  const more = button("more", `Show ${count(all.texts.length - MOST_TOKENS)} more tokens`, () => {
    more.remove();
    box.append(...all.texts.slice(MOST_TOKENS).flatMap((text, i) => token(text, MOST_TOKENS + i)));
  }, {hidden: all.texts.length <= MOST_TOKENS});
  return h("div", h("div.told", h(`div.scale${signed ? ".signed" : ""}`, signed ? `−${far}` : "0", h("i"), far), all.by_model ? h("span.tokens", h("span.heard", "not trained on")) : null, told), box, more);
}

// Spans below the environment's, such as of tools that ran at the same time, each in a row where it covers no other.
function apart(spans) {
  const ends = [];
  return spans.map((span) => {
    const {start, seconds, depth = 0} = span;
    let row = depth;
    while (depth > 1 && ends[row] > start) row += 1;
    ends[row] = start + seconds;
    return {...span, depth: row};
  });
}

function trace(found) {
  if (found?.problem) return h("p.none", words(found.problem));
  if (!found?.spans?.length) return null;
  const details = h("dl.attributes"), shown = (value) => words(typeof value === "string" ? value : JSON.stringify(value));
  const fact = ([name, value]) => h("div", h("dt", words(name)), h("dd", shown(value)));
  const tell = ({name, error, attributes = {}}) => details.replaceChildren(...Object.entries({span: name, ...(error && {error}), ...attributes}).map(fact));
  // A span may be too short to be seen, so buttons list all spans.
  const calls = h("div.facts", found.spans.map((span) => button("button", [words(own(span.name)), ` ${duration(span.seconds)}`], () => tell(span))));
  return h("details.trace", {open: true}, h("summary", "Trace"), lanes([{spans: apart(found.spans)}], tell), calls, details);
}
