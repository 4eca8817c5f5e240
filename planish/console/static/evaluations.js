// Evaluations: scores by step, and each question before and after, or in two runs.

import { exported, get, poll } from "./api.js";
import { fill, h, notice, number, signed, table } from "./dom.js";
import { go, link } from "./place.js";

export async function evaluationsView(area, { run, runs, signal }) {
  if (runs.length > 1) return runsView(area, runs, signal);
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

/** The last evaluations of several runs: their scores, and each question in all of them. */
async function runsView(area, runs, signal) {
  let last = [];
  await poll(async () => {
    const answers = await Promise.all(runs.map((run) => get("evaluations", { run }, signal)));
    if (answers.every((answer, index) => answer === last[index])) return;
    last = answers;
    const names = [...new Set(answers.flatMap((answer) => answer.names))].sort();
    const newest = (answer, name) => answer.scores.findLast(({ values }) => (values[name] ?? null) !== null)?.values[name] ?? null;
    const splits = [...new Set(answers.flatMap((answer) => answer.splits.map(({ split }) => split)))];
    if (!names.length && !splits.length) return fill(area, notice("These runs have no evaluations.", "Give them a test set and eval_every."));
    fill(area, h("div", { class: "bar" }, h("h1", {}, `Evaluations of ${runs.length} runs`)),
      names.length ? h("section", { class: "card" }, h("h2", {}, "Last scores"), table([
        { title: "Score", value: (name) => name },
        ...runs.map((run, index) => ({ title: run, number: true, value: (name) => number(newest(answers[index], name)) })),
      ], names, { caption: "last scores", narrow: true })) : "",
      ...splits.map((split) => sharedQuestions(runs, split, answers.map((answer) => answer.splits.find((one) => one.split === split)))));
  }, 3000, signal);
}

function sharedQuestions(runs, split, found) {
  const byPrompt = found.map((one) => new Map((one?.questions ?? []).map((question) => [question.prompt_id || `group ${question.group}`, question])));
  const change = (row) => (row[0].after === null || row.at(-1).after === null ? null : row.at(-1).after - row[0].after);
  const rows = [...byPrompt[0].keys()].filter((prompt) => byPrompt.every((questions) => questions.has(prompt))).map((prompt) => byPrompt.map((questions) => questions.get(prompt)));
  rows.sort((a, b) => change(a) - change(b));
  const better = rows.filter((row) => change(row) > 0).length, worse = rows.filter((row) => change(row) < 0).length;
  const open = (row, index) => link("group", { run: runs[index], split, step: found[index].last_step, group: row[index].group });
  return h("section", { class: "card" }, h("h2", {}, split),
    table([
      { title: "Run", value: (index) => runs[index] },
      { title: "Step", number: true, value: (index) => number(found[index]?.last_step) },
      { title: "Mean reward", number: true, value: (index) => number(found[index]?.steps.at(-1).mean) },
      { title: "± standard error", number: true, value: (index) => number(found[index]?.steps.at(-1).stderr) },
    ], runs.map((_, index) => index), { caption: `${split} at the last evaluation`, narrow: true }),
    rows.length ? h("div", {}, h("h3", {}, `Each question at the last evaluations: ${runs.at(-1)} is better at ${better} and worse at ${worse} of ${rows.length}`),
      table([
        { title: "Question", number: true, value: (row) => `#${row[0].group}` },
        ...runs.map((run, index) => ({ title: run, number: true, value: (row) => h("a", { href: open(row, index), "data-go": true }, number(row[index].after)) })),
        { title: "Change", number: true, value: (row) => h("span", { class: change(row) > 0 ? "gain up" : change(row) < 0 ? "gain down" : "soft" }, signed(change(row))) },
      ], rows.slice(0, 300), { caption: "questions of all runs", narrow: true })) : h("p", { class: "soft" }, "The runs have no question in common."));
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
