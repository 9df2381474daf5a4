// Elements, numbers and hostile text. Texts of samples enter the page as text only, never as markup.

/** h("p", {class: "soft"}, "text", other) */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** 0.0123, 1,234 or 1.2e-7 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

/** The unit that fits all values: a mean score below 0 or above 1 is not a share. */
export function unitOf(values, unit) {
  return unit === "share" && values.some((v) => v !== null && v !== undefined && (v < 0 || v > 1)) ? "" : unit;
}

export function withUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unitOf([value], unit) === "share") return `${Number((100 * value).toPrecision(3))} %`;
  return unit && unit !== "share" ? `${number(value)} ${unit}` : number(value);
}

/** 12.5–17.0 %, 1.02–1.08, -0.2 to 0: with a negative number, a dash would look like its sign. */
export function interval(low, high, unit) {
  if (unitOf([low, high], unit) === "share") return `${(100 * low).toFixed(1)}–${(100 * high).toFixed(1)} %`;
  return `${number(low)}${low < 0 || high < 0 ? " to " : "–"}${withUnit(high, unit === "share" ? "" : unit)}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${number(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function moment(time) {
  return time ? new Date(1000 * time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "";
}

export function plural(count, word) {
  return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
}

// Control characters, invisible ones, and those that change the direction of the text.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** A text as nodes: invisible characters are shown by their numbers, matches of the search are marked. */
export function visibleText(text, wanted = "") {
  const nodes = [];
  let from = 0;
  const plain = (part) => nodes.push(...marked(part, wanted));
  for (const match of text.matchAll(HIDDEN)) {
    plain(text.slice(from, match.index));
    nodes.push(h("span", { class: "ctrl" }, `‹U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`));
    from = match.index + match[0].length;
  }
  plain(text.slice(from));
  return nodes;
}

function marked(text, wanted) {
  if (!wanted) return text ? [text] : [];
  const nodes = [];
  const low = text.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    nodes.push(text.slice(from, at), h("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...nodes, text.slice(from)].filter((node) => node !== "");
}

/** A sentence as nodes: the parts between backticks are code. */
export function sentence(text) {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}
