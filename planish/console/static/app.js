// The frame of all views: navigation, selected runs, theme and keys.

import { exported, RequestError, SHOWN_VIEWS } from "./api.js";
import { chatView } from "./chat.js";
import { checkpointsView } from "./checkpoints.js";
import { curvesView } from "./curves.js";
import { fill, h, notice, runColor } from "./dom.js";
import { evalsView } from "./evals.js";
import { evaluationsView } from "./evaluations.js";
import { findingsView } from "./findings.js";
import { groupView } from "./group.js";
import { optionsView } from "./options.js";
import { go, link, onMove, place } from "./place.js";
import { rolloutsView } from "./rollouts.js";
import { runsView } from "./runs.js";
import { loginForm, serverView } from "./server.js";
import { sessionsView, sessionView } from "./sessions.js";

const VIEWS = {
  server: { title: "Server", show: serverView, needsNoRun: true },
  sessions: { title: "Sessions", show: sessionsView, needsNoRun: true },
  session: { title: "Session", show: sessionView, needsNoRun: true, isHidden: true },
  runs: { title: "Runs", show: runsView, needsNoRun: true },
  curves: { title: "Curves", show: curvesView, several: true },
  rollouts: { title: "Rollouts", show: rolloutsView },
  group: { title: "Group", show: groupView, isHidden: true },
  evaluations: { title: "Evaluations", show: (area, page) => (page.run ? evaluationsView : evalsView)(area, page), needsNoRun: true, several: true },
  checkpoints: { title: "Checkpoints", show: checkpointsView },
  findings: { title: "What is wrong", show: findingsView },
  chat: { title: "Chat", show: chatView },
  options: { title: "Options", show: optionsView, several: true },
};
const KEYS = [["j / k", "next, previous row or answer"], ["Enter", "open it"], ["/", "search"], ["g then r c o e p w", "go to Runs, Curves, rOllouts, Evaluations, checkPoints, What is wrong"], ["t", "light or dark"], ["?", "these keys"]];
const GO_KEYS = { r: "runs", c: "curves", o: "rollouts", e: "evaluations", p: "checkpoints", w: "findings" };

const main = document.getElementById("view");
const tabs = document.getElementById("tabs");
const chips = document.getElementById("chips");
let leaving = new AbortController();
let keyHandler = null;

function drawFrame(view, runs) {
  const shown = Object.entries(VIEWS).filter(([name, { isHidden }]) => !isHidden && SHOWN_VIEWS.includes(name));
  fill(tabs, ...shown.map(([name, { title, several }]) => {
    const isHere = name === view || (view === "group" && name === "rollouts") || (view === "session" && name === "sessions");
    const address = name === "runs" ? link("runs", { run: runs }) : link(name, { run: several ? runs : runs.slice(0, 1) });
    return h("a", { href: address, "data-go": true, "aria-current": isHere ? "page" : null }, title);
  }));
  fill(chips, ...runs.map((run, index) => h("span", { class: "run-chip", vars: { c: runColor(index) } }, run,
    runs.length > 1 && h("a", { href: link(view, { run: runs.filter((other) => other !== run) }), "data-go": true, "aria-label": `remove ${run}` }, "×"))));
  document.title = `${VIEWS[view]?.title ?? view}${runs.length ? ` · ${runs.join(", ")}` : ""} · planish`;
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  keyHandler = null;
  const signal = leaving.signal, { view, params } = place(), runs = params.getAll("run");
  drawFrame(view, runs);
  const chosen = SHOWN_VIEWS.includes(view) ? VIEWS[view] : null;
  if (!chosen) return fill(main, notice("There is no such view.", "Choose one above."));
  if (!runs.length && !chosen.needsNoRun) {
    return fill(main, notice("No run is chosen.", h("a", { href: link("runs"), "data-go": true }, "Choose one in the list of runs.")));
  }
  const area = h("div", { class: `view ${view}` });
  fill(main, area);
  main.setAttribute("aria-busy", "true");
  try {
    await chosen.show(area, { runs, run: runs[0], params, signal, onKey: (handler) => { keyHandler = handler; } });
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (error.status === 401) return fill(area, loginForm(error.message, show));
    if (!(error instanceof RequestError)) console.error(error);
    fill(area, notice("This view cannot be shown.", error.message));
  } finally {
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
}

function toggleTheme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const next = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem("planish-theme", next); } catch { /* storage is off */ }
  dispatchEvent(new Event("themechange"));
}

let awaitsPlace = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  if (target instanceof Element && /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (awaitsPlace) {
    awaitsPlace = false;
    if (Object.hasOwn(GO_KEYS, event.key)) go(link(GO_KEYS[event.key], { run: place().params.getAll("run") }));
    return;
  }
  if (event.key === "g") awaitsPlace = true;
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "/") {
    const search = main.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  } else keyHandler?.(event);
});

try {
  const theme = localStorage.getItem("planish-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is off */ }
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
fill(document.getElementById("key-list"), ...KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]));
onMove(show);
show();
