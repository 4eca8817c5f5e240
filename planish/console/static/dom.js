// Elements, numbers and colours. Text of a model only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect", "line", "g", "title"]);

/** Make an element. `props`: class, on (listeners), data (dataset), vars (CSS variables), or attributes. */
export function h(tag, props = {}, ...children) {
  const element = SVG_TAGS.has(tag) && tag !== "title" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "vars") for (const [key, set] of Object.entries(value)) element.style.setProperty(`--${key}`, set);
    else if (["value", "checked", "disabled", "hidden", "selected", "open"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace what an element contains; missing children are left out. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

/** Return a number with four significant digits; "–" for a missing one. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function signed(value) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value);
}

/** Return seconds as "120 ms", "1.5 s", "41 s", "12 min" or "3 h 5 min". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(time) {
  if (!time) return "–";
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 5) return "now";
  return seconds < 2 * 86400 ? `${duration(seconds)} ago` : new Date(time * 1000).toISOString().slice(0, 10);
}

export function fileSize(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"], power = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${number(Number((bytes / 1000 ** power).toPrecision(3)))} ${units[power]}`;
}

/** The colours of runs, in the order of the legend. They differ in lightness too. */
const RUN_COLORS = ["#1f77b4", "#e0771a", "#2a9d5c", "#b53f7f", "#7a5cc4", "#8a6d1f", "#148f9c", "#c2403a"];
export const runColor = (index) => RUN_COLORS[index % RUN_COLORS.length];

/** Return a place of a reward between the worst (0) and the best (1). */
export function rewardPlace(reward, low, high) {
  return !(high > low) || reward === null ? 0.5 : Math.min(1, Math.max(0, (reward - low) / (high - low)));
}

export function pill(reward, low, high) {
  return h("span", { class: "pill", vars: { r: String(rewardPlace(reward, low, high)) } }, number(reward));
}

/** A table. `columns`: {title, value(row) -> node or text, sort(row), number}. */
export function table(columns, rows, { onOpen, caption, key, narrow } = {}) {
  const head = h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.number ? "n" : null, title: column.hint }, column.title)));
  const body = rows.map((row) =>
    h("tr", { tabindex: onOpen ? "0" : null, data: key ? { key: key(row) } : {}, on: onOpen ? {
      click: (event) => { if (!event.target.closest("a, button, input, label")) onOpen(row, event); },
      keydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) onOpen(row, event); },
    } : {} }, columns.map((column) => h("td", { class: [column.number && "n", column.wide && "wide"].filter(Boolean).join(" ") || null }, column.value(row)))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: narrow ? "narrow" : null }, h("caption", { class: "hidden" }, caption ?? ""), h("thead", {}, head), h("tbody", {}, body)));
}

/** A line of at most 60 values, without axes. */
export function sparkline(values, color) {
  const finite = values.filter((value) => value !== null), low = Math.min(...finite), high = Math.max(...finite);
  const svg = h("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (finite.length < 2) return svg;
  const x = (index) => (100 * index) / (values.length - 1), y = (value) => 22 - 20 * (high > low ? (value - low) / (high - low) : 0.5);
  const path = values.map((value, index) => (value === null ? "" : `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`)).join("");
  svg.append(h("path", { d: path, fill: "none", stroke: color ?? "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" }));
  return svg;
}

/** A message in place of a view or of a part of it. */
export function notice(title, ...lines) {
  return h("div", { class: "notice", role: "status" }, h("strong", {}, title), lines.map((line) => h("p", {}, line)));
}

export function problems(list) {
  if (!list?.length) return null;
  return h("details", { class: "problems" }, h("summary", {}, `${list.length} ${list.length === 1 ? "file problem" : "file problems"}`), h("ul", {}, list.map((text) => h("li", {}, text))));
}

export function debounce(work, milliseconds) {
  let timer = 0;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => work(...args), milliseconds); };
}

/** A labelled input. */
export function field(label, input) {
  return h("label", { class: "field" }, h("span", {}, label), input);
}

export function select(options, current, onChange, label) {
  return h("select", { "aria-label": label, on: { change: (event) => onChange(event.target.value) } },
    options.map(([value, text]) => h("option", { value, selected: value === current }, text)));
}
