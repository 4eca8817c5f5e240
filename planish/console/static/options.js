// The options of one run, or of several side by side, and the code that made the run.

import { get } from "./api.js";
import { debounce, fill, h, table } from "./dom.js";

export async function optionsView(area, { runs, signal }) {
  const details = await Promise.all(runs.map((run) => get("run", { run }, signal)));
  const names = [...new Set(details.flatMap((one) => Object.keys(one.config)))];
  const text = (one, name) => (name in one.config ? one.config[name] : "–");
  const search = h("input", { type: "search", placeholder: "option or value", "aria-label": "search options" }), list = h("div");
  const onlyDifferent = h("input", { type: "checkbox", checked: runs.length > 1 });
  function draw() {
    const word = search.value.toLowerCase();
    const rows = names.filter((name) => (!onlyDifferent.checked || new Set(details.map((one) => text(one, name))).size > 1)
      && (!word || name.toLowerCase().includes(word) || details.some((one) => text(one, name).toLowerCase().includes(word))));
    fill(list, table([{ title: "Option", value: (name) => h("code", {}, name) },
      ...details.map((one) => ({ title: one.id, wide: true, value: (name) => h("code", {}, text(one, name)) }))], rows, { caption: "options" }));
  }
  search.addEventListener("input", debounce(draw, 120));
  onlyDifferent.addEventListener("change", draw);
  area.append(h("div", { class: "bar" }, h("h1", {}, "Options"), search, runs.length > 1 && h("label", {}, onlyDifferent, " only those that differ")), list,
    ...details.filter((one) => one.code_diff).map((one) => h("details", { class: "card" }, h("summary", {}, `Code of ${one.id}`), h("pre", {}, one.code_diff))));
  if (runs.length === 1) onlyDifferent.checked = false;
  draw();
}
