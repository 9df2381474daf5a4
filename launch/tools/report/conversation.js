// An episode as a conversation: what the environment said, the turns of the model, and why it ended.

import { h, number, plural, visibleText } from "./dom.js";

const ENDS = {
  stop: "ended by itself",
  length: "ended with a turn that was cut at rollout.max_new_tokens",
  turns: "ended because its turns were used up (episode.max_turns)",
  tokens: "ended because its tokens were used up (episode.max_tokens)",
  window: "ended because its window was full (episode.window)",
};

/** `color` colors own tokens, or is null where they are plain; `words` are marked. */
export function conversation(one, episode, tokens, color, words) {
  const observed = tokens?.observed?.[one.n] ?? null; // [[place, token, …], …]
  const parts = episode.messages.length ? fromMessages(episode, observed) : observed ? fromTokens(observed) : [];
  const scored = episode.scores.some(Boolean);
  return h(
    "div",
    { class: "talk", tabindex: 0 },
    parts.map((part) => (part.turn === undefined ? said(part, tokens, words) : turn(part, episode, observed, one.length, color, words, scored))),
    h("p", { class: "ended" }, one.failure ? `failed: ${one.failure}` : ENDS[one.finish] ?? one.finish, scored ? ` · sum of its turns ${number(sumOf(episode.scores))}` : ""),
  );
}

const sumOf = (values) => values.reduce((sum, v) => sum + v, 0);

/** The model's messages are the last answers; an environment may have written others as examples. */
function fromMessages({ messages, scores }, observed) {
  const answers = messages.filter((m) => m.role === "assistant");
  const own = new Set(answers.slice(Math.max(0, answers.length - scores.length)));
  const parts = [];
  let turns = 0;
  for (const message of messages) {
    const opens = !parts.length || parts.at(-1).turn !== undefined;
    parts.push(own.has(message) ? { message, turn: turns++ } : { message, tokens: opens ? observed?.[turns]?.slice(1) : null });
  }
  return parts;
}

/** Without a transcript, which a killed process leaves none of. */
function fromTokens(observed) {
  return observed.flatMap((entry, turn) => [{ tokens: entry.slice(1) }, { turn }]);
}

function said({ message, tokens: ids }, tokens, words) {
  const exact = ids && tokens.words ? ids.map((id) => tokens.words[id]).join("") : null;
  const name = message ? [message.role, message.name].filter(Boolean).join(" ") : "environment";
  return h(
    "div",
    { class: "turn" },
    h("header", {}, h("b", {}, visibleText(name)), ids ? h("span", { title: exact === null ? null : JSON.stringify(exact) }, plural(ids.length, "token")) : ""),
    h("div", { class: "said", dir: "auto" }, visibleText(message ? message.content ?? "" : exact ?? "", words)),
    (message?.tool_calls ?? []).map(callOf),
  );
}

function turn({ message, turn }, episode, observed, length, color, words, scored) {
  const [from, to] = [observed?.[turn]?.[0], observed?.[turn + 1]?.[0] ?? length];
  const text = message ? [message.reasoning_content ? h("span", { class: "faint" }, visibleText(message.reasoning_content, words), "\n") : "", visibleText(message.content ?? "", words)] : "";
  const colored = color && from !== undefined ? color(from, to) : null;
  if (!message && from === to) return ""; // the environment's last word has no turn
  return h(
    "div",
    { class: "turn own" },
    h("header", {}, h("b", {}, `turn ${turn + 1}`), colored ? h("span", {}, plural(to - from, "token")) : "", scored && episode.scores[turn] !== undefined ? h("span", {}, "score ", h("b", {}, number(episode.scores[turn]))) : ""),
    h("div", { class: "said", dir: "auto" }, colored ?? text),
    (message?.tool_calls ?? []).map(callOf),
  );
}

function callOf(call) {
  const { name, arguments: given } = call.function ?? {};
  const text = name && `${name}(${typeof given === "string" ? given : Object.entries(given ?? {}).map(([k, v]) => `${k}: ${JSON.stringify(v)}`).join(", ")})`;
  return h("div", { class: call.error ? "call bad" : "call" }, text ? h("span", { class: "mono" }, visibleText(text), " ") : "", visibleText(call.error ?? ""));
}
