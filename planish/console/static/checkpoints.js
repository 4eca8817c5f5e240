// The checkpoints of a run, with the commands that use them.

import { actionsAllowed, get, poll, post } from "./api.js";
import { fileSize, fill, h, notice, number, table } from "./dom.js";

export async function checkpointsView(area, { run, signal }) {
  const head = h("div", { class: "bar" }), list = h("div"), resume = h("div");
  area.append(head, list, resume);
  const allowed = await actionsAllowed(signal);
  let last = null;
  await poll(async () => {
    const answer = await get("checkpoints", { run }, signal);
    if (answer === last) return;
    last = answer;
    fill(head, h("h1", {}, "Checkpoints"), h("span", { class: `state ${answer.state}` }, answer.state),
      answer.state === "running" && allowed && act("Stop after this step", "stop", { run }),
      resumable(answer) && allowed && act("Resume", "resume", { run }));
    fill(resume, resumable(answer) && answer.command && [h("p", { class: "soft" }, "The run resumes with the command that started it:"), copyable(answer.command)]);
    if (!answer.checkpoints.length) return fill(list, notice("This run has no checkpoint yet.", "It saves one every save_every steps, and one at its end."));
    fill(list, answer.note && h("p", { class: "soft" }, answer.note), table([
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

const resumable = ({ state }) => state === "stopped" || state === "crashed";

/** A button that sends an action and says what came of it. */
export function act(label, action, request) {
  const said = h("span", { class: "soft", role: "status" });
  const button = h("button", { on: { click: async () => {
    button.disabled = true;
    said.textContent = "…";
    try {
      said.textContent = (await post(action, request)).message;
    } catch (error) {
      said.textContent = error.message;
      button.disabled = false;
    }
  } } }, label);
  return h("span", { class: "bar" }, button, said);
}
