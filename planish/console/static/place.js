// The state of the page is its address, so every view has a link.

import { BASE, exported, SHOWN_VIEWS } from "./api.js";

const listeners = [];

/** Return the view's name and its parameters. An exported page keeps them behind "#". */
export function place() {
  const address = exported ? new URL(location.hash.slice(1) || exported.start, "http://exported") : new URL(location.href);
  const path = exported ? address.pathname : address.pathname.slice(BASE.length);
  return { view: path.replace(/^\/|\/$/g, "") || SHOWN_VIEWS[0], params: address.searchParams };
}

/** Return the address of a view. `params`: a value, or a list of values, by name. */
export function link(view, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(name, String(one));
  }
  const path = `/${view === SHOWN_VIEWS[0] ? "" : view}${query.size ? `?${query}` : ""}`;
  return exported ? `#${path}` : `${BASE}${path}`;
}

export function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  listeners.forEach((listener) => listener());
}

/** Change parameters of the present view, without a new entry of the history. */
export function setParams(changes, { silent = true } = {}) {
  const { view, params } = place();
  const merged = {};
  for (const name of new Set(params.keys())) merged[name] = params.getAll(name);
  Object.assign(merged, changes);
  history.replaceState(null, "", link(view, merged));
  if (!silent) listeners.forEach((listener) => listener());
}

export function onMove(listener) {
  listeners.push(listener);
  addEventListener("popstate", listener);
  if (exported) addEventListener("hashchange", listener);
}

document.addEventListener("click", (event) => {
  const anchor = event.target instanceof Element ? event.target.closest("a[data-go]") : null;
  if (!anchor || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(anchor.getAttribute("href"));
});
