// The sample browser: filters, the list of groups, and the one that is open.

import { $, h, number, plural, visibleText, sentence } from "./dom.js";
import { NOTHING, Sampled, searchTexts, sampleFilter, sampleOf, search } from "./search.js";
import { groupView, tint } from "./group.js";

const SHOWN = 150; // groups in the list at first
const CELLS = 64; // samples of a group that the list draws
const sampled = new Sampled();
const view = { filter: { ...NOTHING }, color: "logprob", textMatches: null, found: [], group: null, shown: SHOWN, turn: 0, versions: false };

/** Shows the samples; called again with more when a live run has new ones. */
export async function drawSamples(files, leftOut) {
  const section = $("samples");
  if (!files?.length) {
    section.replaceChildren(h("h2", { id: "samples-title" }, "Samples"), h("p", { class: "soft" }, sentence(leftOut || "There are no samples to show.")));
    return;
  }
  sampled.take(files);
  view.versions = files.some((file) => Array.isArray(file.version));
  if (!$("browser")) {
    section.replaceChildren(
      h("h2", { id: "samples-title" }, "Samples"),
      leftOut ? h("p", { class: "soft", id: "left-out" }, sentence(leftOut)) : "",
      h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault(), onreset: () => apply({ ...NOTHING }), oninput: changed }),
      h("p", { id: "found", class: "soft", role: "status" }),
      h("div", { class: "browser", id: "browser" }, h("div", { class: "list", id: "list", role: "group", "aria-label": "groups" }), h("div", { class: "opened", id: "opened" })),
    );
    $("list").addEventListener("keydown", walk);
    fields();
    await apply({ step: String(lastStep()) });
    return;
  }
  const open = view.group;
  refill();
  view.group = open && sampled.groups.find((g) => g.file.name === open.file.name && g.uid === open.uid);
  await find(false);
}

const lastStep = () => sampled.files.at(-1).step;

function fields() {
  const text = (name, label, attributes = {}) => h("label", { class: name === "words" ? "words" : "" }, label, h("input", { name, ...attributes }));
  const choice = (name, label, options) => h("label", {}, label, h("select", { name }, options.map(([value, label]) => h("option", { value }, label))));
  document.querySelector(".filters").replaceChildren(
    text("words", "text, or uid  ( / )", { type: "search", id: "words", placeholder: "in prompts and completions" }),
    text("step", "step, or steps", { inputmode: "numeric", placeholder: "all, 7, or 3-9" }),
    choice("set", "set", [["", "all"], ["step", "training"], ["eval", "evaluation"]]),
    text("least", "reward from", { inputmode: "decimal" }),
    text("most", "reward to", { inputmode: "decimal" }),
    text("shortest", "tokens from", { inputmode: "numeric" }),
    text("longest", "tokens to", { inputmode: "numeric" }),
    h("label", {}, "finish", h("select", { name: "finish", id: "finishes" })),
    h("label", {}, "failure", h("select", { name: "failure", id: "failures" })),
    choice("spread", "rewards in the group", [["", "any"], ["some", "differ"], ["none", "all equal"]]),
    choice("sort", "order", [["", "by step"], ["newest", "newest first"], ["reward", "best first"], ["worst", "worst first"], ["spread", "most spread"]]),
    h("button", { type: "reset" }, "clear all"),
  );
  refill();
}

/** Updates the reasons of failures and ends, which may grow while the run goes on. */
function refill() {
  const limits = sampled.valuesOf("finish").filter((reason) => !["stop", "length"].includes(reason));
  fillIn($("finishes"), [["", "any"], ["stop", "stopped by itself"], ["length", "cut"], ...limits.map((reason) => [reason, `out of ${reason}`])]);
  fillIn($("failures"), [["", "any or none"], ["none", "judged"], ["any", "failed"], ...sampled.valuesOf("failure").map((reason) => [reason, reason])]);
}

function fillIn(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, label]) => h("option", { value }, label)));
  select.value = chosen;
}

let waiting = 0;
function changed(event) {
  view.filter[event.target.name] = event.target.value;
  clearTimeout(waiting);
  waiting = setTimeout(() => find(true), event.target.name === "words" ? 250 : 60);
}

/** Sets the whole filter, as links do: {failure: "timeout"}. It may include color and order. */
export async function apply(wanted) {
  if (!sampled.files.length) return;
  const { color, ...rest } = wanted;
  if (color) view.color = color;
  view.filter = { ...NOTHING, ...rest };
  for (const [name, value] of Object.entries(view.filter)) {
    const input = document.querySelector(`.filters [name="${name}"]`);
    if (input) input.value = value;
  }
  view.group = null;
  await find(true);
}

async function find(fresh) {
  const turn = ++view.turn;
  view.textMatches = null;
  let unreadNote = "";
  if (fresh) view.shown = SHOWN;
  if (view.filter.words.trim()) {
    const progress = (n, all) => turn === view.turn && n % 8 === 0 && say(`reading texts: ${n} of ${all} files …`);
    const result = await searchTexts(sampled, view.filter, progress, () => turn !== view.turn);
    if (!result) return;
    view.textMatches = result.textMatches;
    unreadNote = result.unread.length ? ` The texts of ${result.unread.join(", ")} cannot be read.` : "";
  }
  view.found = search(sampled, view.filter, view.textMatches);
  const passes = sampleFilter(view.filter, view.textMatches);
  const count = view.found.reduce((sum, g) => sum + Array.from({ length: g.size }, (_, i) => passes(g, i)).filter(Boolean).length, 0);
  say((view.found.length ? `${plural(count, "sample")} in ${plural(view.found.length, "group")}${unreadNote && "."}` : "No sample matches.") + unreadNote);
  $("found").dataset.filter = JSON.stringify(view.filter); // for tests: the filter of this result
  list();
  if (fresh && (!view.group || !view.found.includes(view.group))) await open(view.found[0] ?? null, false);
}

const say = (text) => $("found").replaceChildren(text);

function list() {
  const passes = sampleFilter(view.filter, view.textMatches);
  const row = (group) =>
    h(
      "button",
      { class: "row", "aria-current": String(group === view.group), onclick: () => open(group, false), "data-uid": group.uid, "data-file": group.file.name },
      h("span", { class: `uid mono${group.there ? "" : " faint"}`, title: group.there ? null : "its texts are not in this file" }, visibleText(group.uid)),
      h("span", { class: "soft" }, `${group.file.kind === "eval" ? "eval " : ""}${group.file.step} · `, h("b", {}, number(group.mean))),
      h("span", { class: "cells" }, Array.from({ length: Math.min(group.size, CELLS) }, (_, i) => cell(group, i, passes)), group.size > CELLS ? h("span", { class: "faint" }, `+${group.size - CELLS}`) : ""),
    );
  const focused = document.activeElement?.classList.contains("row");
  const scrolled = $("list").scrollTop;
  $("list").replaceChildren(...view.found.slice(0, view.shown).map(row));
  if (view.found.length > view.shown) $("list").append(h("button", { class: "row", onclick: () => ((view.shown += SHOWN), list()) }, `show more of ${plural(view.found.length, "group")}`));
  $("list").scrollTop = scrolled;
  if (focused) document.querySelector('.row[aria-current="true"]')?.focus({ preventScroll: true });
}

function cell(group, i, passes) {
  const one = sampleOf(group, i);
  const kind = [one.failure && one.reward === null ? "failed" : "", passes(group, i) ? "" : "out"].filter(Boolean).join(" ");
  return h("i", { class: kind, style: `background:${tint(one.reward, sampled.least, sampled.most)}`, title: one.failure || `reward ${number(one.reward)}` });
}

/** Opens a group; `focus` moves the focus to its row in the list. */
export async function open(group, focus) {
  view.group = group;
  for (const row of document.querySelectorAll(".list .row")) row.setAttribute("aria-current", String(group && row.dataset.uid === group.uid && row.dataset.file === group.file.name));
  const current = document.querySelector('.row[aria-current="true"]');
  if (current) intoView($("list"), current);
  if (focus) current?.focus({ preventScroll: true });
  if (!group) return $("opened").replaceChildren();
  const shown = await groupView(group, sampled, {
    ...view,
    open: (other) => open(other, false),
    recolor: (mode) => {
      view.color = mode;
      open(view.group, false).then(() => document.querySelector('#colors [aria-pressed="true"]')?.focus());
    },
  }).catch((error) => [h("p", { class: "missing" }, `This group cannot be shown now: ${error.message}`)]);
  if (view.group === group) $("opened").replaceChildren(...shown.filter(Boolean));
}

/** Scrolls the list, but not the page. */
function intoView(frame, row) {
  const top = row.offsetTop - frame.offsetTop;
  if (top < frame.scrollTop) frame.scrollTop = top;
  if (top + row.offsetHeight > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + row.offsetHeight - frame.clientHeight;
}

/** Opens the next or previous group of the list. */
export function nextGroup(by) {
  const now = view.found.indexOf(view.group);
  const next = view.found[Math.min(view.found.length - 1, Math.max(0, now + by))];
  if (!next || next === view.group) return;
  if (view.found.indexOf(next) >= view.shown) {
    view.shown += SHOWN;
    list();
  }
  open(next, true);
}

/** Shows the next or previous step that has samples. */
export function nextStep(by) {
  const steps = [...new Set(sampled.files.filter((f) => !view.filter.set || f.kind === view.filter.set).map((f) => f.step))];
  const now = view.group ? view.group.file.step : lastStep();
  const next = steps[Math.min(steps.length - 1, Math.max(0, steps.indexOf(now) + by))];
  if (next !== undefined) apply({ ...view.filter, step: String(next) });
}

function walk(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by) nextGroup(by);
  else if (step) nextStep(step);
  else return;
  event.preventDefault();
}

