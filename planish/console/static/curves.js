// The curves of one or several runs, while they grow.

import { exported, get, poll, SHOWN_VIEWS } from "./api.js";
import { Chart } from "./chart.js";
import { debounce, fill, h, notice, number, problems, select, table } from "./dom.js";
import { go, link, setParams } from "./place.js";

const SMOOTH = [["1", "no smoothing"], ["5", "mean of 5 steps"], ["10", "mean of 10 steps"], ["50", "mean of 50 steps"], ["200", "mean of 200 steps"]];
export const MAX_POINTS = 1000;

export async function curvesView(area, { runs, params, signal, onKey }) {
  const details = await Promise.all(runs.map((run) => get("run", { run }, signal)));
  const names = [...new Set(details.flatMap((one) => one.metrics.map(({ name }) => name)))].sort();
  const main = [...new Map(details.flatMap((one) => one.main_metrics.map((metric) => [metric.name, metric.question])))];
  const questions = new Map(main), given = params.getAll("metric");
  const state = {
    metrics: given.length ? given : main.map(([name]) => name).slice(0, Math.max(6, details[0]?.main_metrics.length ?? 0)),
    smooth: params.get("smooth") ?? "1", axis: params.get("axis") ?? "step",
    zoom: params.has("from") && params.has("to") ? [Number(params.get("from")), Number(params.get("to"))] : null,
  };
  const charts = new Map(), grid = h("div", { class: "panels" }), note = h("div"), status = h("div");
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.destroy()));

  const search = h("input", { type: "search", list: "metric-names", placeholder: `add one of ${names.length} metrics`, "aria-label": "add a metric" });
  const add = () => {
    const wanted = search.value.trim();
    const found = names.includes(wanted) ? [wanted] : names.filter((name) => wanted && name.includes(wanted)).slice(0, 6);
    if (!found.length) return;
    state.metrics = [...new Set([...found, ...state.metrics])];
    search.value = "";
    changed();
  };
  search.addEventListener("change", add);
  const resetZoom = h("button", { on: { click: () => zoomTo(null, null) } }, "Reset zoom");
  area.append(
    h("div", { class: "bar" }, search, h("datalist", { id: "metric-names" }, names.map((name) => h("option", { value: name }))),
      select(SMOOTH, state.smooth, (value) => { state.smooth = value; changed(); }, "smoothing"),
      select([["step", "by step"], ["time", "by training time"]], state.axis, (value) => { state.axis = value; state.zoom = null; changed(); }, "horizontal axis"),
      resetZoom, !exported && h("a", { class: "button", href: `export?${new URLSearchParams(runs.map((run) => ["run", run]))}`, download: "" }, "Save as one file")),
    status, note, h("p", { class: "soft hint" }, `${SHOWN_VIEWS.includes("rollouts") ? "Click a point to read the rollouts of its step. " : ""}Drag to zoom all charts; 0 shows everything again.`), grid);
  onKey((event) => { if (event.key === "0") zoomTo(null, null); });

  function zoomTo(low, high) {
    state.zoom = low === null ? null : [low, high];
    changed();
  }
  const request = () => ({
    run: runs, metric: state.metrics, axis: state.axis, points: MAX_POINTS,
    ...(state.zoom && !exported ? { from: state.zoom[0], to: state.zoom[1] } : {}),
  });
  /** An exported page has one answer for each run and metric. */
  async function exportedSeries() {
    const answers = await Promise.all(runs.flatMap((run) => state.metrics.map((metric) => get("curves", { ...request(), run, metric }).catch(() => null))));
    const found = answers.filter(Boolean);
    return { runs: [], series: found.flatMap((one) => one.series) };
  }
  function pick(run, step) {
    const params = { run, step_from: step, step_to: step };
    if (SHOWN_VIEWS.includes("rollouts")) go(link("rollouts", params));
  }
  function layOut() {
    for (const [metric, chart] of charts) if (!state.metrics.includes(metric)) { chart.destroy(); charts.delete(metric); }
    for (const metric of state.metrics) {
      if (charts.has(metric)) continue;
      charts.set(metric, new Chart(metric, {
        onPick: pick, onZoom: zoomTo, question: questions.get(metric),
        onRemove: () => { state.metrics = state.metrics.filter((name) => name !== metric); changed(); },
      }));
    }
    fill(grid, ...state.metrics.map((metric) => charts.get(metric).element));
    resetZoom.disabled = !state.zoom;
  }
  let last = null, drawing = Promise.resolve();
  async function draw() {
    const answer = exported ? await exportedSeries() : await get("curves", request(), signal);
    if (answer === last) return;
    last = answer;
    redraw();
    if (answer.runs.some((one) => one.is_partial)) drawSoon(); // a long file is read in several requests
  }
  function redraw() {
    if (!last) return;
    const index = new Map(runs.map((run, place) => [run, place]));
    const ends = last.series.filter((one) => one.x.length).flatMap((one) => [one.x[0], one.x.at(-1)]);
    const range = state.zoom ?? [Math.min(...ends), Math.max(...ends)];
    for (const [metric, chart] of charts) {
      const series = last.series.filter((one) => one.metric === metric).map((one) => ({ ...one, index: index.get(one.run) }));
      chart.update(series, { smooth: Number(state.smooth), byTime: state.axis === "time", range });
    }
    fill(status, ...last.runs.filter((one) => one.problems.length).map((one) => problems(one.problems.map((text) => (runs.length > 1 ? `${one.run}: ${text}` : text)))));
  }
  const drawSoon = debounce(() => { if (!signal.aborted) drawing = draw().catch(report); }, 30);
  function report(error) {
    if (!signal.aborted) fill(status, notice("The curves are not up to date.", error.message));
  }
  function changed() {
    setParams({ metric: state.metrics, smooth: state.smooth === "1" ? "" : state.smooth, axis: state.axis === "step" ? "" : state.axis, from: state.zoom?.[0] ?? "", to: state.zoom?.[1] ?? "" });
    layOut();
    redraw();
    drawSoon();
  }
  addEventListener("themechange", redraw, { signal });
  layOut();
  if (runs.length > 1) fill(note, comparison(details));
  await poll(() => drawing.then(draw).catch(report), 1500, signal);
}

function comparison(details) {
  const places = new Set(details[0].place_options), names = [...new Set(details.flatMap((one) => Object.keys(one.config)))].sort();
  const rows = names.filter((name) => !places.has(name) && new Set(details.map((one) => one.config[name])).size > 1);
  const content = rows.length
    ? table([{ title: "Option", value: (name) => h("code", {}, name) },
        ...details.map((one) => ({ title: one.id, value: (name) => h("code", {}, one.config[name] ?? "–") }))], rows, { caption: "options that differ", narrow: true })
    : h("p", { class: "soft" }, "Their options are equal.");
  return h("details", { class: "card", open: rows.length <= 6 }, h("summary", {}, `${number(rows.length)} ${rows.length === 1 ? "option differs" : "options differ"}`), content);
}
