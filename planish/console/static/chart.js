// One chart: a metric of one or several runs, drawn by uPlot.
/* global uPlot */

import { fill, h, number, runColor } from "./dom.js";

const SYNC = "planish";
const KEY_STEPS = { ArrowLeft: -1, ArrowRight: 1 };

/** Return the means over the last `window` steps of a series, which include the step itself. */
export function smoothed(steps, values, window) {
  if (window <= 1) return null;
  const means = [];
  let first = 0, sum = 0;
  values.forEach((value, index) => {
    sum += value;
    while (steps[first] <= steps[index] - window) sum -= values[first++];
    means.push(sum / (index + 1 - first));
  });
  return means;
}

/** Return the value of a CSS colour for a canvas, which does not understand light-dark(). */
function cssColor(name) {
  const probe = h("span", { class: `probe ${name}` });
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

/** Return the range of the vertical axis; a flat curve is not at its edge. */
function verticalRange(low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.08, true);
  return low === 0 ? [-0.5, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
}

export class Chart {
  /** `onPick(run, step)`: a point was chosen. `onZoom(low, high)`: a range was chosen; null, null: all. */
  constructor(metric, { onPick, onZoom, onRemove, question }) {
    Object.assign(this, { metric, onPick, onZoom, plot: null, series: [], shape: "" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.area = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `chart of ${metric}; arrow keys move the cursor, Enter opens the rollouts of the step` });
    this.element = h("section", { class: "panel", data: { metric } },
      h("div", { class: "panel-head" }, h("h2", { title: metric }, metric),
        onRemove && h("button", { class: "quiet", "aria-label": `remove ${metric}`, on: { click: onRemove } }, "×")),
      question && h("p", { class: "soft question" }, question), this.area, this.readout);
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.area);
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }

  resize() {
    const width = this.area.clientWidth;
    if (this.plot && width > 0 && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.plot.height });
  }

  /** Draw `series`: [{run, index, x, steps, y, low, high, num_points}], for x in `range`. */
  update(series, { smooth, byTime, range }) {
    this.series = series.filter((one) => one.x.length);
    const shape = JSON.stringify([this.series.map((one) => [one.run, one.low !== null]), smooth > 1, byTime, document.documentElement.dataset.theme, matchMedia("(prefers-color-scheme: dark)").matches]);
    if (!this.series.length) {
      this.plot?.destroy();
      this.plot = null;
      this.shape = "";
      fill(this.area, h("p", { class: "empty" }, series.length ? `No values in this range${byTime ? ", or no time/total in the run" : ""}.` : "No run has this metric yet."));
      this.readout.textContent = "";
      return;
    }
    const tables = this.series.map((one) => {
      const columns = [one.x, one.y];
      if (smooth > 1) columns.push(smoothed(one.steps, one.y, smooth));
      if (one.low !== null) columns.push(one.low, one.high);
      return columns;
    });
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    if (shape !== this.shape || !this.plot) this.build(data, smooth, byTime);
    else this.plot.setData(data, false);
    this.shape = shape;
    const [low, high] = range;
    this.plot.setScale("x", { min: low, max: high > low ? high : low + 1 });
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.showLast();
  }

  build(data, smooth, byTime) {
    this.plot?.destroy();
    fill(this.area);
    const lines = [{}], bands = [];
    this.owners = [null];
    this.series.forEach((one, place) => {
      const color = runColor(one.index), few = one.x.length <= 60;
      lines.push({ stroke: smooth > 1 ? `${color}55` : color, width: smooth > 1 ? 1 : 1.5, spanGaps: true, points: { show: few, size: 4 } });
      this.owners.push(place);
      if (smooth > 1) { lines.push({ stroke: color, width: 2, spanGaps: true, points: { show: false } }); this.owners.push(place); }
      if (one.low !== null) {
        for (let edge = 0; edge < 2; edge++) { lines.push({ stroke: `${color}00`, width: 0, spanGaps: true, points: { show: false } }); this.owners.push(null); }
        bands.push({ series: [lines.length - 1, lines.length - 2], fill: `${color}22` });
      }
    });
    const line = cssColor("line"), axis = { stroke: cssColor("ink"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    let pressed = null;
    this.plot = new uPlot({
      width: Math.max(200, this.area.clientWidth), height: 190, legend: { show: false }, bands, series: lines,
      scales: { x: { time: false }, y: { range: (_, low, high) => verticalRange(low, high) } },
      axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map((tick) => (byTime ? clock(tick) : number(tick))) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map(number) }],
      cursor: { sync: { key: SYNC, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        setCursor: [() => this.showCursor(byTime)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          const [low, high] = [left, left + width].map((pixel) => plot.posToVal(pixel, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.onZoom(low, high);
        }],
      },
    }, data, this.area);
    this.plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    this.plot.over.addEventListener("click", (event) => { if (pressed === null || Math.abs(event.clientX - pressed) < 4) this.pick(); });
  }

  /** Return the nearest point of each run to the cursor: [{one, index}]. */
  nearest() {
    const { idx, left } = this.plot.cursor;
    if (idx === null || idx === undefined || left < 0) return [];
    const x = this.plot.data[0][idx];
    return this.series.map((one) => ({ one, index: closest(one.x, x) }));
  }

  showCursor(byTime) {
    const found = this.nearest();
    if (!found.length) return this.showLast();
    const { one, index } = found[0];
    this.say(`step ${number(one.steps[index])}${byTime ? `, ${clock(one.x[index])}` : ""}`, found);
  }

  showLast() {
    const found = this.series.map((one) => ({ one, index: one.x.length - 1 }));
    if (found.length) this.say(`last, step ${number(found[0].one.steps.at(-1))}`, found);
  }

  say(title, found) {
    const step = found[0].one.steps[found[0].index];
    fill(this.readout, h("span", { class: "soft" }, title), ...found.map(({ one, index }) => {
      const other = one.steps[index] === step ? "" : `step ${number(one.steps[index])}: `; // a run may end earlier
      const range = one.low !== null ? ` (${number(one.low[index])} to ${number(one.high[index])})` : "";
      return h("span", { class: "value", vars: { c: runColor(one.index) }, title: one.run }, other, number(one.y[index]), range);
    }));
  }

  /** Open the rollouts of the point under the cursor, of the run whose curve is nearest to it. */
  pick() {
    const found = this.nearest();
    if (!found.length) return;
    const height = this.plot.cursor.top, distance = ({ one, index }) => Math.abs(this.plot.valToPos(one.y[index], "y") - height);
    const { one, index } = height >= 0 ? found.reduce((a, b) => (distance(b) < distance(a) ? b : a)) : found[0];
    this.onPick(one.run, one.steps[index]);
  }

  onKey(event) {
    if (!this.plot) return;
    if (event.key === "Enter") return this.pick();
    const offset = KEY_STEPS[event.key];
    if (!offset) return;
    event.preventDefault();
    const { idx, left } = this.plot.cursor, xs = this.plot.data[0];
    const next = Math.max(0, Math.min(xs.length - 1, left < 0 || idx === null || idx === undefined ? xs.length - 1 : idx + offset * (event.shiftKey ? 10 : 1)));
    this.plot.setCursor({ left: this.plot.valToPos(xs[next], "x"), top: 10 });
  }
}

function closest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function clock(seconds) {
  const minutes = Math.floor(seconds / 60);
  return minutes < 1 ? `${Math.round(seconds)} s` : minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}
