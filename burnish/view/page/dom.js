// Elements, numbers and texts. Data become text nodes only: nothing in this page parses HTML.

import {changed, replace} from "./place.js";

// Make an element: h("span.chip", {title, onclick, style: {…}}, children…); attributes are optional. Children and attributes that are null, undefined or false are skipped.
export function h(kind, ...rest) {
  const [tag, ...classes] = kind.split("."), node = document.createElement(tag);
  const [attributes, children] = rest[0]?.constructor === Object ? [rest[0], rest.slice(1)] : [{}, rest];
  if (classes.length) node.className = classes.join(" ");
  const there = (value) => value !== null && value !== undefined && value !== false;
  for (const [name, value] of Object.entries(attributes).filter(([, value]) => there(value))) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(there));
  return node;
}

export const button = (kind, text, onclick, more = {}) => h(`button.${kind}`, {type: "button", onclick, ...more}, text);
export const options = (pairs) => pairs.map(([value, title]) => h("option", {value}, title));

// A button that copies what `text()` gives.
export function copyButton(text, label = "Copy", shown = "Copy") {
  const made = button("copy", shown, async () => {
    made.textContent = (await copied(await text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = shown), 1500);
  }, {"aria-label": label, title: label});
  return made;
}

// Put a text on the clipboard. A page that is not served from this machine or by https has no clipboard, but may copy a selection.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = document.body.appendChild(h("textarea.off-screen"));
  field.value = text;
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

// A table with heads [[title, class]…]. Cells that are arrays or texts get the class of their column.
export function table(kind, heads, rows) {
  const head = heads.length ? h("thead", h("tr", heads.map(([title, column]) => h("th", {class: column}, title)))) : null;
  return h("div.table", h(`table.${kind}`, head, h("tbody", rows)));
}
export const cells = (heads, values) => values.map((value, i) => h("td", {class: heads[i]?.[1]}, value));

// A field whose text is the parameter `name` of the link.
export function searchBox(name, label) {
  const typed = () => later(() => replace(changed({[name]: box.value})));
  const box = h("input", {type: "search", placeholder: label, "aria-label": label, "data-search": true, oninput: typed});
  box.follow = (query) => document.activeElement !== box && (box.value = query.get(name) ?? "");
  return box;
}

let waiting = 0;
// Run `action` once typing has paused.
export function later(action) {
  clearTimeout(waiting);
  waiting = setTimeout(action, 250);
}

// Numbers that JSON cannot hold come as "NaN", "Infinity" or "-Infinity".
export function num(value) {
  if (typeof value !== "string") return value ?? null;
  return /nan/i.test(value) ? NaN : value.startsWith("-") ? -Infinity : Infinity;
}

const clean = (text) => text.replace(/-/g, "−").replace("e+", "e");

// Three digits, or as many as are asked for, or whole thousands: 0.123, 12,346, 1.2M, 1e−6.
export function short(value, digits = 3) {
  const x = num(value), size = Math.abs(x);
  if (x === null) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x < 0 ? "−inf" : "inf";
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"]]) if (size >= unit) return clean((x / unit).toPrecision(digits)) + letter;
  if (size >= 1000) return clean(Math.round(x).toLocaleString("en"));
  const rounded = Number(x.toPrecision(digits));
  return clean(size && size < 1e-3 ? rounded.toExponential() : String(rounded));
}

// Equally many decimals for every value, so that columns align.
export function fixed(value, digits = 3) {
  const x = num(value);
  return x === null || !Number.isFinite(x) || Math.abs(x) >= 1e5 ? short(x) : clean(x.toFixed(digits));
}

export const count = (n) => (typeof n === "number" ? n.toLocaleString("en") : "–");
export const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
export const bytes = (n) => (n >= 1e9 ? `${short(n / 1e9)} GB` : n >= 1e6 ? `${short(n / 1e6)} MB` : `${short(n / 1e3)} kB`);
export const date = (iso) => (iso ? iso.slice(0, 16).replace("T", " ") : "–");
export const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

export function duration(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]], i = units.findIndex(([size]) => seconds >= size);
  if (i < 0 || i === 3) return i < 0 ? `${short(1e3 * seconds)} ms` : `${short(seconds)} s`;
  const [[size, unit], [next, lesser]] = [units[i], units[i + 1]], rest = Math.floor((seconds % size) / next);
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${lesser}` : ""}`;
}

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${duration(Math.round(seconds)).split(" ").slice(0, 2).join(" ")} ago`;
}

// Show invisible characters, and characters that reorder others, by their codes.
const HIDDEN = /(?:(?![\n\t\u200c\u200d])[\p{Cs}\p{Cc}\p{Cf}\p{Zl}\p{Zp}])+/gu, LIMIT = 20000, CODES = 8, MOST_OF_A_VALUE = 400;
const code = (character) => {
  const hex = character.codePointAt(0).toString(16);
  return hex.length < 3 ? `\\x${hex.padStart(2, "0")}` : `U+${hex.toUpperCase().padStart(4, "0")}`;
};

// A text as nodes, cut after `limit` characters with a button for the rest.
export function words(text, limit = LIMIT) {
  const whole = String(text ?? ""), nodes = [];
  let end = Math.min(whole.length, limit), last = 0;
  if (end < whole.length && /[\ud800-\udbff]/.test(whole[end - 1])) end += 1;
  for (const match of whole.slice(0, end).matchAll(HIDDEN)) {
    const all = [...match[0]], codes = all.slice(0, CODES).map(code).join(" ");
    nodes.push(whole.slice(last, match.index), h("span.hidden", all.length > CODES ? `${codes} … ${count(all.length)} characters` : codes));
    last = match.index + match[0].length;
  }
  nodes.push(whole.slice(last, end));
  if (end === whole.length) return nodes;
  const more = button("more", `Show ${count(whole.length - end)} more characters`, () => more.replaceWith(...words(whole.slice(end), Infinity)));
  return [...nodes, more];
}

// A text as a model reads or writes it.
export const passage = (text, kind = "") => h(`div.text${kind}`, {dir: "auto"}, text ? words(text) : h("span.faint", "empty"));

// A reward: the greener the more above 0, grey at 0, red below 0 or if it is no number.
export function rewardChip(value) {
  const x = num(value), strength = `${Math.round(100 * Math.max(0.3, Math.min(1, Math.abs(x))))}%`;
  return h(`span.reward.${x > 0 ? "high" : !x && !Number.isNaN(x) ? "zero" : "low"}`, {style: {"--strength": strength}}, Number.isInteger(x) && Math.abs(x) < 1e5 ? clean(String(x)) : fixed(x));
}

// A setting's value; small numbers in scientific notation.
export function settingValue(value) {
  if (value === null || value === undefined) return h("span.faint", "null");
  if (typeof value === "number" && value && Math.abs(value) < 1e-3) return value.toExponential();
  return words(typeof value === "string" ? value : JSON.stringify(value), MOST_OF_A_VALUE);
}

// A problem as the server reports it.
export function problem(error) {
  const facts = ["have", "want", "do"].filter((name) => error[name]).map((name) => h("div", h("b", name), words(error[name])));
  return h("div.notice", {role: "alert"}, h("strong", words(error.message)), facts);
}
