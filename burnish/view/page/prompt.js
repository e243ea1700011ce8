// One prompt through time: what one of its samples said at each step, and which words changed from step to step.

import {changesOf} from "./changes.js";
import {get} from "./data.js";
import {button, count, h, num, options, passage, plural, rewardChip, short, words} from "./dom.js";
import {promptShown} from "./messages.js";
import {changed, here, link, replace} from "./place.js";
import {draw} from "./plot.js";
import {answerOf, toRollout} from "./rollout.js";

const STEPS_AT_ONCE = 20, NEAR_TOP = 200;

export function promptView(body) {
  const head = h("div.head"), prompt = h("div"), host = h("div.plot"), now = h("span.now"), where = h("span.at"), steps = h("div.by-step");
  const chart = h("figure.chart", h("figcaption", h("span.caption", "Mean reward"), where, now), host), more = button("more", "Earlier steps", async () => {
    await load(here());
    render(here());
  });
  const choice = h("select", {onchange: () => replace(changed({sample: choice.value}))}), legend = h("span.soft", h("ins", "new words"), " ", h("del", "gone words"));
  const marks = button("toggle", "Mark changes", () => replace(changed({plain: here().query.get("plain") ? null : 1})));
  body.append(head, prompt, chart, h("div.toolbar", h("label", "Show ", choice), marks, legend), steps, more);
  let found = null, groups = [], key = null;

  async function load({run, argument, query}) {
    found = await get("prompt", {run, kind: query.get("kind"), prompt: argument, limit: STEPS_AT_ONCE, cursor: found?.next});
    groups = [...groups, ...found.steps];
    if (!groups.length && found.next !== null) await load({run, argument, query});
  }

  function render({run, argument, query}) {
    const samples = [...new Set(groups.flatMap((group) => group.samples.map(({sample}) => sample ?? 0)))].sort((a, b) => a - b);
    const wanted = query.get("sample") ?? "", isMarked = !query.get("plain"), numbered = samples.map((each) => [String(each), `sample ${each}`]);
    choice.replaceChildren(...options([["best", "the best sample"], ["worst", "the worst sample"], ...numbered]));
    choice.value = wanted || numbered[0]?.[0];
    marks.setAttribute("aria-pressed", String(isMarked));
    legend.hidden = !isMarked;
    more.hidden = found.next === null;
    chart.hidden = groups.length < 2;
    if (groups.length > 1) plotted([...groups].reverse());
    const shown = groups.map((group) => chosen(group.samples, choice.value)), list = {prompt: argument, kind: query.get("kind")};
    head.replaceChildren(h("h1", `Prompt ${argument}`), h("span.soft", groups.length ? `at ${plural(Math.max(found.total, groups.length), "step")}` : "No completion of it was kept."), h("a.link", {href: link("rollouts", run, null, list)}, "All its rollouts"));
    steps.replaceChildren(...groups.map((group, i) => section(group, shown[i], isMarked ? shown[i + 1] : null)));
    if (groups.length === 1 && found.next === null) steps.append(h("p.none", "It was drawn at one step. A later epoch draws it again; each validation draws its prompts."));
  }

  function plotted(rising) {
    const line = {colour: 0, calm: true, steps: rising.map(({step}) => step), values: rising.map(({mean: each}) => num(each) ?? NaN)};
    draw(host, [line], {}, ([value], step) => {
      now.textContent = short(value);
      where.textContent = step === null ? "" : `step ${count(step)}`;
    });
  }

  async function update(place, live) {
    const wanted = JSON.stringify([place.argument, place.query.get("kind")]);
    if (live && scrollY > NEAR_TOP) return;  // what one reads does not move
    if (live || wanted !== key) {
      [found, groups, key] = [null, [], wanted];
      await load(place);
    }
    prompt.replaceChildren(...(groups.length ? [promptShown(found.prompt), answerOf(found)] : []));
    render(place);
  }

  const turn = (by) => () => {
    const next = choice.options[choice.selectedIndex + by];
    if (next) replace(changed({sample: next.value}));
  };
  const raw = () => replace(changed({raw: here().query.get("raw") ? null : 1}));
  return {update, keys: {ArrowLeft: turn(-1), ArrowRight: turn(1), m: raw}};
}

// The sample to show: the best, the worst, or that of a number, else the first one.
function chosen(samples, wanted) {
  const value = ({reward}) => (Number.isNaN(num(reward)) ? -Infinity : num(reward)), sorted = [...samples].sort((a, b) => value(b) - value(a));
  if (wanted === "best" || wanted === "worst") return sorted.at(wanted === "best" ? 0 : -1);
  return samples.find(({sample}) => String(sample ?? 0) === wanted) ?? samples[0];
}

// A step: the chosen sample, with what changed since the earlier one, and links to all samples.
function section({step, mean: reward, samples}, sample, earlier) {
  const chip = (each) => h("a", {href: toRollout(each), "aria-current": each.id === sample.id && "true", title: `sample ${each.sample ?? 0}`}, rewardChip(each.reward));
  const text = earlier ? h("div.text", {dir: "auto"}, changesOf(earlier.completion, sample.completion).map(([kind, part]) => (kind ? h(kind, words(part)) : words(part)))) : passage(sample.completion);
  const facts = [`sample ${sample.sample ?? 0}`, `${count(sample.length)} tokens`, sample.stop_reason === "length" ? h("span.warn", "cut off") : null];
  return h("section",
    h("h2", `Step ${count(step)}`, h("span.soft", `mean ${short(reward)}`)),
    h("div",
      h("div.facts", rewardChip(sample.reward), facts.filter(Boolean).map((fact) => h("span", fact)), h("a.link", {href: toRollout(sample), "data-row": true}, "Open")),
      text, sample.cut ? h("p.soft", "The rest is in the rollout.") : null,
      samples.length > 1 ? h("nav.samples", {"aria-label": `Samples of step ${step}`}, samples.map(chip)) : null));
}
