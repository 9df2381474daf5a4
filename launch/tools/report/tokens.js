// The tokens of a sample, colored by a number that each has.

import { h, number, plural, visibleText } from "./dom.js";

const MAX_TOKENS = 3000; // of a sample that are colored
export const COLORS = { plain: "plain text", logprob: "log-prob", advantage: "advantage", gap: "policy − rollout" };

/** The number of each token in a mode, null where it is not finite: [tokens], or null. */
function valuesOf(one, tokens, mode) {
  if (mode === "logprob") return tokens.logprob[one.n]?.map((v) => v === null ? null : v / 1000) ?? null;
  if (mode === "gap") return tokens.gap[one.n];
  return tokens.advantage?.[one.n] ?? (one.advantage === null ? null : tokens.ids[one.n].map(() => one.advantage));
}

/** The number of the strongest color: the largest in the group; for log-probs from 2 to 5. */
export function scaleOf(tokens, members, mode) {
  let most = mode === "logprob" ? 2 : 0;
  for (const one of members) for (const v of valuesOf(one, tokens, mode) ?? []) most = Math.max(most, Math.abs(v));
  return mode === "logprob" ? Math.min(most, 5) : most;
}

/** A function that colors the tokens of a sample from one to another: all of an answer, or a turn of an episode. */
export function colorer(one, tokens, mode, scale) {
  const ids = tokens.ids[one.n];
  const values = valuesOf(one, tokens, mode);
  const all = { logprob: valuesOf(one, tokens, "logprob"), gap: tokens.gap?.[one.n], advantage: valuesOf(one, tokens, "advantage") };
  const token = (t) => {
    const numbers = Object.entries(all).map(([name, own]) => (own ? `${COLORS[name]} ${own[t] === null ? "not finite" : number(own[t])}` : "")).filter(Boolean);
    const v = values ? values[t] : 0;
    const strength = scale ? Math.min(1, Math.abs(v) / scale) : 0;
    const base = mode === "logprob" ? "--prob" : v > 0 ? "--high" : "--low";
    const title = `${JSON.stringify(tokens.words[ids[t]])} · token ${tokens.known[ids[t]]} · ${numbers.join(" · ")}`;
    return h("span", { class: v === null ? "t broken" : "t", title, style: `background:rgba(var(${base}), calc(var(--strength) * ${strength.toFixed(3)}))` }, visibleText(tokens.words[ids[t]]));
  };
  return (from, to = ids.length) => {
    const last = Math.min(to, Math.max(from, MAX_TOKENS));
    const part = Array.from({ length: last - from }, (_, i) => token(from + i));
    return to > last ? [...part, h("span", { class: "ctrl" }, ` … ${plural(to - last, "more token")}; plain text shows all`)] : part;
  };
}
