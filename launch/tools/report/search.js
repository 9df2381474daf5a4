// Searches samples: by their numbers, which are always here, and by texts, where the file has them.

import { piece } from "./store.js";

/** A value of a column, which may be one value for all samples. */
export const columnAt = (column, i) => (Array.isArray(column) ? column[i] : column);

export class Sampled {
  constructor() {
    this.files = [];
    this.groups = [];
    this.byRow = new Map();
  }

  /** Adds files; one of the same name replaces the old one. */
  take(files) {
    const known = new Map(this.files.map((file) => [file.name, file]));
    for (const file of files) known.set(file.name, file);
    this.files = [...known.values()].sort((a, b) => a.step - b.step || (a.kind < b.kind ? 1 : -1));
    this.groups = this.files.flatMap((file) => groupsOf(file));
    this.byRow = new Map();
    for (const group of this.groups) {
      const own = this.byRow.get(group.row);
      if (own) own.push(group);
      else this.byRow.set(group.row, [group]);
    }
    const paid = this.groups.filter((g) => g.mean !== null);
    this.least = paid.reduce((low, g) => Math.min(low, g.low), Infinity);
    this.most = paid.reduce((high, g) => Math.max(high, g.high), -Infinity);
  }

  /** The values of a column, "failure" or "finish", without nothing. */
  valuesOf(column) {
    const values = new Set();
    for (const file of this.files) for (const value of [file[column]].flat()) if (value) values.add(value);
    return [...values].sort();
  }
}

function groupsOf(file) {
  let from = 0;
  return (file.found ??= file.groups.map(([uid, source, size], number) => {
    const rewards = [];
    for (let i = from; i < from + size; i++) if (columnAt(file.reward, i) !== null) rewards.push(columnAt(file.reward, i));
    const low = rewards.length ? rewards.reduce((a, b) => Math.min(a, b)) : null;
    const high = rewards.length ? rewards.reduce((a, b) => Math.max(a, b)) : null;
    const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
    const group = { file, number, uid, source, from, size, judged: rewards.length, mean, low, high, row: `${file.kind} ${uid.replace(/#\d+$/, "")}`, there: number < file.kept };
    from += size;
    return group;
  }));
}

/** The numbers of the i-th sample of a group. */
export function sampleOf(group, i) {
  const { file } = group;
  const n = group.from + i;
  return { n, reward: columnAt(file.reward, n), advantage: columnAt(file.advantage, n), length: columnAt(file.length, n), finish: columnAt(file.finish, n), failure: columnAt(file.failure, n), version: columnAt(file.version, n) };
}

export const NOTHING = { set: "", step: "", words: "", failure: "", finish: "", least: "", most: "", shortest: "", longest: "", spread: "", sort: "" };

/** "7", "3-9" or nothing as [first, last]. */
function stepsOf(text) {
  const [first, last] = String(text).split(/[-–]/).map((part) => parseInt(part, 10));
  return Number.isNaN(first) ? [-Infinity, Infinity] : [first, Number.isNaN(last) || last === undefined ? first : last];
}

const bound = (text, otherwise) => (String(text).trim() === "" || Number.isNaN(Number(text)) ? otherwise : Number(text));

/** A function that says which samples of a group pass the filter; `textMatches` marks those whose text has the words. */
export function sampleFilter(filter, textMatches) {
  const [least, most] = [bound(filter.least, -Infinity), bound(filter.most, Infinity)];
  const [shortest, longest] = [bound(filter.shortest, -Infinity), bound(filter.longest, Infinity)];
  const anyReward = least === -Infinity && most === Infinity;
  const words = filter.words.trim().toLowerCase();
  return (group, i) => {
    const one = sampleOf(group, i);
    if (filter.failure && (filter.failure === "any" ? !one.failure : filter.failure === "none" ? one.failure : one.failure !== filter.failure)) return false;
    if (filter.finish && one.finish !== filter.finish) return false;
    if (!anyReward && (one.reward === null || one.reward < least || one.reward > most)) return false;
    if (one.length < shortest || one.length > longest) return false;
    return !words || group.uid.toLowerCase().includes(words) || (textMatches?.get(group.file.name)?.[one.n] ?? 0) > 0;
  };
}

const ORDERS = {
  "": null,
  newest: (a, b) => b.file.step - a.file.step,
  reward: (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
  worst: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity),
  spread: (a, b) => b.high - b.low - (a.high - a.low),
};

/** The groups with at least one sample that passes, in the chosen order. */
export function search(sampled, filter, textMatches) {
  const [first, last] = stepsOf(filter.step);
  const passes = sampleFilter(filter, textMatches);
  const found = sampled.groups.filter((group) => {
    if (filter.set && group.file.kind !== filter.set) return false;
    if (group.file.step < first || group.file.step > last) return false;
    if (filter.spread && (group.judged < 2 || (group.high - group.low > 1e-9) !== (filter.spread === "some"))) return false;
    for (let i = 0; i < group.size; i++) if (passes(group, i)) return true;
    return false;
  });
  return ORDERS[filter.sort] ? found.sort(ORDERS[filter.sort]) : found;
}

/** What a sample says: its completion, and in an episode what both sides said. */
function textsOf(texts, i) {
  const messages = columnAt(texts.transcript, i) ?? [];
  return [texts.text[i], ...messages.flatMap((m) => [m.content ?? "", m.reasoning_content ?? "", m.tool_calls ? JSON.stringify(m.tool_calls) : ""])];
}

/** Reads the texts of the filter's steps. Returns, by file, 1 for each sample whose prompt or completion has the words, and the unreadable files. */
export async function searchTexts(sampled, filter, progress, cancelled) {
  const words = filter.words.trim().toLowerCase();
  const [first, last] = stepsOf(filter.step);
  const files = sampled.files.filter((f) => f.kept && f.step >= first && f.step <= last && (!filter.set || f.kind === filter.set));
  const textMatches = new Map();
  const unread = [];
  for (const [n, file] of files.entries()) {
    const texts = await piece(`texts-${file.name}`).catch(() => null);
    if (cancelled()) return null;
    progress(n + 1, files.length);
    if (!texts) {
      unread.push(file.name);
      continue;
    }
    const hits = new Uint8Array(file.count);
    for (const group of file.found.slice(0, file.kept)) {
      const inPrompt = texts.prompt[group.number].toLowerCase().includes(words);
      for (let i = group.from; i < group.from + group.size; i++) hits[i] = inPrompt || textsOf(texts, i).some((text) => text.toLowerCase().includes(words)) ? 1 : 0;
    }
    textMatches.set(file.name, hits);
  }
  return { textMatches, unread };
}
