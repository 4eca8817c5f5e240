"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const trajectories = () => all(".traj").filter((it) => !it.hidden && !it.closest(".group").hidden);
const reward = (it) => Number(it.dataset.r);

// Tokens: text is in the page, numbers are in attributes; elements are made when they are about to be seen.

const STEPS = [0.9, 0.5, 0.2, 0.05, 0.01];
const numbers = (list) => (list ? list.split(" ") : []);

function paint(answer) {
  if (answer.classList.contains("painted")) return;
  const { n, i, p, c } = answer.dataset;
  const ids = numbers(i), losses = numbers(p), controls = new Set(numbers(c)), text = answer.textContent;
  const painted = document.createDocumentFragment();
  let at = 0, token = 0;
  numbers(n).forEach((size, index) => {
    const [units, count] = size.split("*").map(Number);
    const span = document.createElement("span"), last = token + (count || 1);
    span.textContent = text.slice(at, at + units);
    const loss = losses.slice(token, last).reduce((sum, each) => sum + Number(each), 0);
    const chance = Math.exp(-loss / 1000), step = STEPS.findIndex((least) => chance >= least);
    if (losses.length) span.className = "q" + (step < 0 ? STEPS.length : step);
    if (controls.has(String(index))) span.classList.add("control");
    if (span.textContent.includes("\n")) span.classList.add("breaks");
    span.first = token;
    span.last = last;
    painted.append(span);
    at += units;
    token = last;
  });
  answer.replaceChildren(painted);
  answer.classList.add("painted");
  answer.tokens = { ids, losses };
}

const near = new IntersectionObserver(
  (entries) => entries.filter((it) => it.isIntersecting).forEach((it) => { near.unobserve(it.target); paint(it.target); }),
  { rootMargin: "800px" },
);
all(".answer").forEach((it) => near.observe(it));

const tip = one("#tip");
let pointed = null;

function line(label, value) {
  const row = document.createElement("div");
  row.append(Object.assign(document.createElement("span"), { textContent: label }), value);
  return row;
}

function explain(span) {
  const { ids, losses } = span.parentNode.tokens, rows = [];
  const shown = /^\s|\s$|[^\x20-\x7e]/.test(span.textContent) ? JSON.stringify(span.textContent) : span.textContent;
  rows.push(Object.assign(document.createElement("code"), { textContent: shown }));
  if (span.last - span.first > 1) rows.push(line(`${span.last - span.first} tokens make this character`, ""));
  for (let k = span.first; k < span.last; k++) {
    if (losses.length) {
      const loss = Number(losses[k]) / 1000, percent = 100 * Math.exp(-loss);
      rows.push(line("probability", `${percent >= 10 ? percent.toFixed(1) : percent.toPrecision(2)} %`));
      rows.push(line("logprob", losses[k] === "0" || losses[k] === "-0" ? "0.000" : (-loss).toFixed(3)));
    }
    rows.push(line("token", ids[k]), line("position", `${k + 1} of ${ids.length}`));
  }
  tip.replaceChildren(...rows);
}

document.addEventListener("pointerover", (event) => {
  const span = event.target instanceof Element ? event.target.closest(".painted > span") : null;
  if (span === pointed) return;
  pointed?.classList.remove("pointed");
  pointed = span;
  tip.hidden = !span;
  if (!span) return;
  span.classList.add("pointed");
  explain(span);
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect(), room = tip.getBoundingClientRect();
  const above = box.top - room.height - 6;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - room.width - 6))}px`;
  tip.style.top = `${above > 6 ? above : box.bottom + 6}px`;
});
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// Going from one trajectory to another.

let current = null;

function show(it) {
  if (!it) return;
  if (it.classList.contains("traj")) {
    it.open = true;
    current?.classList.remove("current");
    current = it;
    it.classList.add("current");
    all(".cells a").forEach((cell) => cell.toggleAttribute("aria-current", cell.hash === "#" + it.id));
  }
  it.scrollIntoView({ block: "start" });
  history.replaceState(null, "", "#" + it.id);
}

function along(list, by) {
  const here = list.indexOf(current);
  return list[here < 0 ? (by > 0 ? 0 : list.length - 1) : Math.max(0, Math.min(list.length - 1, here + by))];
}

function toGroup(by) {
  const groups = all(".group").filter((it) => !it.hidden), here = groups.indexOf(current?.closest(".group"));
  const group = groups[here < 0 ? 0 : Math.max(0, Math.min(groups.length - 1, here + by))];
  if (!group) return;
  show(all(".traj", group).find((it) => !it.hidden));
  group.scrollIntoView({ block: "start" });
}

const extreme = (sign) => show(trajectories().reduce((a, b) => (a && sign * reward(a) >= sign * reward(b) ? a : b), null));

// Order and filter.

function ordered(key, list, value) {
  const sign = key.startsWith("-") ? -1 : 1, name = key.replace("-", "");
  return [...list].sort((a, b) => sign * (value(a, name) - value(b, name)));
}

const places = new Map(all(".traj").map((it, index) => [it, index]));

function arrange() {
  const groups = ordered(one("#group-order").value, all(".group"), (it, name) => Number(it.dataset[name]));
  const end = one("main .group")?.parentNode, behind = all(".group").at(-1)?.nextSibling;
  groups.forEach((group) => {
    end.insertBefore(group, behind);
    const listed = one(`.map [data-g="${group.id}"]`);
    listed.parentNode.append(listed);
    ordered(one("#traj-order").value, all(".traj", group), (it, name) => (name === "n" ? places.get(it) : reward(it))).forEach((it) => {
      it.parentNode.append(it);
      const cell = cellOf.get(it.id);
      cell.parentNode.append(cell);
    });
  });
}

const cellOf = new Map(all(".cells a").map((cell) => [cell.hash.slice(1), cell]));

function filter() {
  const low = one("#low").value === "" ? -Infinity : Number(one("#low").value);
  const high = one("#high").value === "" ? Infinity : Number(one("#high").value);
  let shown = 0;
  all(".traj").forEach((it) => {
    const slack = 1e-5 * (1 + Math.abs(reward(it))); // the numbers of the bars are rounded
    it.hidden = !(reward(it) >= low - slack && reward(it) <= high + slack);
    cellOf.get(it.id).classList.toggle("out", it.hidden);
    shown += !it.hidden;
  });
  all(".group").forEach((group) => { group.hidden = all(".traj", group).every((it) => it.hidden); });
  one("#count").textContent = `${shown} of ${places.size} trajectories`;
}

function only(low, high) {
  one("#low").value = low;
  one("#high").value = high;
  filter();
}

// Buttons and keys.

function pressed(name, is) {
  document.body.classList.toggle(name, is ?? !document.body.classList.contains(name));
  return document.body.classList.contains(name);
}

const acts = {
  next: () => show(along(trajectories(), 1)),
  previous: () => show(along(trajectories(), -1)),
  best: () => extreme(1),
  worst: () => extreme(-1),
  all: () => only("", ""),
  open: () => trajectories().forEach((it) => { it.open = true; }),
  close: () => trajectories().forEach((it) => { it.open = false; }),
  colours: (button) => button.setAttribute("aria-pressed", !pressed("plain")),
  letters: (button) => button.setAttribute("aria-pressed", pressed("fixed")),
  theme: () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.style.colorScheme || (dark ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
  },
};
const keys = { j: "next", k: "previous", b: "best", w: "worst", o: "open", x: "close", c: "colours", f: "letters", t: "theme" };
const press = (name) => acts[name](one(`[data-do="${name}"]`));

all("[data-do]").forEach((button) => button.addEventListener("click", () => press(button.dataset.do)));
all(".bars button").forEach((bar) => bar.addEventListener("click", () => only(bar.dataset.low, bar.dataset.high)));
["#low", "#high"].forEach((input) => one(input).addEventListener("input", filter));
["#group-order", "#traj-order"].forEach((select) => one(select).addEventListener("change", arrange));
all(".cells a").forEach((cell) => cell.addEventListener("click", (event) => {
  event.preventDefault();
  show(document.getElementById(cell.hash.slice(1)));
}));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "n") toGroup(1);
  else if (event.key === "p") toGroup(-1);
  else if (Object.hasOwn(keys, event.key)) press(keys[event.key]);
});
addEventListener("hashchange", () => show(document.getElementById(location.hash.slice(1))));

all(".steer").forEach((it) => { it.hidden = false; });
filter();
if (location.hash) show(document.getElementById(location.hash.slice(1)));
