// Evaluations: scores by step, and each question before and after.

import { exported, get, poll } from "./api.js";
import { fill, h, notice, number, signed, table } from "./dom.js";
import { go, link } from "./place.js";

export async function evaluationsView(area, { run, signal }) {
  let last = null;
  await poll(async () => {
    const answer = await get("evaluations", { run }, signal);
    if (answer === last) return;
    last = answer;
    if (!answer.scores.length && !answer.splits.length) return fill(area, notice("This run has no evaluations.", "Give it a test set and eval_every.", !exported && h("a", { href: link("evaluations"), "data-go": true }, "Evaluations without a run")));
    fill(area, h("div", { class: "bar" }, h("h1", {}, "Evaluations"), !exported && h("a", { class: "button", href: link("evaluations"), "data-go": true }, "Evaluations without a run")),
      answer.scores.length ? h("section", { class: "card" }, h("h2", {}, "Scores"), table([
        { title: "Step", number: true, value: (row) => number(row.step) },
        ...answer.names.map((name) => ({ title: name, number: true, value: (row) => number(row.values[name] ?? null) })),
      ], answer.scores, { caption: "scores by step", narrow: true })) : "",
      ...answer.splits.map((split) => splitSection(run, split)));
  }, 3000, signal);
}

function splitSection(run, split) {
  const changed = split.questions.filter(({ before, after }) => before !== null && after !== null);
  const better = changed.filter(({ before, after }) => after > before).length, worse = changed.filter(({ before, after }) => after < before).length;
  const order = (row) => (row.before === null || row.after === null ? 0 : row.after - row.before);
  const rows = [...split.questions].sort((a, b) => order(a) - order(b));
  const open = (step, group) => link("group", { run, split: split.split, step, group });
  return h("section", { class: "card" }, h("h2", {}, split.split),
    table([
      { title: "Step", number: true, value: (row) => h("a", { href: link("rollouts", { run, split: split.split, step_from: row.step, step_to: row.step }), "data-go": true }, number(row.step)) },
      { title: "Mean reward", number: true, value: (row) => number(row.mean) },
      { title: "± standard error", number: true, value: (row) => number(row.stderr) },
      { title: "Questions", number: true, value: (row) => number(row.questions) },
      { title: "Answers", number: true, value: (row) => number(row.answers) },
    ], split.steps, { caption: `${split.split} by step`, narrow: true }),
    split.first_step === split.last_step ? "" : h("div", {},
      h("h3", {}, `Each question at step ${split.first_step} and at step ${split.last_step}: ${better} better, ${worse} worse`),
      table([
        { title: "Question", number: true, value: (row) => h("a", { href: open(split.last_step, row.group), "data-go": true }, `#${row.group}`) },
        { title: "Before", number: true, value: (row) => h("a", { href: open(split.first_step, row.group), "data-go": true }, number(row.before)) },
        { title: "After", number: true, value: (row) => number(row.after) },
        { title: "Change", number: true, value: (row) => h("span", { class: order(row) > 0 ? "gain up" : order(row) < 0 ? "gain down" : "soft" }, row.before === null || row.after === null ? "–" : signed(row.after - row.before)) },
      ], rows.slice(0, 300), { caption: "questions before and after", narrow: true, onOpen: (row) => go(open(split.last_step, row.group)) })));
}
