// The run in a few figures, and what needs a look.

import { $, duration, h, interval, moment, number, plural, sentence, unitOf, withUnit } from "./dom.js";
import { color, showCurve, swatch } from "./curves.js";
import { updateAxis } from "./axis.js";

const SIGNS = { problem: "✕", warning: "!", note: "i" };

const finite = (run, name) => (run.figures[name] ?? []).map((v, i) => [run.figures.step[i], v]).filter(([, v]) => v !== null);
const sum = (pairs) => pairs.reduce((total, [, v]) => total + v, 0);

/** The first things a reader asks: [[label, value, remark]] of a run, the remark as text or nodes. */
export function headline(run) {
  const found = [["steps", `${run.done.toLocaleString("en-US")}`, `of ${run.steps.toLocaleString("en-US")}`]];
  const reward = finite(run, "reward/mean");
  const few = (pairs) => sum(pairs) / pairs.length;
  const size = Math.min(5, Math.ceil(reward.length / 2));
  if (reward.length) found.push(["reward, last steps", number(few(reward.slice(-size))), reward.length > 1 ? `${number(few(reward.slice(0, size)))} in the first` : ""]);
  const names = Object.keys(run.figures).filter((n) => n.startsWith("eval/") && n.endsWith("/accuracy"));
  for (const name of names.includes("eval/all/accuracy") ? ["eval/all/accuracy"] : names) {
    const values = finite(run, name);
    if (!values.length) continue;
    const i = run.figures.step.indexOf(values.at(-1)[0]);
    const [low, high] = ["low", "high"].map((edge) => run.figures[`${name}/${edge}`]?.[i] ?? null);
    const unit = unitOf([values[0][1], values.at(-1)[1], low, high], "share");
    const first = values.length > 1 ? `${withUnit(values[0][1], unit)} at first` : "";
    const between = low === null || high === null ? "" : h("span", { style: "white-space:nowrap" }, interval(low, high, unit));
    found.push([`accuracy${names.length > 1 ? "" : `, ${name.split("/")[1]}`}`, withUnit(values.at(-1)[1], unit), [first, first && between ? " · " : "", between]]);
  }
  const length = finite(run, "length/mean");
  if (length.length) found.push(["tokens per completion", number(length.at(-1)[1]), `${number(length[0][1])} at first`]);
  const turns = finite(run, "episode/turns");
  if (turns.length) found.push(["turns per episode", number(turns.at(-1)[1]), `${number(turns[0][1])} at first`]);
  const time = finite(run, "time/step");
  if (time.length) found.push(["seconds per step", number(sum(time) / time.length), `${duration(sum(time))} in all`]);
  const speed = finite(run, "tokens_per_second");
  if (speed.length) found.push(["tokens per second", number(sum(speed) / speed.length), "mean over steps"]);
  const counts = Object.keys(run.figures).filter((n) => /^eval\/.*\/failed$/.test(n));
  const failed = ["reward/failed", ...counts.filter((n) => n !== "eval/all/failed" || counts.length === 1)].flatMap((n) => finite(run, n));
  const faults = run.events.filter((e) => ["restart", "replaced", "stall"].includes(e.kind)).length;
  found.push(["failed verdicts", failed.length ? number(sum(failed)) : "–", faults ? `${plural(faults, "fault")}` : "no faults, no restarts"]);
  return found;
}

const STATES = { done: "done", stopped: "stopped", failed: "failed", open: "not finished" };

export function drawSummary(data) {
  const section = $("summary");
  const runs = data.runs;
  if (runs.length === 1) {
    const [run] = runs;
    $("state").replaceChildren(h("span", { class: `pill ${run.state.kind}` }, STATES[run.state.kind]));
    section.replaceChildren(
      h("div", { class: "tiles" }, headline(run).map(([label, value, remark]) => h("div", { class: "tile" }, h("span", {}, label), h("b", {}, value), h("small", {}, remark)))),
      h("p", { class: "faint" }, [run.model, run.state.began ? `began ${moment(run.state.began)}` : "", run.state.seen ? `${run.state.kind === "open" ? "last written" : "ended"} ${moment(run.state.seen)}` : ""].filter(Boolean).join(" · ")),
      missing(run.missing),
    );
    return;
  }
  const lines = runs.map(headline);
  const labels = [...new Set(lines.flat().map(([label]) => label))];
  section.replaceChildren(
    h("h2", {}, "Side by side"),
    h(
      "div",
      { class: "wide" },
      h(
        "table",
        { id: "side-by-side" },
        h("tr", {}, h("th"), runs.map((run, i) => h("th", {}, swatch(color(i)), " ", run.name))),
        h("tr", {}, h("td", {}, "state"), runs.map((run) => h("td", {}, STATES[run.state.kind]))),
        labels.map((label) =>
          h("tr", {}, h("td", {}, label), lines.map((line) => {
            const [, value, remark] = line.find(([own]) => own === label) ?? ["", "–", ""];
            return h("td", {}, h("b", {}, value), " ", h("span", { class: "faint" }, remark));
          })),
        ),
      ),
    ),
    h("h2", { id: "differences" }, "Options that differ"),
    data.differences.length ? differences(data) : h("p", { class: "soft" }, "Only the directory."),
    ...runs.map((run) => missing(run.missing.map((text) => `${run.name}: ${text}`))),
  );
}

function differences(data) {
  const row = ({ name, values }) => h("tr", {}, h("td", { class: "mono" }, name), values.map((v) => h("td", { class: "mono" }, v)));
  return h("div", { class: "wide" }, h("table", { id: "differing" }, h("tr", {}, h("th", {}, "option"), data.runs.map((run) => h("th", {}, run.name))), data.differences.map(row)));
}

export const missing = (sentences) => (sentences.length ? h("div", { class: "missing" }, sentences.map((text) => h("p", {}, sentence(text)))) : "");

export function drawFindings(data) {
  const several = data.runs.length > 1;
  const parts = data.runs.flatMap((run) => [
    several ? h("h3", {}, run.name) : "",
    h("div", { class: "found" }, run.findings.map((found) => finding(found, several))),
    run.findings.length ? "" : h("p", { class: "soft" }, `None of the ${data.checks.length} checks found anything.`),
    events(run),
  ]);
  const folded = h("details", {}, h("summary", {}, `What the ${data.checks.length} checks look for`), h("ul", { class: "checks" }, data.checks.map((text) => h("li", {}, text))));
  const open = [...$("findings").querySelectorAll("details")].map((d) => d.open);
  $("findings").replaceChildren(h("h2", { id: "findings-title" }, "Findings"), ...parts, folded);
  $("findings").querySelectorAll("details").forEach((d, i) => (d.open = open[i] ?? d.open));
}

function finding(found, several) {
  const curve = (name) => h("a", { href: "#curves", onclick: (event) => (event.preventDefault(), showCurve(name, found.steps)) }, `curve ${name}`);
  const links = found.figures.map(curve);
  if (found.steps && found.steps[0] !== found.steps[1])
    links.push(h("a", { href: "#curves", onclick: () => updateAxis({ range: [Math.max(0, found.steps[0]), found.steps[1]] }) }, `steps ${found.steps[0]}–${found.steps[1]}`));
  if (found.samples && !several) links.push(h("a", { href: `#samples?${new URLSearchParams(found.samples)}` }, "samples"));
  return h(
    "article",
    { class: `finding ${found.tone}`, "data-check": found.check },
    h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[found.tone]),
    h("div", {}, h("h4", {}, found.title), h("p", {}, sentence(found.text)), h("div", { class: "links" }, links)),
  );
}

/** The events of the run as a table. */
function events(run) {
  if (!run.events.length) return "";
  const notable = run.events.filter((e) => e.tone !== "quiet").length;
  const facts = (e) => Object.entries(e.facts).map(([k, v]) => `${k}: ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · ");
  const row = (e) =>
    h("tr", { class: e.tone }, h("td", { class: "number" }, e.step > 0 ? e.step : "start"), h("td", {}, moment(e.time)), h("td", { style: "color:var(--tone)" }, e.title), h("td", { class: "soft", style: "overflow-wrap:anywhere" }, facts(e).slice(0, 600)));
  return h(
    "details",
    {},
    h("summary", {}, notable ? `Events: ${notable} worth a look` : "Events: no faults and no restarts"),
    h("div", { class: "wide" }, h("table", { class: "events" }, h("tr", {}, ["step", "time", "event", "facts"].map((t) => h("th", {}, t))), run.events.slice(-300).map(row))),
  );
}
