// The log: why the run failed first, then the entries, with filters by level and text.

import {get} from "./data.js";
import {button, count, h, options, problem, searchBox, words} from "./dom.js";
import {changed, go, here} from "./place.js";

const LEVELS = [["", "all levels"], ["info", "info and above"], ["warning", "warnings and errors"], ["error", "errors only"]];
const MOST_OF_A_LINE = 2000, AT_END = 60, AT_ONCE = 500, FOLDED_LINES = 6;

export function logView(body) {
  const choice = (name, label) => h("select", {name, "aria-label": label, onchange: ({target}) => go(changed({[name]: target.value}))});
  const rank = choice("rank", "Rank"), level = choice("level", "Level"), search = searchBox("q", "Search the log");
  const failure = h("div"), older = button("more", "Older lines", () => load(true)), lines = h("div.log.whole", {tabindex: 0});
  level.append(...options(LEVELS));
  body.append(h("div.head", h("h1", "Log")), failure, h("div.toolbar", rank, level, search), older, lines);
  let all = [], before = null, asked = null;

  async function load(further = false) {
    const {run, query} = here(), wanted = {level: query.get("level"), text: query.get("q"), rank: query.get("rank") ?? 0};
    const answer = await get("log", {run, ...wanted, lines: AT_ONCE, before: further ? before : null});
    all = further ? [...answer.entries, ...all] : answer.entries;
    ({before} = answer);
    if (!all.length && before !== null) return load(true);  // a search takes a second, and goes on
    if (!further) failure.replaceChildren(answer.reason ? whyFailed(answer) : "");
    rank.replaceChildren(...options(answer.ranks.map((each) => [each, `rank ${each}`])));
    rank.hidden = answer.ranks.length < 2;
    older.hidden = before === null;
    const isFiltered = Boolean(wanted.level || wanted.text);
    lines.replaceChildren(...(all.length ? withDays(all) : [h("p.none", isFiltered ? "No line matches." : "The log is empty.")]));
    rank.value = wanted.rank;
    level.value = wanted.level ?? "";
  }

  async function update({query}, live) {
    const key = JSON.stringify(["rank", "level", "q"].map((name) => query.get(name)));
    const atEnd = lines.scrollTop + lines.clientHeight > lines.scrollHeight - AT_END;
    search.follow(query);
    if (live ? !atEnd : key === asked) return;
    await load();
    lines.scrollTop = lines.scrollHeight;
    asked = key;
  }
  return {update};
}

// Why a run failed, as its first lines say, with the folded traceback.
function whyFailed({reason, failure}) {
  const notice = problem({...reason, message: reason.problem}), where = reason.step === null ? "before the first step" : `in step ${count(reason.step)}`;
  notice.prepend(h("div.where", `The run failed ${where}.`));
  if (failure) notice.append(h("details", h("summary", /Traceback/.test(failure.more) ? "Traceback" : "Stacks"), h("div.traceback", words(`${failure.text}\n${failure.more}`))));
  return notice;
}

// Entries, with a line before each day's first one.
function withDays(entries) {
  let day = "";
  return entries.flatMap((entry) => {
    const isNew = entry.time && entry.time.slice(0, 10) !== day;
    if (isNew) day = entry.time.slice(0, 10);
    return [isNew ? h("div.day", day) : null, lineOf(entry)].filter(Boolean);
  });
}

// An entry: time, level, place and text. A traceback is folded below its last line, which names the error.
function lineOf({time, level, step, phase, logger, text, more}) {
  const place = [step === null ? "" : `step ${step}`, phase].filter(Boolean).join(" "), further = more.split("\n"), isLong = further.length > FOLDED_LINES;
  const last = isLong ? further.filter((each) => /^\S/.test(each)).at(-1) ?? further.at(-1) : more;
  const row = [
    h("span.time", {title: time}, time.slice(11, 19)), h("span.level", level), h("span.place", place),
    h("span.said", logger && logger !== "burnish" ? h("span.soft", `${logger}: `) : null, words(text, MOST_OF_A_LINE), more ? h(isLong ? "span.last" : "span.further", words(last, MOST_OF_A_LINE)) : null)];
  const kind = {class: ["entry", level].join(" ")};
  return isLong ? h("details", kind, h("summary", row), h("div.traceback", words(more))) : h("div", kind, row);
}
