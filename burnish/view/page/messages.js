// A prompt as the messages that its chat template wrote.

import {button, h, passage, words} from "./dom.js";
import {changed, here, replace} from "./place.js";

// What begins a message, with its role, and what ends it: ChatML, Llama 3, Gemma, Phi and Zephyr, DeepSeek.
const TEMPLATES = [
  [/<\|im_start\|>(\w+)\n/g, /<\|im_end\|>\s*$/], [/<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*/g, /<\|eot_id\|>\s*$/],
  [/<start_of_turn>(\w+)\n/g, /<end_of_turn>\s*$/], [/<\|(system|user|assistant)\|>\s*/g, /(<\|end\|>|<\/s>)\s*$/],
  [/<｜(User|Assistant)｜>/g, /<｜end▁of▁sentence｜>\s*$/],
];
// Special tokens at the beginning, which are no message.
const BEGINNINGS = /^(<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|\s)+/;

// The messages [{role, text}…] of a prompt; none if no known template wrote it.
export function messagesOf(prompt) {
  for (const [begin, end] of TEMPLATES) {
    const found = [...prompt.matchAll(begin)];
    const texts = found.map((match, i) => prompt.slice(match.index + match[0].length, found[i + 1]?.index ?? prompt.length).replace(end, ""));
    const before = prompt.slice(0, found[0]?.index).replace(BEGINNINGS, "");  // of DeepSeek, the system's message
    if (found.length) return [{role: "system", text: before}, ...found.map((match, i) => ({role: match[1].toLowerCase(), text: texts[i]}))].filter(({text}) => text.trim());
  }
  return [];
}

// A prompt as messages, or as the model reads it, with a switch.
export function promptShown(prompt) {
  const messages = messagesOf(String(prompt ?? "")), raw = here().query.get("raw") === "1";
  if (!messages.length) return passage(prompt, ".prompt");
  const turn = button("toggle.raw", "Raw", () => replace(changed({raw: raw ? null : "1"})), {"aria-pressed": String(raw), title: "The prompt as the model reads it"});
  const bubble = ({role, text}) => h("div.message", {"data-role": role}, h("span.role", words(role)), h("div.bubble", {dir: "auto"}, words(text)));
  return h("div.prompt-shown", turn, raw ? passage(prompt, ".prompt") : h("div.messages", messages.map(bubble)));
}
