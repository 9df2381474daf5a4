// What each worker did in the last steps: a row of boxes per worker. A box that is part of another lies on it, and is lower.

import { duration, h, number } from "./dom.js";
import { PHASE_COLORS } from "./phases.js";

const ROW = 20;
const LABEL = 96;
const AXIS = 20;
const NAMED = { ...PHASE_COLORS, generate: "var(--c1)", judge: "var(--c3)", collect: "var(--c7)", take: "var(--c6)", send: "var(--c6)", prove: "var(--c6)", step: "var(--line)", evaluation: "var(--c5)", save: "var(--c5)" };

const begun = (step) => step[3];

export class Lanes {
  constructor() {
    this.chosen = null; // the start of a step, which identifies it; null: all steps
    this.canvas = h("canvas", { tabindex: 0, role: "img" });
    this.caption = h("p", { class: "lane-told", role: "status" });
    this.choice = h("div", { class: "tools" });
    this.key = h("div", { class: "legend" });
    this.element = h(
      "div",
      { class: "card" },
      h("h4", {}, "What each worker did in the last steps"),
      h("p", {}, "A row per worker, by the clock of its host. Gaps are waiting, or work that is not recorded. The percentage beside a name is the share of time in which the worker was busy."),
      this.choice,
      this.key,
      this.canvas,
      this.caption,
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.caption.replaceChildren("Point at a box to read it."));
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const last = this.data.steps.length - 1;
      const now = this.chosen === null ? (by > 0 ? -1 : last + 1) : this.data.steps.indexOf(this.step());
      this.choose(begun(this.data.steps[Math.min(last, Math.max(0, now + by))]));
    });
  }

  show(data) {
    const followed = this.chosen !== null && this.chosen === begun(this.data.steps.at(-1)); // the newest stays the newest
    this.data = data;
    if (followed || (this.chosen !== null && !this.step())) this.chosen = begun(data.steps.at(-1));
    this.canvas.setAttribute("aria-label", data.workers.map((w) => `${w.name} was busy ${Math.round(100 * w.busy)} % of the time`).join(", "));
    this.caption.replaceChildren("Point at a box to read it.");
    const names = data.names.filter((name) => name !== "step");
    this.key.replaceChildren(...names.map((name) => h("span", {}, h("i", { class: "box", style: `background:${this.color(name)}` }), name)));
    this.choose(this.chosen);
  }

  /** The chosen step, if it is still shown. */
  step() {
    return this.data.steps.find((step) => begun(step) === this.chosen);
  }

  /** Chooses a step by its start, or null for all. */
  choose(which) {
    this.chosen = which;
    const button = (text, value) => h("button", { "aria-pressed": String(this.chosen === value), onclick: () => this.choose(value) }, text);
    this.choice.replaceChildren("show", button("all", null), ...this.data.steps.map((step) => button(`step ${step[0]}`, begun(step))));
    this.draw();
  }

  color(name) {
    return NAMED[name] ?? `var(--c${(this.data.names.indexOf(name) % 8) + 1})`;
  }

  draw() {
    const data = this.data;
    const width = this.element.clientWidth - 24;
    if (!data || width < 60) return;
    const style = getComputedStyle(this.element);
    const paint = (color) => style.getPropertyValue(color.slice(4, -1));
    const steps = data.steps;
    const shown = this.chosen === null ? steps : [this.step()];
    const [from, to] = [shown[0][1], shown.at(-1)[1] + shown.at(-1)[2]];
    const rows = data.workers.flatMap((worker) => worker.rows.map((boxes, i) => ({ boxes, name: i ? "" : worker.name, busy: i ? null : worker.busy, worker: worker.name })));
    const height = rows.length * ROW + AXIS;
    const dense = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * dense, height: height * dense });
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.font = "11px system-ui, sans-serif";
    const x = (ms) => LABEL + ((width - LABEL) * (ms - from)) / (to - from || 1);
    this.boxes = [];
    rows.forEach((row, r) => {
      const top = r * ROW;
      pen.fillStyle = paint("var(--line)");
      pen.fillRect(0, top + ROW - 0.5, width, 0.5);
      pen.fillStyle = paint("var(--soft)");
      if (row.name) pen.fillText(row.busy === null ? row.name : `${row.name} ${Math.round(100 * row.busy)} %`, 0, top + 14, LABEL - 6);
      for (const [n, at, length, depth, facts] of row.boxes) {
        if (at + length < from || at > to) continue;
        const left = Math.max(LABEL, x(at));
        const wide = Math.max(0.6, Math.min(width, x(at + length)) - left);
        const inset = Math.min(3 * depth, 9) + 1;
        pen.fillStyle = paint(this.color(data.names[n]));
        pen.globalAlpha = data.names[n] === "step" ? 0.6 : 0.88;
        pen.fillRect(left, top + inset, wide, ROW - 2 - inset);
        pen.globalAlpha = 1;
        this.boxes.push({ left, right: left + wide, top, depth, name: data.names[n], length, facts, worker: row.worker, at });
      }
    });
    pen.fillStyle = paint("var(--faint)");
    for (const [step, at] of steps) {
      if (at < from || at > to) continue;
      pen.fillRect(x(at), 0, 1, height - AXIS + 4);
      pen.fillText(`step ${step}`, Math.min(x(at) + 3, width - 45), height - 5);
    }
    this.from = from;
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const hit = this.boxes.filter((b) => x >= b.left - 1 && x <= b.right + 1 && y >= b.top && y < b.top + ROW).sort((a, b) => b.depth - a.depth)[0];
    this.caption.replaceChildren(
      ...(hit ? [h("b", {}, `${hit.worker} · ${hit.name}`), ` ${hit.length < 1000 ? `${number(hit.length)} ms` : duration(hit.length / 1000)}, from ${number((hit.at - this.from) / 1000)} s on${hit.facts ? ` · ${hit.facts}` : ""}`] : ["Waiting, or work that is not recorded."]),
    );
  }
}
