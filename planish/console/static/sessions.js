// The sessions of a server, and the timeline of one.

import { BASE, get, poll } from "./api.js";
import { ago, debounce, duration, fill, fileSize, h, notice, number, table } from "./dom.js";
import { go, link, setParams } from "./place.js";
import { rowKeys } from "./runs.js";

export async function sessionsView(area, { params, signal, onKey }) {
  const search = h("input", { type: "search", value: params.get("text") ?? "", placeholder: "name, tag, metadata, id, open", "aria-label": "search sessions" });
  const list = h("div");
  let last = null;
  const draw = async () => {
    const answer = await get("sessions", { text: search.value }, signal);
    if (answer === last) return;
    last = answer;
    if (!answer.sessions.length) return fill(list, notice(search.value ? "No session matches the search." : "There are no sessions yet.", "A client opens one when it connects."));
    const tenants = new Set(answer.sessions.map((row) => row.tenant));
    fill(list, table([
      { title: "Session", value: (row) => h("a", { href: link("session", { session: row.id }), "data-go": true }, row.id) },
      { title: "Name", wide: true, value: (row) => [row.name, row.tags.map((tag) => h("span", { class: "tag" }, tag)), Object.entries(row.metadata).map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", {}, value)))] },
      tenants.size > 1 && { title: "Tenant", value: (row) => row.tenant },
      { title: "State", value: (row) => h("span", { class: `state ${row.ended === null ? "running" : "finished"}`, title: row.reason }, row.ended === null ? "open" : "ended") },
      { title: "Models", number: true, value: (row) => number(row.models) },
      { title: "Samplers", number: true, value: (row) => number(row.samplers) },
      { title: "Begun", number: true, value: (row) => ago(row.created) },
      { title: "Last used", number: true, value: (row) => ago(row.used) },
    ].filter(Boolean), answer.sessions, { caption: "Sessions", key: (row) => row.id, onOpen: (row) => go(link("session", { session: row.id })) }),
    answer.is_cut && h("p", { class: "soft" }, `Only the newest ${answer.sessions.length} are shown.`));
  };
  search.addEventListener("input", debounce(() => { setParams({ text: search.value }); draw(); }, 150));
  area.append(h("div", { class: "bar" }, h("h1", {}, "Sessions"), search), list);
  onKey(rowKeys(list));
  await poll(draw, 3000, signal);
}

const COLOURS = ["create_model", "forward_backward", "optim_step", "sample", "save_weights", "forward"];
const colour = (kind) => `kind${COLOURS.findIndex((name) => kind.startsWith(name)) + 1}`;

export async function sessionView(area, { params, signal }) {
  const session = params.get("session") ?? "";
  let last = null;
  await poll(async () => {
    const answer = await get("session", { session }, signal);
    if (last && JSON.stringify(answer.requests) === JSON.stringify(last.requests) && answer.ended === last.ended) return;
    last = answer;
    const isModel = (owner) => owner.includes(":train:");
    fill(area,
      h("div", { class: "bar" }, h("h1", {}, `Session ${answer.id}`), h("span", { class: `state ${answer.ended === null ? "running" : "finished"}` }, answer.ended === null ? "open" : "ended"),
        h("a", { class: "button", href: `${BASE}/trace?session=${encodeURIComponent(answer.id)}`, download: "" }, "Save for Perfetto")),
      h("p", { class: "facts" }, [answer.name, answer.sdk_version && `SDK ${answer.sdk_version}`, `tenant ${answer.tenant}`, answer.reason && `ended: ${answer.reason}`].filter(Boolean).join(" · ")),
      h("p", {}, answer.tags.map((tag) => h("span", { class: "tag" }, tag)), Object.entries(answer.metadata).map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", {}, value)))),
      answer.owners.some(isModel) && h("p", { class: "bar" }, answer.owners.filter(isModel).map((owner) => h("a", { class: "button", href: link("curves", { run: owner }), "data-go": true }, `Curves of ${owner}`))),
      answer.requests.length ? [
        h("section", { class: "card" }, h("h2", {}, "Timeline"), answer.num_left_out > 0 && h("p", { class: "soft" }, `${answer.num_left_out} older requests are left out here; the file for Perfetto has up to 100,000.`), timeline(answer)),
        h("section", { class: "card" }, h("h2", {}, "Requests"), table([
          { title: "Request", value: (row) => h("code", {}, row.id) },
          { title: "Kind", value: (row) => row.kind },
          { title: "State", value: (row) => h("span", { class: row.state === "failed" || row.state === "refused" ? "flag" : "soft" }, row.state) },
          { title: "Arrived", number: true, value: (row) => ago(row.accepted) },
          { title: "Waited", number: true, value: (row) => duration((row.begun ?? row.finished ?? answer.now) - row.accepted) },
          { title: "Ran", number: true, value: (row) => (row.begun === null ? "–" : duration((row.finished ?? answer.now) - row.begun)) },
          { title: "Size", number: true, hint: "of the request and of its result", value: (row) => `${fileSize(row.body_bytes)} / ${fileSize(row.result_bytes)}` },
          { title: "Message", wide: true, value: (row) => row.message ?? "" },
        ], answer.requests.slice(-200).reverse(), { caption: "the newest requests" })),
      ] : notice("The journal has no request of this session.", "The server removes requests some hours after it has answered them."));
  }, 3000, signal);
}

/** Rows of bars: one group of rows for each model and sampler, a pale bar for waiting and a full one for running. */
function timeline(answer) {
  const start = Math.min(...answer.requests.map((row) => row.accepted));
  const end = Math.max(...answer.requests.map((row) => row.finished ?? answer.now), start + 1e-3);
  const place = (time) => (1000 * (time - start)) / (end - start);
  const groups = answer.owners.map((owner) => [owner, lanes(answer.requests.filter((row) => row.owner === owner), answer.now)]).filter(([, rows]) => rows.length);
  const kinds = [...new Set(answer.requests.map((row) => row.kind))];
  return h("div", { class: "timeline" },
    h("p", { class: "legend" }, kinds.map((kind) => h("span", { class: `swatch ${colour(kind)}` }, kind)), h("span", { class: "soft" }, `${duration(end - start)} in all; pale: waiting`)),
    groups.map(([owner, rows]) => h("div", { class: "lane-group" }, h("code", { class: "soft" }, owner),
      rows.map((row) => h("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, row.flatMap((request) => bars(request, place, answer.now)))))));
}

function bars(request, place, now) {
  const end = request.finished ?? now, begun = request.begun ?? end;
  const bar = (from, to, name) => h("rect", { x: place(from), y: 1, width: Math.max(0.6, place(to) - place(from)), height: 8, class: name });
  return [bar(request.accepted, begun, `waiting ${colour(request.kind)}`), request.begun !== null && bar(begun, end, request.state === "failed" ? "failed" : colour(request.kind))].filter(Boolean);
}

/** Divide requests, sorted by arrival, into rows without overlaps; at most 12 rows are drawn. */
function lanes(requests, now) {
  const rows = [], ends = [];
  for (const request of requests) {
    let row = ends.findIndex((end) => end <= request.accepted);
    if (row < 0) row = rows.length < 12 ? rows.push([]) - 1 : ends.indexOf(Math.min(...ends));
    rows[row].push(request);
    ends[row] = request.finished ?? now;
  }
  return rows;
}
