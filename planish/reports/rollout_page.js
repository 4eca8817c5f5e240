const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const trajectories = () => all(".traj").filter((it) => !it.hidden && !it.closest(".group").hidden);
const reward = (it) => Number(it.dataset.r);

// Tokens: text is in the page, numbers are in attributes; elements are made when they are about to be seen.

const numbers = (list) => (list ? list.split(" ") : []);

function renderTokens(answer) {
  if (answer.classList.contains("painted")) return;
  const { n: lengthCodes, i: tokenIds, p: milliNlls, c: controls } = answer.dataset;
  const ids = numbers(tokenIds), nlls = numbers(milliNlls), controlIndices = new Set(numbers(controls)), text = answer.textContent;
  const spans = tokenElements(text, numbers(lengthCodes), new Set([...controlIndices].map(Number)));
  spans.forEach((span) => {
    const nll = nlls.slice(span.first, span.last).reduce((sum, each) => sum + Number(each), 0);
    if (nlls.length) span.classList.add(probabilityClass(-nll / 1000));
    if (span.textContent.includes("\n")) span.classList.add("breaks");
  });
  answer.replaceChildren(...spans);
  answer.classList.add("painted");
  answer.tokens = { ids, nlls };
}

const visibility = new IntersectionObserver(
  (entries) => entries.filter((it) => it.isIntersecting).forEach((it) => { visibility.unobserve(it.target); renderTokens(it.target); }),
  { rootMargin: "800px" },
);
all(".answer").forEach((it) => visibility.observe(it));

const tip = one("#tip");
let hoveredToken = null;

function line(label, value) {
  const row = document.createElement("div");
  row.append(Object.assign(document.createElement("span"), { textContent: label }), value);
  return row;
}

function fillTip(span) {
  const { ids, nlls } = span.parentNode.tokens, rows = [];
  rows.push(Object.assign(document.createElement("code"), { textContent: visibleText(span.textContent) }));
  if (span.last - span.first > 1) rows.push(line(`${span.last - span.first} tokens make this character`, ""));
  for (let k = span.first; k < span.last; k++) {
    if (nlls.length) {
      const nll = Number(nlls[k]) / 1000;
      rows.push(line("probability", percentText(-nll)));
      rows.push(line("logprob", nlls[k] === "0" || nlls[k] === "-0" ? "0.000" : (-nll).toFixed(3)));
    }
    rows.push(line("token", ids[k]), line("position", `${k + 1} of ${ids.length}`));
  }
  tip.replaceChildren(...rows);
}

document.addEventListener("pointerover", (event) => {
  const span = event.target instanceof Element ? event.target.closest(".painted > span") : null;
  if (span === hoveredToken) return;
  hoveredToken?.classList.remove("pointed");
  hoveredToken = span;
  tip.hidden = !span;
  if (!span) return;
  span.classList.add("pointed");
  fillTip(span);
  placeTip(tip, span);
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

function neighbor(list, offset) {
  const here = list.indexOf(current);
  return list[here < 0 ? (offset > 0 ? 0 : list.length - 1) : Math.max(0, Math.min(list.length - 1, here + offset))];
}

function showGroup(offset) {
  const groups = all(".group").filter((it) => !it.hidden), here = groups.indexOf(current?.closest(".group"));
  const group = groups[here < 0 ? 0 : Math.max(0, Math.min(groups.length - 1, here + offset))];
  if (!group) return;
  show(all(".traj", group).find((it) => !it.hidden));
  group.scrollIntoView({ block: "start" });
}

const showExtreme = (sign) => show(trajectories().reduce((a, b) => (a && sign * reward(a) >= sign * reward(b) ? a : b), null));

// Order and filter.

function ordered(key, list, value) {
  const sign = key.startsWith("-") ? -1 : 1, name = key.replace("-", "");
  return [...list].sort((a, b) => sign * (value(a, name) - value(b, name)));
}

const originalOrder = new Map(all(".traj").map((it, index) => [it, index]));

function arrange() {
  const groups = ordered(one("#group-order").value, all(".group"), (it, name) => Number(it.dataset[name]));
  const end = one("main .group")?.parentNode, behind = all(".group").at(-1)?.nextSibling;
  groups.forEach((group) => {
    end.insertBefore(group, behind);
    const listed = one(`.map [data-g="${group.id}"]`);
    listed.parentNode.append(listed);
    ordered(one("#traj-order").value, all(".traj", group), (it, name) => (name === "n" ? originalOrder.get(it) : reward(it))).forEach((it) => {
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
  one("#count").textContent = `${shown} of ${originalOrder.size} trajectories`;
}

function showRewards(low, high) {
  one("#low").value = low;
  one("#high").value = high;
  filter();
}

// Buttons and keys.

function toggleClass(name, isOn) {
  document.body.classList.toggle(name, isOn ?? !document.body.classList.contains(name));
  return document.body.classList.contains(name);
}

const actions = {
  next: () => show(neighbor(trajectories(), 1)),
  previous: () => show(neighbor(trajectories(), -1)),
  best: () => showExtreme(1),
  worst: () => showExtreme(-1),
  all: () => showRewards("", ""),
  open: () => trajectories().forEach((it) => { it.open = true; }),
  close: () => trajectories().forEach((it) => { it.open = false; }),
  colours: (button) => button.setAttribute("aria-pressed", !toggleClass("plain")),
  letters: (button) => button.setAttribute("aria-pressed", toggleClass("fixed")),
  theme: () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.style.colorScheme || (dark ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
  },
};
const keys = { j: "next", k: "previous", b: "best", w: "worst", o: "open", x: "close", c: "colours", f: "letters", t: "theme" };
const runAction = (name) => actions[name](one(`[data-do="${name}"]`));

all("[data-do]").forEach((button) => button.addEventListener("click", () => runAction(button.dataset.do)));
all(".bars button").forEach((bar) => bar.addEventListener("click", () => showRewards(bar.dataset.low, bar.dataset.high)));
["#low", "#high"].forEach((input) => one(input).addEventListener("input", filter));
["#group-order", "#traj-order"].forEach((select) => one(select).addEventListener("change", arrange));
all(".cells a").forEach((cell) => cell.addEventListener("click", (event) => {
  event.preventDefault();
  show(document.getElementById(cell.hash.slice(1)));
}));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "n") showGroup(1);
  else if (event.key === "p") showGroup(-1);
  else if (Object.hasOwn(keys, event.key)) runAction(keys[event.key]);
});
addEventListener("hashchange", () => show(document.getElementById(location.hash.slice(1))));

all(".steer").forEach((it) => { it.hidden = false; });
filter();
if (location.hash) show(document.getElementById(location.hash.slice(1)));
