// A conversation as one: turns of the model with their calls, what the environment answered, rewards and seconds.

import {count, duration, h, rewardChip, short, words} from "./dom.js";

const MOST_OF_A_TEXT = 4000, MOST_OF_ARGUMENTS = 1000;
const ENDS = {
  done: "the environment", length: "the limit of tokens", turns: "the limit of turns", calls: "the limit of calls",
  unreadable: "calls that cannot be read", failed: "a failure of the environment",
};
// Calls as templates write them: Hermes, Qwen and GLM, Mistral, Llama, DeepSeek, Kimi.
const CALLS = /<tool_call>[^]*?(?:<\/tool_call>|$)|\[TOOL_CALLS\][^]*$|<\|python_tag\|>[^]*$|<｜tool▁calls▁begin｜>[^]*$|<\|tool_calls_section_begin\|>[^]*$/g;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (value) => (Array.isArray(value) ? value : []);
const textOf = (content) => (typeof content === "string" ? content : content === undefined || content === null ? "" : JSON.stringify(content));

// The messages of a conversation; none if the row is no conversation.
export const messagesIn = ({conversation}) => listOf(conversation).filter(isObject);

// Why it ended, and whether that was a limit or a failure.
export function endOf({end, stop_reason: reason}) {
  if (typeof end !== "string") return {text: reason, isWarning: false};
  return {text: Object.hasOwn(ENDS, end) ? ENDS[end] : end.replace(/_/g, " "), isWarning: end !== "done"};
}

// What was heard before the first turn, and each turn of the model with what followed.
function turnsOf(messages) {
  const opening = [], turns = [];
  for (const message of messages) {
    if (message.role === "assistant") turns.push({said: message, heard: []});
    else (turns.at(-1)?.heard ?? opening).push(message);
  }
  return {opening, turns};
}

// Seconds by turn, from the spans of a trace: of the model, the environment and each tool.
function timesOf(trace) {
  const times = new Map();
  for (const {name, seconds, attributes = {}} of listOf(trace?.spans)) {
    const turn = attributes["burnish.turn"], kind = name.split(" ")[0];
    if (turn === undefined) continue;
    const of = times.get(turn) ?? times.set(turn, {tools: []}).get(turn);
    if (kind === "execute_tool") of.tools.push(seconds);
    else {
      const who = kind === "environment" ? "environment" : "model";  // the environment may be asked again for the score
      of[who] = (of[who] ?? 0) + seconds;
    }
  }
  return times;
}

const spent = (label, seconds) => (seconds === undefined ? null : h("span", `${label} ${duration(seconds)}`));

function callShown({name, arguments: given}) {
  const pairs = isObject(given) ? Object.entries(given) : [["", given]];
  const argument = ([key, value], i) => [i ? ", " : "", key ? h("span.soft", words(key), ": ") : "", words(JSON.stringify(value) ?? "", MOST_OF_ARGUMENTS)];
  return h("div.call", {dir: "ltr"}, h("b", words(name)), "(", pairs.map(argument), ")");
}

function replyShown(message, seconds) {
  const {role, name, content, unseen, is_error: isError} = message;
  return h(`div.reply${isError ? ".failed" : ""}${unseen ? ".unseen" : ""}`,
    h("div.role", words(role), name ? [" ", words(name)] : null, seconds === undefined ? null : ` · ${duration(seconds)}`, isError ? h("span.bad", " · failed") : null,
      unseen ? h("span", {title: "The conversation had ended"}, " · the model did not see this") : null),
    h("div.bubble", {dir: "auto"}, words(textOf(content) || "empty", MOST_OF_A_TEXT)));
}

// A turn: what the model said, each call with its answer, and what else the environment said.
function turnShown({said, heard}, number, {model, environment, tools = []} = {}, isShared = false) {
  const calls = listOf(said.calls).filter(isObject), rewards = isObject(said.rewards) ? Object.entries(said.rewards) : [];
  const text = calls.length ? textOf(said.content).replace(CALLS, "").trim() : textOf(said.content);
  const answers = heard.filter(({role}) => role === "tool").slice(0, calls.length), others = heard.filter((message) => !answers.includes(message));
  return h(`section.turn${isShared ? ".same" : ""}`, {title: isShared && "The same in both"},
    h("div.turn-head", h("span.role", `Turn ${number + 1}`), h("span.spent", said.tokens === undefined ? null : h("span", `${count(said.tokens)} tokens`), spent("model", model), spent("environment", environment)),
      h("span.earned", rewards.map(([name, value]) => h("span", h("span.soft", words(name), " "), rewardChip(value))))),
    text || !calls.length ? h("div.bubble.said", {dir: "auto"}, text ? words(text, MOST_OF_A_TEXT) : h("span.faint", "empty")) : null,
    calls.map((call, i) => [callShown(call), answers[i] ? replyShown(answers[i], tools[i]) : null]),
    said.problem && !heard.some(({content}) => textOf(content).includes(said.problem)) ? h("div.reply.failed", h("div.role", "a call cannot be read"), h("div.bubble", {dir: "auto"}, words(said.problem, MOST_OF_A_TEXT))) : null,
    others.map((message) => replyShown(message)));
}

// How many messages two conversations have in common at their beginnings.
export function sharedMessages(row, other) {
  const [ours, theirs] = [row, other ?? {}].map((each) => messagesIn(each).map((message) => JSON.stringify([message.role, message.content])));
  const first = ours.findIndex((message, i) => message !== theirs[i]);
  return first < 0 ? ours.length : first;
}

// The conversation of a row, after its prompt. `shared` messages are the same in the one beside it.
export function conversationShown(row, shared) {
  const messages = messagesIn(row), {opening, turns} = turnsOf(messages), times = timesOf(row.trace);
  const own = opening.filter(({content}) => !textOf(row.prompt).includes(textOf(content))), {text, isWarning} = endOf(row);
  const isSame = ({said, heard}) => [said, ...heard].every((message) => messages.indexOf(message) < shared);
  return h("div.conversation",
    own.map((message) => replyShown(message)),
    turns.map((turn, i) => turnShown(turn, i, times.get(i), isSame(turn))),
    h(`p.end${isWarning ? ".warn" : ".soft"}`, "Ended by ", words(text)));
}

// Numbers that the environment reported of the conversation, without those that are shown elsewhere.
export function numbersOf({metrics}) {
  const known = ["turns", "calls", "failed_calls", "calling_turns"];
  return Object.entries(metrics ?? {}).filter(([name]) => !known.includes(name)).map(([name, value]) => [name, short(value)]);
}
