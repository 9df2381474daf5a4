// Where the time went: the phases of each step, stacked.

import { h, number, s } from "./dom.js";
import { LEFT, RIGHT, TOP, onAxis, shownRange, handlePointer, ticks, shownStep } from "./axis.js";
import { eventMarks, swatch } from "./curves.js";

const TALL = 190;
const GROUND = TALL - 20;
export const PHASE_COLORS = { rollout: "var(--c1)", reward: "var(--c3)", score: "var(--c4)", update: "var(--c2)", sync: "var(--c6)", other: "var(--c8)" };
const SAID = {
  rollout: "engines sample",
  reward: "waiting for the last verdicts",
  score: "old and reference log-probs",
  update: "forward, backward, optimizer",
  sync: "weights to the engines, and their verification",
  other: "the driver's own work between them",
};

/** A card that is redrawn when the axis moves. */
export class Phases {
  constructor(names) {
    this.names = [...names, "other"];
    this.svg = s("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": "Seconds of each step by phase" });
    this.legend = h("div", { class: "legend" });
    this.element = h(
      "div",
      { class: "card" },
      h("h4", {}, "Seconds per step, by phase", h("small", {}, "s")),
      h("p", {}, "Each step from start to end: rollout to sync, and the driver's work between them. Evaluations and checkpoints are not included."),
      this.legend,
      this.svg,
    );
    handlePointer(this.svg, (x) => this.step(x), (from, to) => this.drag(from, to));
    onAxis((zoomed) => (zoomed ? this.draw() : this.point()));
  }

  show(run) {
    const total = run.figures["time/step"] ?? [];
    this.rows = total
      .map((seconds, i) => {
        const parts = this.names.slice(0, -1).map((name) => run.figures[`time/${name}`]?.[i] ?? 0);
        return { step: run.figures.step[i], seconds, parts: [...parts, Math.max(0, seconds - parts.reduce((a, b) => a + b, 0))] };
      })
      .filter((row) => row.seconds !== null);
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth - 24;
    if (!this.rows || width < 40) return;
    const [first, last] = shownRange();
    const rows = this.rows.filter((row) => row.step >= first && row.step <= last);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${TALL}`);
    this.svg.setAttribute("height", TALL);
    this.cross = null;
    const [low, high] = [first - 0.5, last + 0.5]; // the column of a step is centered on its number
    this.x = (step) => LEFT + ((width - LEFT - RIGHT) * (step - low)) / (high - low);
    this.step = (x) => low + ((x - LEFT) / (width - LEFT - RIGHT)) * (high - low);
    if (!rows.length) {
      this.svg.replaceChildren(s("text", { x: width / 2, y: TALL / 2, "text-anchor": "middle" }, this.rows.length ? "nothing in these steps" : "no step is done yet"));
      return;
    }
    const most = rows.reduce((high, row) => Math.max(high, row.seconds), 0) * 1.05;
    const y = (seconds) => GROUND - ((GROUND - TOP) * seconds) / most;
    const axes = ticks(0, most, 4).flatMap((v) => [s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }), s("text", { x: LEFT - 5, y: y(v) + 3.5, "text-anchor": "end" }, number(v))]);
    const numbers = ticks(first, last, Math.max(2, Math.floor(width / 75))).filter(Number.isInteger).map((step) => s("text", { x: this.x(step), y: TALL - 5, "text-anchor": "middle" }, String(step)));
    const below = rows.map(() => 0);
    const gap = (this.x(1) - this.x(0)) * (this.x(1) - this.x(0) > 6 ? 0.08 : 0);
    const areas = this.names.map((name, n) => {
      const d = rows.map((row, i) => {
        const [from, to] = [y(below[i]), y((below[i] += row.parts[n]))];
        const [left, right] = [this.x(row.step - 0.5) + gap, this.x(row.step + 0.5) - gap];
        return `M${left.toFixed(1)} ${from.toFixed(1)}H${right.toFixed(1)}V${to.toFixed(1)}H${left.toFixed(1)}Z`;
      });
      return s("path", { d: d.join(""), style: `fill:${PHASE_COLORS[name] ?? "var(--c5)"}`, "data-phase": name });
    });
    this.cross = s("line", { class: "cross", y1: TOP, y2: GROUND, visibility: "hidden" });
    this.dragged = s("rect", { class: "drag", y: TOP, height: GROUND - TOP, width: 0 });
    this.svg.replaceChildren(...axes, ...areas, ...numbers, ...eventMarks(this.x, GROUND), this.dragged, this.cross);
    this.mean = this.names.map((_, n) => rows.reduce((sum, row) => sum + row.parts[n], 0) / rows.length);
    this.point();
  }

  point() {
    if (!this.cross) return;
    const step = shownStep();
    const row = step === null ? null : this.rows.find((r) => r.step === step);
    this.cross.setAttribute("visibility", row ? "visible" : "hidden");
    if (row) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(step));
    const parts = row ? row.parts : this.mean;
    const total = parts.reduce((a, b) => a + b, 0) || 1;
    this.legend.replaceChildren(
      h("span", {}, row ? `step ${step}: ` : "mean: ", h("b", {}, `${number(total)} s`)),
      ...this.names.map((name, n) => h("span", { title: SAID[name] ?? "" }, swatch(PHASE_COLORS[name] ?? "var(--c5)", true), `${name} `, h("b", {}, `${number(parts[n])} s`), ` ${Math.round((100 * parts[n]) / total)} %`)),
    );
  }

  drag(from, to) {
    if (!this.dragged) return;
    const [low, high] = [this.x(Math.min(from, to)), this.x(Math.max(from, to))];
    this.dragged.setAttribute("x", low);
    this.dragged.setAttribute("width", high - low);
  }
}
