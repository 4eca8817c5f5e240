// The list of runs: search, state, last reward, and groups of runs that differ in one option.

import { get, poll } from "./api.js";
import { ago, debounce, duration, fill, h, notice, number, runColor, sparkline, table } from "./dom.js";
import { go, link, setParams } from "./place.js";

const STATE_HINTS = {
  running: "a process works on it", finished: "all steps are done", stopped: "it can be resumed, and no step is repeated",
  crashed: "it can be resumed; steps after its last checkpoint are trained again", empty: "it has no step and no checkpoint yet", idle: "it takes requests, and got none for some minutes",
};

export async function runsView(area, { params, signal, onKey }) {
  const chosen = new Set(params.getAll("run"));
  const list = h("div"), sweeps = h("div"), bar = h("div", { class: "bar" });
  const search = h("input", { type: "search", value: params.get("q") ?? "", placeholder: "name, model, recipe, state", "aria-label": "search runs" });
  let answer = null, drawn = null;
  const show = () => { if (answer) { draw(); drawBar(); } };
  search.addEventListener("input", debounce(() => { setParams({ q: search.value }); show(); }, 120));

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = answer.runs.filter((run) => words.every((word) => `${run.id} ${run.model} ${run.recipe} ${run.state}`.toLowerCase().includes(word)));
    const focused = document.activeElement?.closest?.("tr")?.dataset.key;
    if (!answer.runs.length) {
      fill(list, notice("There are no runs here yet.", answer.roots.length ? `A run is a directory with metrics.jsonl. Looked in: ${answer.roots.join(", ")}` : "A client that creates a training model begins one.", "A run that starts appears by itself."));
    } else if (!found.length) fill(list, notice("No run matches the search."));
    else fill(list, table(COLUMNS(toggle, chosen), found, { caption: "Runs", key: (run) => run.id, onOpen: (run) => go(link("curves", { run: run.id })) }));
    if (focused) list.querySelector(`tr[data-key="${CSS.escape(focused)}"]`)?.focus();
    if (answer.is_cut) list.append(h("p", { class: "soft" }, `Only the first ${answer.runs.length} runs are shown.`));
    fill(sweeps, ...answer.sweeps.map((group) => sweep(group, answer.runs)));
  }
  function toggle(id) {
    if (chosen.has(id)) chosen.delete(id); else chosen.add(id);
    setParams({ run: [...chosen] });
    drawBar();
  }
  function drawBar() {
    const ids = [...chosen];
    fill(bar,
      h("a", { class: "button", href: link("curves", { run: ids }), "data-go": true, "aria-disabled": ids.length ? null : "true" }, ids.length > 1 ? `Compare ${ids.length} runs` : "Curves of the chosen run"),
      h("span", { class: "soft" }, ids.length ? ids.join(", ") : "Choose runs with the boxes, or open one with a click."));
  }
  area.append(h("div", { class: "bar" }, h("h1", {}, "Runs"), search), bar, list, sweeps);
  onKey(rowKeys(list));
  await poll(async () => {
    const next = await get("runs", {}, signal);
    if (next !== drawn) { answer = drawn = next; show(); }
  }, 2000, signal);
}

const COLUMNS = (toggle, chosen) => [
  { title: "", value: (run) => h("input", { type: "checkbox", "aria-label": `choose ${run.id}`, checked: chosen.has(run.id), on: { change: () => toggle(run.id) } }) },
  { title: "Run", wide: true, value: (run) => [h("a", { href: link("curves", { run: run.id }), "data-go": true }, run.id), run.num_problems ? h("span", { class: "flag", title: "some of its files are missing or damaged" }, "!") : null] },
  { title: "State", value: (run) => h("span", { class: `state ${run.state}`, title: STATE_HINTS[run.state] }, run.state) },
  { title: "Step", number: true, value: (run) => `${number(run.step)}${run.num_steps ? ` / ${run.num_steps}` : ""}` },
  { title: "Reward", number: true, hint: "newest value of the run's main metric", value: (run) => h("span", { title: run.reward_name }, number(run.reward)) },
  { title: "", value: (run) => sparkline(run.sparkline) },
  { title: "Model", value: (run) => h("span", { title: run.model }, run.model.split("/").at(-1) || "–") },
  { title: "Recipe", value: (run) => h("span", { title: run.recipe }, run.recipe.split(".").at(-1) || "–") },
  { title: "Time", number: true, hint: "sum of its steps", value: (run) => duration(run.seconds) },
  { title: "Changed", number: true, value: (run) => ago(run.updated) },
];

function sweep(group, runs) {
  const byId = new Map(runs.map((run) => [run.id, run]));
  const members = group.runs.filter(({ id }) => byId.has(id));
  return h("section", { class: "card" },
    h("div", { class: "bar" }, h("h2", {}, `${members.length} runs that differ in `, h("code", {}, group.option)),
      h("a", { class: "button", href: link("curves", { run: members.map(({ id }) => id).slice(0, 8) }), "data-go": true }, "Overlay")),
    table([
      { title: group.option, value: ({ value }) => h("code", {}, JSON.stringify(value)) },
      { title: "Run", wide: true, value: ({ id }) => h("a", { href: link("curves", { run: id }), "data-go": true }, id) },
      { title: "Step", number: true, value: ({ id }) => number(byId.get(id).step) },
      { title: "Reward", number: true, value: ({ id }) => number(byId.get(id).reward) },
      { title: "", value: ({ id }, index) => sparkline(byId.get(id).sparkline, runColor(index ?? 0)) },
    ], members, { caption: `runs that differ in ${group.option}`, narrow: true }));
}

/** Keys j and k move the focus between rows. */
export function rowKeys(list) {
  return (event) => {
    const offset = { j: 1, k: -1 }[event.key];
    if (!offset) return;
    const rows = [...list.querySelectorAll("tbody tr[tabindex]")], here = rows.indexOf(document.activeElement?.closest?.("tr"));
    rows[Math.max(0, Math.min(rows.length - 1, here < 0 ? 0 : here + offset))]?.focus();
  };
}
