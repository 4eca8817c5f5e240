// What a server does now: queue, models and adapters in memory, tokens per second, disk.

import { get, poll, post } from "./api.js";
import { duration, fileSize, fill, h, notice, number, table } from "./dom.js";
import { link } from "./place.js";

export async function serverView(area, { signal }) {
  let last = null;
  await poll(async () => {
    const answer = await get("server", {}, signal);
    if (answer === last) return;
    last = answer;
    const ofTenants = answer.tenant === null;
    const tenant = { title: "Tenant", value: (row) => row.tenant };
    fill(area,
      h("div", { class: "bar" }, h("h1", {}, "Server"), h("span", { class: "soft" }, ofTenants ? "all tenants" : `tenant ${answer.tenant}`), logOut()),
      answer.disk_is_full && h("p", { class: "problems" }, "The server takes no new work, because the disk or the memory is full."),
      h("p", { class: "facts" }, `Base models: ${answer.base_models.join(", ")}`),
      h("section", { class: "card" }, h("h2", {}, "Queue"), answer.queue.length ? table([
        ofTenants && tenant,
        { title: "Request", value: (row) => row.kind },
        { title: "Waiting", number: true, value: (row) => number(row.waiting) },
        { title: "Running", number: true, value: (row) => number(row.running) },
        { title: "Oldest", number: true, hint: "time since the oldest of these requests arrived", value: (row) => duration(row.oldest) },
      ].filter(Boolean), answer.queue, { caption: "unanswered requests", narrow: true }) : h("p", { class: "soft" }, "No request waits or runs.")),
      h("section", { class: "card" }, h("h2", {}, "Tokens per second"), rates(answer.rates, ofTenants)),
      h("section", { class: "card" }, h("h2", {}, "Open models and samplers"), answer.models.length ? table([
        ofTenants && tenant,
        { title: "Id", value: (row) => (row.kind === "model" ? h("a", { href: link("curves", { run: row.id }), "data-go": true }, row.id) : h("a", { href: link("session", { session: row.id.split(":")[0] }), "data-go": true }, row.id)) },
        { title: "Kind", value: (row) => row.kind },
        { title: "Base model", value: (row) => row.base_model },
        { title: "In memory", value: (row) => (row.is_resident ? "yes" : "no, it is loaded when it is used") },
        { title: "Adapter", number: true, value: (row) => (row.bytes ? fileSize(row.bytes) : "none") },
      ].filter(Boolean), answer.models, { caption: "open models and samplers" }) : h("p", { class: "soft" }, "None is open.")),
      h("section", { class: "card" }, h("h2", {}, "Checkpoints on disk"), Object.keys(answer.storage).length ? table([
        { title: "Tenant", value: ([name]) => name },
        { title: "Size", number: true, value: ([, size]) => fileSize(size) },
        { title: "Limit", number: true, value: () => (answer.storage_limit >= 2 ** 50 ? "none" : fileSize(answer.storage_limit)) },
      ], Object.entries(answer.storage), { caption: "size of checkpoints", narrow: true }) : h("p", { class: "soft" }, "There is none.")),
      answer.machine && machine(answer.machine));
  }, 2000, signal);
}

function rates(byTenant, ofTenants) {
  const rows = Object.entries(byTenant);
  if (!rows.length) return h("p", { class: "soft" }, "No token since this page was opened.");
  return table([
    ofTenants && { title: "Tenant", value: ([name]) => name },
    { title: "Sampled", number: true, value: ([, rate]) => number(rate.sampled_tokens) },
    { title: "Prompts", number: true, value: ([, rate]) => number(rate.prompt_tokens) },
    { title: "Trained", number: true, value: ([, rate]) => number(rate.trained_tokens) },
  ].filter(Boolean), rows, { caption: "tokens per second over the last minute", narrow: true });
}

/** What only the operator sees: each with its limit. */
function machine(now) {
  const rows = [
    ["Sequences that are sampled", number(now.sampling[0]), `${now.sampling[1]} slots; ${now.waiting_sequences} requests wait`],
    ["Training operations", number(now.training[0]), `${now.training[1]} slots; ${now.waiting_training} wait`],
    ["Adapters in memory", fileSize(now.adapter_bytes), `at most ${fileSize(now.adapter_limit)}`],
    ["Requests in memory", fileSize(now.request_bytes), `at most ${fileSize(now.request_limit)}`],
    ["Results in memory", fileSize(now.result_bytes), `at most ${fileSize(now.result_limit)}`],
    ["Memory of the process", fileSize(now.resident_bytes), ""],
    ["Free disk", fileSize(now.free_disk_bytes), `no new work below ${fileSize(now.min_free_disk_bytes)}`],
    ["Database", fileSize(now.database_bytes + now.body_bytes), "journal, requests and results"],
    ["Unnamed samplers on disk", fileSize(now.unnamed_sampler_bytes), ""],
    ["Open sessions", number(now.open_sessions), ""],
  ];
  return h("section", { class: "card" }, h("h2", {}, "Machine"), table([
    { title: "", value: ([name]) => name },
    { title: "Now", number: true, value: ([, value]) => value },
    { title: "Limit", value: ([, , limit]) => h("span", { class: "soft" }, limit) },
  ], rows, { caption: "memory, slots and disk", narrow: true }));
}

function logOut() {
  if (!document.documentElement.dataset.keys) return null;
  return h("button", { on: { click: async () => { await post("logout", {}); location.reload(); } } }, "Log out");
}

/** A form for the API key, in place of a view that needs one. */
export function loginForm(message, onDone) {
  const key = h("input", { type: "password", "aria-label": "API key", autocomplete: "current-password", required: true });
  const said = h("p", { class: "soft", role: "status" }, message);
  const send = async (event) => {
    event.preventDefault();
    try {
      await post("login", { key: key.value });
      onDone();
    } catch (error) {
      said.textContent = error.message;
      said.className = "flag";
    }
  };
  return h("form", { class: "notice login", on: { submit: send } }, h("strong", {}, "API key"), said, h("div", { class: "bar" }, key, h("button", {}, "Show my runs")));
}
