// The data of the page: pieces inside the file, or on the server that watches the run.

import { $ } from "./dom.js";

export const live = document.documentElement.dataset.mode === "live";
const opened = new Map();

/** A piece by name, opened once. Null where the file does not have it. */
export function piece(name) {
  if (!opened.has(name)) {
    const found = live ? asked(name) : inflated(name);
    opened.set(name, found);
    found.catch(() => forget(name)); // it may be had the next time
  }
  return opened.get(name);
}

export function forget(name) {
  opened.delete(name);
}

async function inflated(name) {
  const element = $(`piece-${name}`);
  if (!element) return null;
  const text = atob(element.textContent);
  element.remove(); // its text is of no more use
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** What the server that watches the run has by a name, now. */
export async function asked(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
