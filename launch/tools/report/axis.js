// The axis of steps that all curves share: the range that is shown, and the step that is selected.

export const [LEFT, RIGHT, TOP] = [46, 8, 8]; // around every plot

const listeners = [];

/** `range` is [first, last] of the shown steps, null for all; `at` is the step under the pointer; `pinned` the one that was clicked. */
export const axis = { all: [0, 1], range: null, at: null, pinned: null };

export function shownRange() {
  return axis.range ?? axis.all;
}

/** The step whose values are shown: the one under the pointer, else the pinned one. */
export function shownStep() {
  return axis.at ?? axis.pinned;
}

export function onAxis(listener) {
  listeners.push(listener);
}

/** updateAxis({at: 7}) moves the cross-hair of all curves; updateAxis({range: [10, 20]}) zooms all. */
export function updateAxis(change) {
  const zoomed = "range" in change;
  Object.assign(axis, change);
  for (const listener of listeners) listener(zoomed);
}

/** About `count` round numbers from low to high. */
export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((n) => n * power >= rough * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(Number((i * size).toPrecision(12)));
  return found;
}

export function powers(low, high) {
  const found = [];
  for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.log10(high) + 1e-9; e++) found.push(10 ** e);
  const every = Math.ceil(found.length / 5);
  return found.filter((_, i) => i % every === 0);
}

/** Handles the pointer on a plot: moving shows the cross-hair, dragging zooms, a click pins, a double-click shows all; arrow keys move the pin. */
export function handlePointer(element, stepAt, drawDrag) {
  let from = null;
  const step = (event) => Math.round(stepAt(event.clientX - element.getBoundingClientRect().left));
  const within = (n) => Math.min(shownRange()[1], Math.max(shownRange()[0], n));
  element.addEventListener("pointermove", (event) => {
    updateAxis({ at: within(step(event)) });
    if (from !== null) drawDrag(from, within(step(event)));
  });
  element.addEventListener("pointerleave", () => updateAxis({ at: null }));
  element.addEventListener("pointerdown", (event) => {
    from = within(step(event));
    if (event.pointerType === "mouse") element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointercancel", () => {
    from = null;
    drawDrag(0, 0);
  });
  element.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [low, high] = [from, within(step(event))].sort((a, b) => a - b);
    from = null;
    drawDrag(0, 0);
    if (high > low) updateAxis({ range: [low, high] });
    else updateAxis({ pinned: axis.pinned === low ? null : low });
  });
  element.addEventListener("dblclick", () => updateAxis({ range: null, pinned: null }));
  element.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) updateAxis({ pinned: within((shownStep() ?? shownRange()[1]) + by * (event.shiftKey ? 10 : 1)), at: null });
    else if (event.key === "Escape") updateAxis({ pinned: null, at: null, range: null });
    else return;
    event.preventDefault();
  });
}
