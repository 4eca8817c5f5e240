// The checkpoints of a run, with the commands that use them.

import { get, poll } from "./api.js";
import { fileSize, fill, h, notice, number, table } from "./dom.js";

export async function checkpointsView(area, { run, signal }) {
  let last = null;
  await poll(async () => {
    const answer = await get("checkpoints", { run }, signal);
    if (answer === last) return;
    last = answer;
    if (!answer.checkpoints.length) return fill(area, notice("This run has no checkpoint yet.", "It saves one every save_every steps, and one at its end."));
    fill(area, h("h1", {}, "Checkpoints"), answer.note && h("p", { class: "soft" }, answer.note), table([
      { title: "Name", value: (row) => row.name },
      { title: "After step", number: true, value: (row) => number(row.batch) },
      { title: "Weights", wide: true, value: (row) => [row.sampler_path, row.state_path].filter(Boolean).map((path) => h("div", {}, h("code", {}, path))) },
      { title: "Size", number: true, value: (row) => fileSize(row.size_bytes) },
      { title: "Expires", value: (row) => row.expires ?? "–" },
      { title: "Score", number: true, value: (row) => (row.score ? `${row.score[0]} ${number(row.score[1])}` : "–") },
      { title: "Commands", wide: true, value: (row) => h("details", {}, h("summary", {}, "show"), row.commands.map(([what, command]) => h("div", {}, h("div", { class: "soft" }, what), copyable(command)))) },
    ], answer.checkpoints, { caption: "checkpoints" }), answer.lineage && h("p", { class: "soft" }, `The run began with the weights of ${answer.lineage}.`));
  }, 3000, signal);
}

export function copyable(command) {
  const said = h("span", { class: "soft", role: "status" });
  return h("div", { class: "command" }, h("code", {}, command), h("button", { class: "quiet", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(command);
      said.textContent = "copied";
    } catch {
      said.textContent = "select it and copy it";
    }
  } } }, "Copy"), said);
}
