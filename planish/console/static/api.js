// Requests to the console, and the data of an exported page, which has no console to ask.

import { savedGroup, savedRollouts } from "./saved_rollouts.js";

const root = document.documentElement;
const embedded = document.getElementById("export-data");
export const exported = embedded ? JSON.parse(embedded.textContent) : null;
export const BASE = root.dataset.base ?? "";
const cache = new Map();

/** The names of the views that this page has; the first one is at the address of the console itself. */
export const SHOWN_VIEWS = exported ? exported.views : root.dataset.views.split(" ");

export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Return the path of a request in its canonical form: parameters sorted, empty ones left out. */
export function requestPath(path, params = {}) {
  const pairs = Object.entries(params).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((one) => one !== null && one !== undefined && one !== "").map((one) => [name, String(one)]));
  const query = new URLSearchParams(pairs.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))).toString();
  return query ? `${path}?${query}` : path;
}

/** Return the answer of the console. The same object again means that nothing has changed. */
export async function get(path, params = {}, signal) {
  const key = requestPath(path, params);
  if (exported) {
    const answer = { rollouts: savedRollouts, group: savedGroup }[path];
    if (answer) return answer(exported.rollouts[params.run], params);
    if (!(key in exported.answers)) throw new RequestError("This exported page does not contain it. Open the run with planish console.");
    return exported.answers[key];
  }
  const known = cache.get(key);
  let response;
  try {
    response = await fetch(`${BASE}/api/${key}`, { signal, headers: known ? { "If-None-Match": known.etag } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The console does not answer. Is planish console still running?");
  }
  if (response.status === 304 && known) return known.answer;
  const answer = await response.json().catch(() => ({ error: `The console answered with status ${response.status}.` }));
  if (!response.ok) throw new RequestError(answer.error ?? `status ${response.status}`, response.status);
  cache.delete(key);
  cache.set(key, { etag: response.headers.get("ETag") ?? "", answer });
  if (cache.size > 200) cache.delete(cache.keys().next().value);
  return answer;
}

/** Whether this is the console of a server, whose login allows chats. */
export const ON_SERVER = SHOWN_VIEWS.includes("server");

/** Return whether this browser may act on runs: the console allows it, and the page has its key. */
export async function actionsAllowed(signal) {
  return !exported && !ON_SERVER && (await get("actions", {}, signal)).allowed;
}

/** Send an action. The console takes it only from its own pages. */
export async function post(path, body, signal) {
  const response = await fetch(`${BASE}/api/${path}`, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-Planish-Console": "1" },
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new RequestError(answer.error ?? `The console answered with status ${response.status}.`);
  return answer;
}

/** Send an action whose answer comes in parts: JSON objects, each in a line of its own or of an event stream. */
export async function* postParts(path, body, signal) {
  const response = await fetch(`${BASE}/api/${path}`, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-Planish-Console": "1" },
  });
  if (!response.ok) throw new RequestError((await response.json().catch(() => ({}))).error ?? `The console answered with status ${response.status}.`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const text = line.replace(/^data: /, "");
      if (text.startsWith("{")) yield JSON.parse(text);
    }
    if (done) return;
  }
}

/** Call `work` now and then every `milliseconds`, until `signal` aborts. A hidden page pauses. The first failure
 * is the caller's; later ones are shown above the page, which keeps what it has and tries again. */
export async function poll(work, milliseconds, signal) {
  await work();
  showStale(null);
  const turn = async () => {
    if (signal.aborted) return;
    try {
      if (!document.hidden) {
        await work();
        showStale(null);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return location.reload();
      showStale(error);
      if (!(error instanceof RequestError)) console.error(error);
    }
    setTimeout(turn, milliseconds);
  };
  if (!signal.aborted && !exported) setTimeout(turn, milliseconds);
}

function showStale(error) {
  const stale = document.getElementById("stale");
  stale.hidden = !error;
  stale.textContent = error ? `This page is not up to date. ${error.message}` : "";
}
