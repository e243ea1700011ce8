// One chart: lines over steps, with bands or averages, drawn by uPlot.

import {AXIS_TICKS} from "./axis.js";
import {h, mean, num, short} from "./dom.js";

const SECONDS_APART = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 432000, 864000];
const FEW = 24, INCREMENTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));

// A colour of the theme as a canvas needs it.
function colour(name, alpha = 1) {
  const probe = document.body.appendChild(h("i", {style: {color: `var(--${name})`}})), [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
  probe.remove();
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}

// A line of an answer: {label, colour, steps, values, low, high}, with a band only where buckets have a width. `place` puts a step on the axis.
export function line(label, series, colour_ = 0, place = (step) => step) {
  const [values, low, high] = ["values", "low", "high"].map((name) => (series[name] ?? series.values).map(num));
  const wide = low.some((value, i) => high[i] > value);
  return {label, colour: colour_ % 8, steps: series.steps.map(place), values, low: wide && low, high: wide && high};
}

// Averages over about a 15th of the values, without lag: Σ β^|t−i| v_i / Σ β^|t−i|, of finite values.
export function smooth(values) {
  const beta = 1 - 2 / (Math.min(Math.max(values.length / 15, 1), 100) + 1), there = values.map(Number.isFinite);
  const totals = new Float64Array(values.length), weights = new Float64Array(values.length);
  const pass = (first, by, own) => {
    for (let i = first, total = 0, weight = 0; i >= 0 && i < values.length; i += by) {
      totals[i] += beta * total + (own && there[i] ? values[i] : 0);
      weights[i] += beta * weight + (own && there[i] ? 1 : 0);
      total = beta * total + (there[i] ? values[i] : 0);
      weight = beta * weight + (there[i] ? 1 : 0);
    }
  };
  pass(0, 1, true);
  pass(values.length - 1, -1, false);
  return values.map((_, i) => (weights[i] > 1e-9 ? totals[i] / weights[i] : null));
}

// Whether a line goes up and down so often that its averages are more readable; a schedule does not.
function noisy(values) {
  const there = values.filter(Number.isFinite), travelled = there.reduce((sum, value, i) => sum + Math.abs(value - (there[i - 1] ?? value)), 0);
  return there.length > FEW && travelled > 2.5 * (Math.max(...there) - Math.min(...there));
}

// The value nearest to a step.
function at({steps, values}, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return values[low && step - steps[low - 1] < steps[low] - step ? low - 1 : low];
}

// The mean, minimum and maximum of lines at all their steps; of their averages if `smoothed`.
export function together(lines, smoothed) {
  const steps = [...new Set(lines.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const calm = lines.map(({steps: own, values}) => ({steps: own, values: smoothed && noisy(values) ? smooth(values) : values}));
  const covers = ({steps: own}, step) => own[0] <= step && step <= own.at(-1);
  const there = steps.map((step) => calm.filter((each) => covers(each, step)).map((each) => at(each, step)).filter(Number.isFinite));
  const over = (pick) => there.map((values) => (values.length ? pick(values) : null));
  return {steps, values: over(mean), low: over((values) => Math.min(...values)), high: over((values) => Math.max(...values)), calm: true};
}

// The columns, series and bands of uPlot for lines.
function columns(lines, {smoothed, log}) {
  const tables = [], series = [{}], bands = [];
  for (const {colour: index, steps, values, low, high, calm} of lines) {
    const own = [steps], stroke = colour(`c${index}`), averages = smoothed && !calm && noisy(values) ? smooth(values) : null;
    const add = (column, options) => {
      own.push(column.map((value) => (Number.isFinite(value) && (!log || value > 0) ? value : null)));
      return series.push({points: {show: false}, ...options}) - 1;
    };
    if (low) {
      const below = add(low, {stroke: "transparent"});
      bands.push({series: [add(high, {stroke: "transparent"}), below], fill: colour(`c${index}`, 0.18)});
    } else if (averages) add(values, {stroke: colour(`c${index}`, 0.28), width: 1});
    add(averages ?? values, {stroke, width: 1.75, points: {show: steps.length <= FEW, size: 5, fill: colour("panel"), stroke}});
    tables.push(own);
  }
  return {data: window.uPlot.join(tables), series, bands};
}

// The range of the vertical axis: from 0 if the values are near 0, with some margin.
function range(plot, low, high) {
  if (low === null) return [0, 1];
  const air = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
  return [low >= 0 && low <= 0.4 * high ? 0 : low - air, high + air];
}

const resized = new ResizeObserver((entries) => {
  for (const {target, contentRect: {width, height}} of entries) if (width) target.plot?.setSize({width, height});
});

// The only value of lines that never change, which is the only tick of their axis.
function constant(data) {
  const there = data.slice(1).flat().filter((value) => value !== null && value !== undefined), [first] = there;
  return there.length && there.every((value) => value === first) ? first : null;
}

// The labels of ticks, with as many digits as tell them apart.
function labels(plot, ticks) {
  const said = (digits) => ticks.map((tick) => (tick === null ? "" : short(tick, digits))), there = ticks.filter((tick) => tick !== null).length;
  const digits = [3, 4, 5, 6, 7, 8].find((each) => new Set(said(each).filter(Boolean)).size === there);
  return said(digits ?? 8);
}

// Room for the longest label of a vertical axis.
const roomFor = (plot, labels) => Math.max(34, 14 + 6.6 * Math.max(0, ...(labels ?? []).map((label) => (label ?? "").length)));

// Draw lines into `host`, or update them. `options`: smoothed, log, axis, zoomed(from, to).
// `told(values, step)` gets each line's value at the cursor, or its last one.
export function draw(host, lines, options, told) {
  const {data, series, bands} = columns(lines, options), only = constant(data), form = JSON.stringify([series, options, only]), {axis: kind = ""} = options;
  const last = () => told(lines.map(({values}) => values.at(-1)), null);
  host.lines = lines;
  if (host.form === form) {
    host.plot.setData(data);
    return last();
  }
  host.plot?.destroy();
  host.form = form;
  const bad = colour("bad"), grid = {stroke: colour("grid"), width: 1};
  const axis = {stroke: colour("faint"), font: "11px system-ui, sans-serif", ticks: {show: false}, grid};
  host.plot = new window.uPlot({
    width: host.clientWidth || 300, height: host.clientHeight || 150, series, bands, legend: {show: false},
    cursor: {sync: {key: "steps", setSeries: false}, y: false, points: {show: false}, drag: {x: Boolean(options.zoomed), y: false, setScale: false}},
    scales: {x: {time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high])}, y: options.log ? {distr: 3} : {range}},
    axes: [
      {...axis, grid: {show: false}, size: 28, gap: 9, space: kind ? 46 : 56, ...(kind === "time" ? {incrs: SECONDS_APART} : {incrs: INCREMENTS}), ...(AXIS_TICKS[kind] && {values: (plot, ticks) => ticks.map(AXIS_TICKS[kind])})},
      {...axis, size: roomFor, gap: 6, space: 26, values: labels, ...(only !== null && !options.log && {splits: () => [only]})},
    ],
    hooks: {
      setCursor: [(plot) => {
        const {left} = plot.cursor, place = plot.posToVal(left, "x"), step = kind ? place : Math.round(place);
        if (left >= 0) told(host.lines.map((each) => at(each, step)), step);
        else told(host.lines.map(({values}) => values.at(-1)), null);
      }],
      setSelect: [(plot) => {
        const {left, width} = plot.select, [from, to] = [left, left + width].map((x) => Math.round(plot.posToVal(x, "x")));
        plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        if (width > 4 && to > from) options.zoomed(from, to);
      }],
      draw: [({ctx, bbox, valToPos}) => {  // a red line where a value is not finite
        ctx.fillStyle = bad;
        const broken = host.lines.flatMap(({steps, values}) => steps.filter((_, i) => values[i] !== null && !Number.isFinite(values[i])));
        for (const step of broken) ctx.fillRect(valToPos(step, "x", true), bbox.top, devicePixelRatio, bbox.height);
      }],
    },
  }, data, host);
  host.plot.over.addEventListener("dblclick", () => options.zoomed?.(null, null));
  resized.observe(host);
  last();
}
