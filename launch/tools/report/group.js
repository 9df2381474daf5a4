// A group: its prompt, its completions side by side, their tokens colored, and the same prompt at other steps.

import { h, number, plural, visibleText } from "./dom.js";
import { piece } from "./store.js";
import { columnAt, sampleFilter, sampleOf } from "./search.js";
import { COLORS, colorer, scaleOf } from "./tokens.js";
import { conversation } from "./conversation.js";

const EXPLAINED = {
  logprob: "the engine's log-prob of each token: the stronger the color, the less likely the token",
  advantage: "the advantage of each token: blue is pushed up, orange down",
  gap: "the policy's log-prob before the step minus the engine's: the difference should be rounding only",
};

/** The color of a reward between the lowest and the highest of all samples. */
export function tint(reward, least, most) {
  if (reward === null) return "transparent";
  const share = most > least ? (reward - least) / (most - least) : 1;
  return share >= 0.5 ? `rgba(var(--high), ${0.15 + 0.85 * (2 * share - 1)})` : `rgba(var(--low), ${0.15 + 0.85 * (1 - 2 * share)})`;
}

/** `view` has the filter, the matches of its words, the color mode, and functions that open another group or mode. */
export async function groupView(group, sampled, view) {
  const { file } = group;
  const texts = group.there ? await piece(`texts-${file.name}`) : null;
  const tokens = texts && view.color !== "plain" ? await piece(`tokens-${file.name}`) : null;
  const why = tokens ? whyNotColored(tokens, view.color) : "";
  const passes = sampleFilter(view.filter, view.textMatches);
  const members = Array.from({ length: group.size }, (_, i) => sampleOf(group, i));
  const scale = tokens && !why ? scaleOf(tokens, members, view.color) : 0;
  const words = view.filter.words.trim().toLowerCase();
  return [
    h(
      "div",
      { class: "tools" },
      h("b", { class: "mono", style: "overflow-wrap:anywhere" }, visibleText(group.uid)),
      h("span", {}, `${file.kind === "eval" ? "evaluation at" : "training,"} step ${file.step}`),
      group.source ? h("span", {}, visibleText(group.source)) : "",
      h("span", {}, group.mean === null ? "no verdict" : `mean reward ${number(group.mean)}`),
      group.high === group.low && group.judged > 1 ? h("span", {}, members.every((one) => one.reward === null || one.advantage === 0) ? "equal rewards: it teaches nothing" : "equal rewards") : "",
    ),
    samePrompt(group, sampled, view),
    texts?.prompt[group.number] ? h("div", { class: "prompt mono", dir: "auto" }, visibleText(texts.prompt[group.number], words)) : "",
    texts ? colors(view, why, scale) : h("p", { class: "missing" }, "The texts of this group are not in this file; its numbers are."),
    h("div", { class: `completions${texts?.transcript ? " episodes" : ""}` }, members.map((one, i) => completion(one, i, { group, texts, tokens: why ? null : tokens, scale, words, view, out: !passes(group, i), sampled }))),
  ];
}

function whyNotColored(tokens, mode) {
  if (!tokens.words) return "The run's tokenizer is not on the machine where this page was made, so the text cannot be split into tokens.";
  if (mode === "logprob" && !tokens.logprob) return "No log-probs were saved.";
  if (mode === "gap" && !tokens.gap)
    return "The policy's own log-probs were not computed separately: neither evaluations nor a single update per step need them. The curve of mismatch/mean_abs shows their mean gap.";
  return "";
}

function colors(view, why, scale) {
  const button = (mode, text) => h("button", { "aria-pressed": String(view.color === mode), onclick: () => view.recolor(mode) }, text);
  return h(
    "div",
    { class: "tools", id: "colors" },
    h("span", {}, "color by"),
    Object.entries(COLORS).map(([mode, text]) => button(mode, text)),
    why ? h("span", {}, why) : "",
    !why && view.color !== "plain" ? legend(view.color, scale) : "",
    !why && EXPLAINED[view.color] ? h("span", { class: "faint" }, EXPLAINED[view.color]) : "",
  );
}

function legend(mode, scale) {
  const [from, to] = mode === "logprob" ? [0, -scale] : [-scale, scale];
  const ends = mode === "logprob" ? "transparent, rgba(var(--prob), var(--strength))" : "rgba(var(--low), var(--strength)), transparent, rgba(var(--high), var(--strength))";
  return h("span", { class: "scale" }, number(from), h("i", { style: `background:linear-gradient(90deg, ${ends})` }), number(to));
}

/** All groups of the same prompt, each with its mean reward. */
function samePrompt(group, sampled, view) {
  const all = sampled.byRow.get(group.row) ?? [];
  if (all.length < 2) return h("p", { class: "faint" }, "This prompt was sampled once.");
  const shown = all.length > 40 ? all.filter((g, i) => g === group || i % Math.ceil(all.length / 40) === 0 || i === all.length - 1) : all;
  return h(
    "div",
    { class: "strip", id: "alike" },
    `this prompt at ${plural(all.length, "step")}:`,
    shown.map((g) =>
      h(
        "button",
        { "aria-pressed": String(g === group), title: `mean reward ${number(g.mean)}`, onclick: () => view.open(g) },
        h("i", { style: `background:${tint(g.mean, sampled.least, sampled.most)}` }),
        `${g.file.step}`,
        h("span", { class: "faint" }, number(g.mean)),
      ),
    ),
  );
}

function completion(one, i, { group, texts, tokens, scale, words, view, out, sampled }) {
  const facts = [
    h("b", {}, `#${texts ? texts.index[one.n] : i}`),
    one.reward === null ? "" : h("span", {}, "reward ", h("b", {}, number(one.reward))),
    advantageOf(one, group),
    h("span", {}, plural(one.length, "token")),
    one.finish === "stop" ? "" : h("span", { style: "color:var(--warning)" }, one.finish === "length" ? "cut" : `out of ${one.finish}`),
    one.failure ? h("b", { style: "color:var(--problem)" }, one.failure) : "",
    view.versions ? h("span", {}, `weights ${one.version}`) : "",
  ];
  const more = [];
  if (texts) {
    const of = (column) => (Array.isArray(column) ? column[one.n] : column);
    if (of(texts.answer)) more.push(h("div", {}, "answer ", h("span", { class: "mono" }, visibleText(of(texts.answer)))));
    if (of(texts.detail)) more.push(h("div", {}, visibleText(of(texts.detail))));
    const parts = of(texts.components);
    if (parts && Object.keys(parts).length > 1) more.push(h("div", {}, Object.entries(parts).map(([k, v]) => `${k} ${number(v)}`).join(" · ")));
  }
  return h(
    "article",
    { class: `completion${out ? " out" : ""}`, style: `--tint:${tint(one.reward, sampled.least, sampled.most)}` },
    h("header", {}, facts),
    texts ? body(one, texts, tokens, view.color, scale, words) : "",
    more.length ? h("div", { class: "more" }, more) : "",
  );
}

function body(one, texts, tokens, mode, scale, words) {
  const color = tokens ? colorer(one, tokens, mode, scale) : null;
  const messages = columnAt(texts.transcript, one.n);
  if (messages?.length || (messages && color)) return conversation(one, { messages, scores: texts.turn_scores[one.n] }, tokens, color, words);
  return h("div", { class: "said", dir: "auto", tabindex: 0 }, color ? color(0) : visibleText(texts.text[one.n], words));
}

/** In a training step every reward has an advantage: a missing one is not finite. */
function advantageOf(one, group) {
  if (one.advantage !== null) return h("span", {}, `advantage ${one.advantage > 0 ? "+" : ""}${number(one.advantage)}`);
  return one.reward !== null && group.file.kind === "step" ? h("b", { style: "color:var(--problem)" }, "advantage not finite") : "";
}
