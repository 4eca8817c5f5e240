// A chat with one checkpoint, or with two side by side.

import { actionsAllowed, get, ON_SERVER, postParts } from "./api.js";
import { field, fill, h, notice, number, select } from "./dom.js";
import { setParams } from "./place.js";

export async function chatView(area, { run, params, signal }) {
  const { checkpoints } = await get("checkpoints", { run }, signal);
  const base = ON_SERVER ? (await get("run", { run }, signal)).config.model_name : "";
  const choices = [[base, "base model"], ...checkpoints.map((row) => [row.sampler_path ?? row.state_path, row.batch === null ? row.name : `after step ${row.batch}`])];
  if (!ON_SERVER && !(await actionsAllowed(signal))) {
    const newest = choices.at(1)?.[0];
    return area.append(notice("The pages of this console cannot sample.", "Start it with --allow-actions, and open the address that it prints. In a terminal:", h("code", {}, `planish chat${newest ? ` --model ${newest}` : ""}`)));
  }
  const chosen = [params.get("first") ?? choices.at(1)?.[0] ?? base, params.get("second") ?? "none"];
  const conversations = [[], []], columns = [h("div", { class: "conversation", "aria-live": "polite" }), h("div", { class: "conversation", "aria-live": "polite" })];
  const temperature = h("input", { type: "number", value: params.get("temperature") ?? "0.7", min: "0", step: "0.1" });
  const tokens = h("input", { type: "number", value: params.get("tokens") ?? "256", min: "1" });
  const text = h("textarea", { rows: "3", "aria-label": "message", placeholder: "Message; Enter sends it, Shift+Enter begins a line" });
  const button = h("button", { type: "submit" }, "Send");
  const pick = (place, options) => select(options, chosen[place], (value) => {
    chosen[place] = value;
    conversations[place].length = 0;
    setParams({ first: chosen[0], second: chosen[1] });
    draw();
  }, place ? "second model" : "first model");
  function draw() {
    columns[1].hidden = chosen[1] === "none";
    columns.forEach((column, place) => fill(column, conversations[place].map(message)));
  }
  async function send(event) {
    event.preventDefault();
    const content = text.value.trim();
    if (!content || button.disabled) return;
    text.value = "";
    button.disabled = true;
    await Promise.all([0, 1].filter((place) => chosen[place] !== "none").map((place) => answer(place, content)));
    button.disabled = false;
    text.focus();
  }
  async function answer(place, content) {
    const conversation = conversations[place];
    conversation.push({ role: "user", content });
    const messages = conversation.filter(({ error }) => !error).map(({ role, content: said }) => ({ role, content: said }));
    const reply = { role: "assistant", content: "", reasoning: "", note: "…" };
    conversation.push(reply);
    draw();
    try {
      const request = { model: chosen[place], messages, temperature: Number(temperature.value), max_tokens: Number(tokens.value), ...(ON_SERVER ? { stream: true, stream_options: { include_usage: true } } : { run }) };
      for await (const sent of postParts("chat", request, signal)) {
        const part = ON_SERVER ? partOfChunk(sent) : sent;
        if (part.error) throw new Error(part.error);
        reply.content += part.text ?? "";
        reply.reasoning += part.reasoning ?? "";
        reply.ending = part.stop_reason ?? reply.ending;
        if (part.num_tokens !== undefined) reply.note = `${number(part.num_tokens)} tokens, ended: ${reply.ending}`;
        draw();
      }
    } catch (error) {
      if (signal.aborted) return;
      reply.note = error.message;
      reply.error = true;
    }
    draw();
  }
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) send(event); });
  area.append(h("h1", {}, "Chat"),
    h("form", { class: "filters", on: { submit: send } }, field("First", pick(0, choices)), field("Second", pick(1, [["none", "none"], ...choices])),
      field("Temperature", temperature), field("Most tokens", tokens),
      h("button", { type: "button", on: { click: () => { conversations.forEach((one) => { one.length = 0; }); draw(); } } }, "New conversation"), h("div", { class: "message-box" }, text, button)),
    h("div", { class: "conversations" }, columns));
  draw();
  text.focus();
}

/** Return a part of an answer from a chunk of OpenAI's API. */
function partOfChunk({ choices: [choice] = [], usage, error }) {
  return { text: choice?.delta.content, reasoning: choice?.delta.reasoning_content, stop_reason: choice?.finish_reason, num_tokens: usage?.completion_tokens, error: error?.message };
}

function message({ role, content, reasoning, note, error }) {
  return h("article", { class: `message ${role}` }, h("h2", {}, role === "user" ? "You" : "Model"), reasoning && h("details", {}, h("summary", {}, "reasoning"), h("div", { class: "text" }, reasoning)),
    h("div", { class: "text" }, content), note && h("p", { class: error ? "flag" : "soft" }, note));
}
