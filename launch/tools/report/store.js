// The data of the page: pieces inside the file, or fetched from `rlsys watch`.

import { $ } from "./dom.js";

export const live = document.documentElement.dataset.mode === "live";
const opened = new Map();

/** A piece by name, opened once. Null if the file does not have it. */
export function piece(name) {
  if (!opened.has(name)) {
    const data = live ? fetchData(name) : inflate(name);
    opened.set(name, data);
    data.catch(() => forget(name)); // it may succeed next time
  }
  return opened.get(name);
}

export function forget(name) {
  opened.delete(name);
}

async function inflate(name) {
  const element = $(`piece-${name}`);
  if (!element) return null;
  const text = atob(element.textContent);
  element.remove(); // frees its text
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** Fetches what the server has under a name now. */
export async function fetchData(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
