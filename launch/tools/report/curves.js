// Curves: a card per chart, all on one axis of steps.

import { $, h, interval, number, plural, s, unitOf, withUnit } from "./dom.js";
import { LEFT, RIGHT, TOP, axis, updateAxis, onAxis, powers, shownRange, handlePointer, ticks, shownStep } from "./axis.js";

const HEIGHT = 148;
const FLOOR = HEIGHT - 18; // where the axis of steps is
const DASHES = ["", "5 3", "1.5 2.5", "8 3 2 3"];
export const smoothing = { weight: 0 };
let cards = [];
let marks = []; // events shown on every curve

/** Fills the section; called again when a live run has new data. */
export function drawCurves(data) {
  const runs = data.runs;
  marks = runs.length === 1 ? runs[0].events.filter((e) => e.tone !== "quiet") : [];
  const steps = runs.flatMap((run) => [run.figures.step?.[0] ?? 0, run.done]);
  axis.all = [Math.min(...steps), Math.max(...steps, 1)];
  const key = JSON.stringify([data.charts, runs.map((run) => run.name)]);
  if ($("curves").dataset.key === key) {
    for (const card of cards) card.runs = runs;
  } else {
    build(data, key);
  }
  redraw();
}

function build(data, key) {
  const section = $("curves");
  const open = section.querySelector("details")?.open;
  section.dataset.key = key;
  section.replaceChildren(
    h("h2", { id: "curves-title" }, "Curves"),
    data.runs.length > 1 ? h("p", { class: "legend" }, data.runs.map((run, i) => h("span", {}, swatch(color(i)), run.name))) : "",
    tools(),
  );
  cards = [];
  for (const name of [...new Set(data.charts.map((chart) => chart.section))]) {
    const members = data.charts.filter((chart) => chart.section === name).map((chart) => new Curve(chart, data.runs));
    const grid = h("div", { class: "grid" }, members.map((card) => card.element));
    cards.push(...members);
    if (name === "Everything else") {
      const folded = h("details", { open }, h("summary", {}, `${name}: ${plural(members.length, "metric")}`), grid);
      folded.addEventListener("toggle", redraw);
      section.append(folded);
    } else {
      section.append(h("h3", {}, name), grid);
    }
  }
}

function tools() {
  const stepText = h("span", { id: "told-step", role: "status" });
  const choose = h(
    "select",
    { "aria-label": "smoothing", onchange: (event) => ((smoothing.weight = Number(event.target.value)), redraw()) },
    [["0", "none"], ["0.6", "light"], ["0.9", "strong"]].map(([value, text]) => h("option", { value, selected: Number(value) === smoothing.weight }, text)),
  );
  return h(
    "div",
    { class: "tools", id: "curve-tools" },
    h("label", { class: "group" }, "smoothing", choose),
    h("button", { id: "whole", onclick: () => updateAxis({ range: null }) }, "all steps"),
    stepText,
    h("span", { class: "faint" }, "drag to zoom, click to pin a step"),
  );
}

export function redraw() {
  for (const card of cards) card.draw();
  showStep();
}

onAxis((zoomed) => {
  if (zoomed) redraw();
  else {
    for (const card of cards) card.point();
    showStep();
  }
});

function showStep() {
  const whole = $("whole");
  if (!whole) return;
  whole.disabled = !axis.range;
  const step = shownStep();
  const pinned = axis.pinned !== null;
  $("told-step").replaceChildren(
    step === null ? "last values" : `values of step ${step}`,
    pinned ? " · " : "",
    pinned ? h("a", { href: `#samples?step=${axis.pinned}` }, `samples of step ${axis.pinned}`) : "",
  );
}

export const color = (i) => `var(--c${(i % 8) + 1})`;
export const swatch = (fill, box = false) => h("i", { style: `background:${fill}`, class: box ? "box" : "" });

/** The parts in which the names of a chart differ: eval/easy/accuracy, eval/hard/accuracy -> easy, hard. */
export function shortNames(names) {
  if (names.length < 2) return [""];
  const parts = names.map((name) => name.split("/"));
  let first = 0;
  while (parts.every((p) => p.length > first + 1 && p[first] === parts[0][first])) first++;
  let last = 0;
  while (parts.every((p) => p.length > first + last + 1 && p.at(-1 - last) === parts[0].at(-1 - last))) last++;
  return parts.map((p) => p.slice(first, p.length - last).join("/"));
}

/** Faults and restarts as lines from the top of a plot to its floor. */
export function eventMarks(x, floor) {
  const [first, last] = shownRange();
  return marks
    .filter((e) => e.step >= first && e.step <= last)
    .map((e) => {
      const at = x(e.step);
      const title = s("title", {}, `step ${e.step}: ${e.title}`);
      return s("g", { class: e.tone }, title, s("line", { class: "event", x1: at, x2: at, y1: TOP, y2: floor }), s("path", { class: "sign", d: `M${at - 4} 1h8l-4 6z` }));
    });
}

class Curve {
  constructor(chart, runs) {
    Object.assign(this, { chart, runs });
    const id = `curve-${chart.names.join(" ") || chart.title}`;
    this.svg = s("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": `${chart.title}. ${chart.caption}` });
    this.legend = h("div", { class: "legend" });
    this.measure = h("small");
    this.element = h(
      "div",
      { class: "card", id, "data-names": chart.names.join(" ") },
      h("h4", {}, chart.title, this.measure),
      h("p", {}, chart.caption),
      this.legend,
      this.svg,
    );
    handlePointer(this.svg, (x) => this.step(x), (from, to) => this.drag(from, to));
  }

  /** The lines to draw: [{label, color, dash, points: [[step, value]], low, high}] */
  lines() {
    const short = shortNames(this.chart.names);
    const several = this.runs.length > 1;
    return this.runs.flatMap((run, r) =>
      this.chart.names.map((name, n) => {
        const values = run.figures[name] ?? [];
        const points = [];
        for (let i = 0; i < values.length; i++) if (values[i] !== null) points.push([run.figures.step[i], values[i]]);
        const band = this.chart.bands[name]?.map((edge) => run.figures[edge]);
        const [low, high] = band ? band.map((edge) => points.map(([step]) => edge?.[run.figures.step.indexOf(step)] ?? null)) : [null, null];
        const label = [several ? run.name : "", short[n]].filter(Boolean).join(" ");
        return { label, color: color(several ? r : n), dash: several ? DASHES[n % 4] : "", points, low, high };
      }),
    );
  }

  draw() {
    const width = this.svg.parentElement.clientWidth - 24;
    if (width < 40) return;
    const [first, last] = shownRange();
    const lines = (this.drawn = this.lines().filter((line) => line.points.length));
    const inside = lines.map((line) => line.points.map(([step], i) => i).filter((i) => line.points[i][0] >= first && line.points[i][0] <= last));
    const log = this.chart.scale === "log";
    this.unit = unitOf(lines.flatMap((line) => [...line.points.map(([, v]) => v), ...(line.low ?? []), ...(line.high ?? [])]), this.chart.unit); // zoomed or not
    this.measure.textContent = [this.unit === "share" ? "%" : this.unit, log ? "log" : ""].filter(Boolean).join(", ");
    const values = lines.flatMap((line, n) => inside[n].flatMap((i) => [line.points[i][1], line.low?.[i], line.high?.[i]]));
    const usable = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    this.x = (step) => LEFT + ((width - LEFT - RIGHT) * (step - first)) / (last - first || 1);
    this.step = (x) => first + ((x - LEFT) / (width - LEFT - RIGHT)) * (last - first);
    if (!usable.length) {
      const why = lines.length ? (log && values.some((v) => v === 0) ? "0 in all of these steps" : "nothing in these steps") : "not in this run";
      this.svg.replaceChildren(s("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, why));
      this.legend.replaceChildren();
      this.cross = null;
      return;
    }
    const [low, high] = this.bounds(usable);
    const scale = log ? (v) => Math.log10(Math.max(v, low)) : (v) => v;
    this.y = (v) => TOP + (FLOOR - TOP) * (1 - (scale(v) - scale(low)) / (scale(high) - scale(low) || 1));
    this.cross = s("line", { class: "cross", y1: TOP, y2: FLOOR, visibility: "hidden" });
    this.dragged = s("rect", { class: "drag", y: TOP, height: FLOOR - TOP, width: 0 });
    this.svg.replaceChildren(
      ...this.axes(width, low, high, log),
      ...eventMarks(this.x, FLOOR),
      ...lines.flatMap((line, n) => this.line(line, inside[n])),
      this.dragged,
      this.cross,
    );
    this.point();
  }

  bounds(values) {
    let low = values.reduce((a, b) => Math.min(a, b)); // there may be too many for arguments of Math.min
    let high = values.reduce((a, b) => Math.max(a, b));
    if (this.chart.scale === "log") return [low, high > low ? high : low * 10];
    if (this.chart.scale === "zero") low = Math.min(0, low);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    if (low !== 0) low -= room;
    high += room;
    return this.unit === "share" ? [Math.max(0, low), Math.min(1, high)] : [low, high];
  }

  axes(width, low, high, log) {
    const [first, last] = shownRange();
    const parts = [s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: FLOOR, y2: FLOOR })];
    for (const v of log ? powers(low, high) : ticks(low, high, 4)) {
      const y = this.y(v);
      if (y < TOP - 2 || y > FLOOR + 1) continue;
      const text = this.unit === "share" ? `${Number((100 * v).toPrecision(3))}` : number(v);
      parts.push(s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), s("text", { x: LEFT - 5, y: y + 3.5, "text-anchor": "end" }, text));
    }
    for (const step of ticks(first, last, Math.max(2, Math.floor(width / 75))))
      if (Number.isInteger(step)) parts.push(s("text", { x: this.x(step), y: HEIGHT - 4, "text-anchor": "middle" }, String(step)));
    return parts;
  }

  line({ points, low, high, color: stroke, dash }, inside) {
    const at = (i, value) => `${this.x(points[i][0]).toFixed(1)} ${this.y(value).toFixed(1)}`;
    const parts = [];
    const bounded = inside.filter((i) => low && low[i] !== null && high[i] !== null);
    if (bounded.length) {
      const there = bounded.map((i) => at(i, high[i]));
      const back = bounded.map((i) => at(i, low[i])).reverse();
      parts.push(s("path", { d: `M${[...there, ...back].join("L")}Z`, fill: stroke, opacity: 0.15 }));
    }
    const raw = inside.map((i) => at(i, points[i][1]));
    const smooth = smoothing.weight && inside.length > 8;
    const path = (d, opacity, thick) => s("path", { d: `M${d.join("L")}`, fill: "none", stroke, "stroke-width": thick, "stroke-dasharray": dash, "stroke-linejoin": "round", opacity });
    if (raw.length) parts.push(path(raw, smooth ? 0.25 : 1, 1.6));
    if (smooth) {
      let mean = points[inside[0]][1];
      parts.push(path(inside.map((i) => at(i, (mean = smoothing.weight * mean + (1 - smoothing.weight) * points[i][1]))), 1, 2));
    }
    if (raw.length <= 40) for (const i of inside) parts.push(s("circle", { cx: this.x(points[i][0]), cy: this.y(points[i][1]), r: raw.length > 1 ? 2.2 : 3.5, fill: stroke }));
    return parts;
  }

  /** Moves the cross-hair, and shows the values there. */
  point() {
    if (!this.cross) return;
    const step = shownStep();
    const [first, last] = shownRange();
    const here = step !== null && step >= first && step <= last;
    this.cross.setAttribute("visibility", here ? "visible" : "hidden");
    if (here) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(step));
    this.legend.replaceChildren(
      ...this.drawn.map((line) => {
        const i = step === null ? line.points.length - 1 : nearest(line.points, step);
        const [at, value] = line.points[i];
        const [low, high] = [line.low?.[i] ?? null, line.high?.[i] ?? null];
        const band = low === null || high === null ? "" : ` (${interval(low, high, this.unit)})`;
        const where = step !== null && at !== step ? ` at ${at}` : "";
        return h("span", {}, swatch(line.color), line.label ? `${line.label} ` : "", h("b", {}, withUnit(value, this.unit)), band, where);
      }),
    );
  }

  drag(from, to) {
    if (!this.dragged) return;
    const [low, high] = [this.x(Math.min(from, to)), this.x(Math.max(from, to))];
    this.dragged.setAttribute("x", low);
    this.dragged.setAttribute("width", high - low);
  }
}

/** The last point at or before the step, else the first. */
function nearest(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (points[middle][0] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Scrolls to the curve of a metric and highlights it for a moment. */
export function showCurve(name, steps) {
  const card = cards.find((c) => c.chart.names.includes(name));
  if (!card) return $("time").scrollIntoView(); // its seconds are drawn there
  card.element.closest("details")?.setAttribute("open", "");
  card.draw();
  if (steps) updateAxis({ pinned: steps[1] });
  card.element.scrollIntoView({ block: "center" });
  card.svg.focus({ preventScroll: true });
  card.element.classList.add("lit");
  setTimeout(() => card.element.classList.remove("lit"), 2500);
}
