// Opens the page, handles links and keys, and fetches new data while a run is watched.

import { $, h } from "./dom.js";
import { fetchData, forget, live, piece } from "./store.js";
import { drawCurves, redraw } from "./curves.js";
import { Phases } from "./phases.js";
import { Lanes } from "./lanes.js";
import { drawFindings, drawSummary, missing } from "./findings.js";
import { apply, drawSamples, nextGroup, nextStep } from "./samples.js";
import { drawSettings } from "./settings.js";

const EVERY_MS = 2000;
let phases = null;
let lanes = null;

function draw(data) {
  const title = data.runs.map((run) => run.name).join(" and ");
  $("title").textContent = title;
  drawSummary(data);
  drawFindings(data);
  drawCurves(data);
  if (data.runs.length === 1) drawTime(data);
  else $("time").replaceChildren(h("h2", { id: "time-title" }, "Time"), h("p", { class: "soft" }, "The page of a single run shows phases and lanes. Here, seconds and tokens per second are among the curves."));
  drawSettings(data);
  $("foot").textContent = `rlsys ${data.version}. This file holds everything on the page; it loads nothing from elsewhere.`;
  if (live) $("foot").textContent = `rlsys ${data.version}. Served by rlsys watch; nothing is loaded from elsewhere.`;
}

function drawTime(data) {
  const [run] = data.runs;
  if (!phases) {
    phases = new Phases(data.phases);
    lanes = new Lanes();
    $("time").replaceChildren(h("h2", { id: "time-title" }, "Where the time went"), h("div", { style: "display:grid;gap:12px" }, phases.element, lanes.element));
  }
  phases.show(run);
  lanes.element.hidden = !run.lanes;
  if (run.lanes) lanes.show(run.lanes);
}

function follow() {
  const [place, query] = location.hash.slice(1).split("?");
  if (place === "samples" && query) {
    apply(Object.fromEntries(new URLSearchParams(query)));
    $("samples").scrollIntoView();
  }
}

/** Follows a link to the current place again, which changes no hash. */
function again(event) {
  const link = event.target.closest('a[href^="#samples?"]');
  if (link?.getAttribute("href") === location.hash) follow();
}

// --- light and dark, keys ---------------------------------------------------------------------------------------------

const wish = matchMedia("(prefers-color-scheme: dark)");
let theme = null; // the reader's choice
try {
  theme = localStorage.getItem("rlsys theme");
} catch {} // a file may have no storage

function paintTheme() {
  const dark = theme ? theme === "dark" : wish.matches;
  document.documentElement.classList.toggle("dark", dark);
  $("theme").textContent = dark ? "☀" : "☾";
  lanes?.draw();
}

function otherTheme() {
  theme = document.documentElement.classList.contains("dark") ? "light" : "dark";
  try {
    localStorage.setItem("rlsys theme", theme);
  } catch {}
  paintTheme();
}

const KEYS = [
  ["/", "search samples"],
  ["j  k", "next, previous group"],
  ["]  [", "next, previous step of the samples"],
  ["↑  ↓", "in the list: previous, next group"],
  ["←  →", "on a curve: previous, next step; with Shift ten steps"],
  ["Esc", "on a curve: all steps, no step pinned"],
  ["t", "light or dark"],
  ["?", "this help"],
];

function help() {
  $("help").replaceChildren(
    h("h2", { id: "help-title", style: "margin-top:0" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([keys, meaning]) => [h("dt", {}, keys.split("  ").map((k) => [h("kbd", {}, k), " "])), h("dd", {}, meaning)])),
    h("p", { style: "margin-bottom:0" }, h("button", { onclick: () => $("help").close() }, "close")),
  );
  $("help").showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const does = {
    "/": () => ($("samples").scrollIntoView(), $("words")?.focus({ preventScroll: true })),
    j: () => nextGroup(1),
    k: () => nextGroup(-1),
    "]": () => nextStep(1),
    "[": () => nextStep(-1),
    t: otherTheme,
    "?": help,
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
}

// --- a run that goes on -------------------------------------------------------------------------------------------------

let tag = "";
let serial = 0;

/** Fetches and draws new data. Returns a sentence if the run has not started, else nothing. */
async function more() {
  const answer = await fetch("main", { headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 202) return answer.text();
  if (answer.status !== 304) {
    if (!answer.ok) throw new Error(await answer.text());
    draw(await answer.json());
    tag = answer.headers.get("ETag") ?? "";
  }
  const newSamples = await fetchData(`numbers?after=${serial}`);
  serial = newSamples.serial;
  $("unread").replaceChildren(missing(newSamples.unread));
  for (const file of newSamples.files) {
    forget(`texts-${file.name}`);
    forget(`tokens-${file.name}`);
  }
  if (newSamples.files.length || !$("samples").childElementCount) await drawSamples(newSamples.files.length ? newSamples.files : null, "No samples have been written yet.");
  return "";
}

async function watch() {
  let waits = "";
  try {
    waits = await more();
    $("live").textContent = `${waits ? "waiting" : "watching"} · ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    $("live").textContent = `No new data: ${`${error.message || error}`.replace(/\.$/, "")}. The page stays as it is and tries again.`;
  }
  if ($("live").hidden) {
    $("live").hidden = false;
    document.documentElement.style.setProperty("--head", `${$("top").offsetHeight}px`);
  }
  $("wait").textContent = waits;
  $("wait").hidden = !waits;
  setTimeout(watch, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

// --- begin --------------------------------------------------------------------------------------------------------------

async function begin() {
  wish.addEventListener("change", paintTheme);
  addEventListener("hashchange", follow);
  addEventListener("click", again);
  addEventListener("keydown", pressed);
  $("title").textContent = document.title; // until there is a run to draw
  $("theme").addEventListener("click", otherTheme);
  $("keys").addEventListener("click", help);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraw();
    phases?.draw();
    lanes?.draw();
  });
  if (!("DecompressionStream" in window)) {
    $("wait").textContent = "This browser is too old for this page: it has no DecompressionStream. Use a browser from 2023 or later.";
    return;
  }
  if (live) {
    await watch();
  } else {
    const data = await piece("main");
    draw(data);
    $("wait").hidden = true;
    await drawSamples(await piece("numbers"), data.left_out);
  }
  paintTheme();
  follow();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

paintTheme();
begin().catch((error) => {
  $("wait").hidden = false;
  $("wait").textContent = `The page could not be opened: ${error.message || error}`;
  throw error;
});
