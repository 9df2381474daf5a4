// The batch arithmetic, the method, the processes, and every option.

import { $, h } from "./dom.js";

const HEADS = { "Batch arithmetic": ["quantity", "number", "from"], Method: ["part", "choice"], Data: ["for", "data set", "how", "reward"], Processes: ["role", "number", "description"] };

export function drawSettings(data) {
  const section = $("settings");
  if (section.dataset.drawn) return; // settings do not change during a run
  section.dataset.drawn = "yes";
  section.append(h("h2", { id: "settings-title" }, "Settings"));
  for (const run of data.runs) {
    if (data.runs.length > 1) section.append(h("h3", {}, run.name));
    section.append(h("div", { class: "tables" }, Object.entries(run.tables).map(([title, rows]) => table(title, rows))));
    section.append(options(run, data.runs.length > 1));
  }
}

function table(title, rows) {
  const cell = (value) => (typeof value === "number" ? h("td", { class: "number" }, value.toLocaleString("en-US")) : h("td", { class: "soft" }, value));
  const body = rows.map(([first, ...rest]) => h("tr", {}, h("td", {}, first), rest.map(cell)));
  return h("div", {}, h("h3", {}, title), h("div", { class: "wide" }, h("table", {}, h("tr", {}, HEADS[title].map((t) => h("th", {}, t))), body)));
}

function options(run, folded) {
  const body = h("tbody");
  const show = (all) => {
    const rows = run.options.filter((o) => all || o.differs);
    body.replaceChildren(...(rows.length ? rows.map(option) : [h("tr", {}, h("td", { class: "soft" }, "Every option has its default."))]));
  };
  show(false);
  const head = h("tr", {}, ["option", "value", "default", "meaning"].map((t) => h("th", {}, t)));
  const box = h("input", { type: "checkbox", onchange: (event) => show(event.target.checked) });
  const inner = [h("label", { class: "tools" }, box, `show all ${run.options.length} options, not only those that differ from their defaults`), h("div", { class: "wide" }, h("table", { class: "options" }, h("thead", {}, head), body))];
  return folded ? h("details", {}, h("summary", {}, "options"), inner) : h("div", {}, h("h3", {}, "Options that differ from the defaults"), inner);
}

function option({ name, value, default: before, differs, meaning }) {
  return h("tr", { class: differs ? "differs" : "" }, h("td", { class: "mono" }, name), h("td", { class: "mono" }, value), h("td", { class: "mono was" }, differs ? before ?? "unknown here" : ""), h("td", { class: "soft" }, meaning));
}
