// The rollouts of all steps of a run: filters, a histogram of their rewards, and a table.

import { get, poll } from "./api.js";
import { debounce, field, fill, h, notice, number, pill, problems, select, signed, table } from "./dom.js";
import { go, link, setParams } from "./place.js";
import { rowKeys } from "./runs.js";

const PAGE = 100;
const FILTERS = ["split", "step_from", "step_to", "reward_from", "reward_to", "tag", "ending", "error", "text", "sort", "group", "prompt_id"];
const ORDERS = [["", "in order"], ["-step", "newest first"], ["reward", "worst first"], ["-reward", "best first"], ["-tokens", "longest first"], ["tokens", "shortest first"], ["mean_logprob", "least probable first"], ["-gap", "largest gap first"]];

export async function rolloutsView(area, { run, params, signal, onKey }) {
  const state = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  state.offset = Number(params.get("offset") ?? 0);
  const controls = h("form", { class: "filters", on: { submit: (event) => event.preventDefault() } });
  const bars = h("div", { class: "histogram" }), list = h("div"), head = h("div", { class: "bar" }), foot = h("div", { class: "bar" });
  area.append(controls, bars, head, list, foot);
  onKey(rowKeys(list));
  let last = null, drawnChoices = "";

  const request = () => ({ run, limit: PAGE, ...state, offset: state.offset || "" });
  const update = debounce(() => draw().catch(report), 150);
  function change(changes) {
    Object.assign(state, { offset: 0 }, changes);
    setParams({ ...state, offset: state.offset || "" });
    if (last) drawControls(last, true);
    update();
  }
  function report(error) {
    if (!signal.aborted && error.name !== "AbortError") fill(list, notice("The rollouts cannot be shown.", error.message));
  }
  async function draw() {
    const answer = await get("rollouts", request(), signal);
    if (answer === last) return;
    last = answer;
    drawControls(answer);
    drawBars(answer);
    drawTable(answer);
  }

  function drawControls(answer, force = false) {
    const shape = JSON.stringify([answer.choices, answer.steps]);
    if (!force && (shape === drawnChoices || controls.contains(document.activeElement))) return;
    if (force && controls.contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
    drawnChoices = shape;
    const choice = (name, label, all) => answer.choices[name].length > (name === "split" ? 0 : 0)
      ? field(label, select([["", all], ...answer.choices[name].map(([value, count]) => [value, `${value} (${count})`])], state[name], (value) => change({ [name]: value }), label)) : null;
    const range = (name, label, step) => field(label, h("span", { class: "range" }, ["from", "to"].map((end) =>
      h("input", { type: "number", step, value: state[`${name}_${end}`], placeholder: end === "from" ? "from" : "to", "aria-label": `${label} ${end}`, on: { input: (event) => change({ [`${name}_${end}`]: event.target.value }) } }))));
    fill(controls, ...[
      choice("split", "Kind", "training and evaluations"),
      range("step", "Step", "1"), range("reward", "Reward", "any"),
      choice("ending", "Ending", "any ending"), choice("tag", "Tag", "any tag"), choice("error", "Failed attempts", "any"),
      field("Text in prompt, answer or log", h("input", { type: "search", value: state.text, "aria-label": "search texts", on: { input: debounce((event) => change({ text: event.target.value }), 250) } })),
      field("Order", select(ORDERS, state.sort, (value) => change({ sort: value }), "order")),
      h("button", { type: "button", on: { click: () => change(Object.fromEntries(FILTERS.map((name) => [name, ""]))) } }, "Clear filters"),
    ].filter(Boolean));
  }
  function drawBars(answer) {
    const most = Math.max(1, ...answer.histogram.map(({ count }) => count)), low = answer.histogram[0]?.low, high = answer.histogram.at(-1)?.high;
    fill(bars, ...answer.histogram.map((bar) => {
      const isOnly = Number(state.reward_from) === bar.low && Number(state.reward_to) === bar.high && state.reward_from !== "";
      const name = bar.low === bar.high ? number(bar.low) : `${number(bar.low)} to ${number(bar.high)}`;
      return h("button", { class: "histogram-bar", "aria-pressed": String(isOnly), title: `${bar.count} rollouts with reward ${name}`,
        vars: { height: String(bar.count / most), r: String(high > low ? ((bar.low + bar.high) / 2 - low) / (high - low) : 0.5) },
        on: { click: () => change(isOnly ? { reward_from: "", reward_to: "" } : { reward_from: String(bar.low), reward_to: String(bar.high) }) } },
        h("span", { class: "count" }, String(bar.count)), h("i"), h("span", { class: "at" }, name));
    }));
  }
  function drawTable(answer) {
    const low = answer.reward_range[0], high = answer.reward_range[1];
    fill(head, h("h1", {}, `${number(answer.matched)} of ${number(answer.total)} rollouts`), answer.searched < answer.candidates
      ? h("span", { class: "flag" }, `the text was looked for in ${answer.searched} of ${answer.candidates} rollouts; narrow the steps to search the others`) : null, savedNote(answer), problems(answer.problems));
    if (!answer.total) {
      fill(list, notice("This run has no rollouts yet.", "RL runs write them with each step. Supervised runs have none."));
    } else if (!answer.matched) {
      fill(list, notice("No rollout passes the filters.", "Widen a range, or clear the filters."));
    } else {
      fill(list, table([
        { title: "Step", number: true, value: (row) => number(row.step) },
        { title: "Group", number: true, value: (row) => h("a", { href: groupLink(run, row), "data-go": true }, `${row.group}.${row.sample}`) },
        { title: "Reward", value: (row) => pill(row.reward, low, high) },
        { title: "Advantage", number: true, value: (row) => signed(row.advantage) },
        { title: "Question", wide: true, value: (row) => h("span", { class: "tail" }, row.question ?? "") },
        { title: "Answer", wide: true, value: (row) => h("span", { class: "tail" }, row.answer ?? "") },
        { title: "Ending", value: (row) => h("span", { class: row.ending === "completed" ? "soft" : "flag" }, row.ending || "–") },
        { title: "Tokens", number: true, value: (row) => number(row.tokens) },
        { title: "Gap", number: true, hint: "largest difference between the logprobs of trainer and sampler at a token", value: (row) => (row.gap ? h("span", { class: row.gap > 1e-3 ? "flag" : "" }, row.gap.toExponential(1)) : number(row.gap)) },
        { title: "Kind", value: (row) => [row.split === "train" ? "" : row.split, ...row.tags].filter(Boolean).join(", ") },
        { title: "", value: (row) => (row.errors.length ? h("span", { class: "flag", title: row.errors.join(", ") }, `${row.errors.length} failed`) : null) },
      ], answer.rows, { caption: "Rollouts", key: (row) => `${row.split} ${row.step} ${row.group} ${row.sample}`, onOpen: (row) => go(groupLink(run, row)) }));
    }
    const end = state.offset + answer.rows.length;
    fill(foot, ...(answer.matched > PAGE ? [
      h("button", { disabled: state.offset === 0, on: { click: () => turn(-PAGE) } }, "Previous"),
      h("span", { class: "soft" }, `${state.offset + 1} to ${end} of ${answer.matched}`),
      h("button", { disabled: end >= answer.matched, on: { click: () => turn(PAGE) } }, "Next"),
    ] : []));
  }
  function turn(offset) {
    state.offset = Math.max(0, state.offset + offset);
    setParams({ offset: state.offset || "" });
    draw().catch(report);
    scrollTo(0, 0);
  }
  await poll(() => draw().catch(report), 2000, signal);
}

/** Say how many rollouts an exported page contains. */
function savedNote({ total, saved_of: all }) {
  if (all === undefined || all === total) return null;
  return h("span", { class: "soft" }, `This file contains ${number(total)} of the run's ${number(all)} rollouts: whole groups, spread evenly over its steps.`);
}

export function groupLink(run, row) {
  return link("group", { run, split: row.split, step: row.step, group: row.group, sample: row.sample });
}
