// Evaluations without a run: a list, and the questions of one or several side by side.

import { get, poll } from "./api.js";
import { fill, h, notice, number, pill, problems, signed, table } from "./dom.js";
import { go, link } from "./place.js";
import { rowKeys } from "./runs.js";

export async function evalsView(area, { params, signal, onKey }) {
  const chosen = params.getAll("eval");
  if (params.has("question")) return questionView(area, chosen, params.get("question"), signal);
  if (chosen.length) return compareView(area, chosen, signal, onKey);
  const picked = new Set(), bar = h("div", { class: "bar" }), list = h("div");
  const drawBar = () => fill(bar, h("h1", {}, "Evaluations without a run"),
    picked.size > 1 && h("a", { class: "button", href: link("evaluations", { eval: [...picked] }), "data-go": true }, `Compare ${picked.size} evaluations`),
    h("span", { class: "soft" }, "For the evaluations of a run, choose the run first."));
  drawBar();
  area.append(bar, list);
  onKey(rowKeys(list));
  let last = null;
  await poll(async () => {
    const answer = await get("evals", {}, signal);
    if (answer === last) return;
    last = answer;
    if (!answer.evals.length) return fill(list, notice("There are no evaluations without a run here.", "planish eval writes one; runs have theirs in their own view."));
    fill(list, table([
      { title: "", value: (row) => h("input", { type: "checkbox", "aria-label": `choose ${row.id}`, checked: picked.has(row.id), on: { change: (event) => { if (event.target.checked) picked.add(row.id); else picked.delete(row.id); drawBar(); } } }) },
      { title: "Evaluation", wide: true, value: (row) => [h("a", { href: link("evaluations", { eval: row.id }), "data-go": true }, row.id), row.problems.length ? h("span", { class: "flag", title: row.problems.join(" ") }, "!") : null] },
      { title: "Task", value: (row) => row.task || "–" },
      { title: "Model", wide: true, value: (row) => row.model || "–" },
      { title: "Score", number: true, value: (row) => number(row.mean) },
      { title: "± standard error", number: true, value: (row) => number(row.stderr) },
      { title: "Questions", number: true, value: (row) => number(row.questions) },
      { title: "Answers", number: true, value: (row) => number(row.answers) },
      { title: "State", value: (row) => (row.is_finished ? "finished" : "unfinished") },
    ], answer.evals, { caption: "evaluations", key: (row) => row.id, onOpen: (row) => go(link("evaluations", { eval: row.id })) }));
  }, 3000, signal);
}

async function compareView(area, chosen, signal, onKey) {
  let last = null;
  onKey(rowKeys(area));
  await poll(async () => {
    const answer = await get("eval_questions", { eval: chosen }, signal);
    if (answer === last) return;
    last = answer;
    const several = chosen.length > 1;
    const change = (row) => (row.means[0] === null || row.means.at(-1) === null ? null : row.means.at(-1) - row.means[0]);
    const better = answer.questions.filter((row) => change(row) > 0).length, worse = answer.questions.filter((row) => change(row) < 0).length;
    fill(area, h("div", { class: "bar" }, h("h1", {}, several ? `Each question in ${chosen.length} evaluations` : chosen[0]), h("a", { class: "button", href: link("evaluations"), "data-go": true }, "All evaluations")),
      problems(answer.evals.flatMap((one) => one.problems.map((text) => `${one.id}: ${text}`))),
      h("section", { class: "card" }, table([
        { title: "Evaluation", wide: true, value: (row) => row.id },
        { title: "Model", wide: true, value: (row) => row.model || "–" },
        { title: "Score", number: true, value: (row) => number(row.mean) },
        { title: "± standard error", number: true, value: (row) => number(row.stderr) },
        { title: "Errors", number: true, value: (row) => number(row.errors) },
        { title: "Other metrics", wide: true, value: (row) => h("details", {}, h("summary", {}, `${Object.keys(row.metrics).length}`), Object.entries(row.metrics).map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", {}, number(value))))) },
      ], answer.evals, { caption: "scores" })),
      h("h2", {}, several ? `Before and after: ${better} better, ${worse} worse` : "Questions"),
      table([
        { title: "Question", number: true, value: (row) => h("a", { href: link("evaluations", { eval: chosen, question: row.question }), "data-go": true }, `#${row.question}`) },
        { title: "Prompt", wide: true, value: (row) => h("span", { class: "tail" }, row.prompt) },
        ...chosen.map((name, index) => ({ title: several ? name : "Score", number: true, value: (row) => number(row.means[index]) })),
        several && { title: "Change", number: true, value: (row) => h("span", { class: change(row) > 0 ? "gain up" : change(row) < 0 ? "gain down" : "soft" }, signed(change(row))) },
      ].filter(Boolean), answer.questions.slice(0, 500), { caption: "questions", key: (row) => String(row.question), onOpen: (row) => go(link("evaluations", { eval: chosen, question: row.question })) }));
  }, 3000, signal);
}

async function questionView(area, chosen, question, signal) {
  const answer = await get("eval_question", { eval: chosen, question }, signal);
  const rows = answer.evals.flatMap((one) => one.answers), first = rows[0] ?? {};
  const card = (row, id) => h("article", { class: "rollout" }, h("header", {}, chosen.length > 1 && h("strong", {}, id), pill(row.reward, 0, 1), row.stop_reason && h("span", { class: row.stop_reason === "length" ? "flag" : "soft" }, row.stop_reason), row.error && h("span", { class: "flag" }, row.error)),
    h("div", { class: "text" }, row.answer ?? "–"),
    Array.isArray(row.choices) && h("dl", { class: "grades" }, row.choices.flatMap((choice) => [h("dt", {}, choice.letter), h("dd", {}, `${choice.text}: ${number(choice.logprob)}`)])),
    row.extracted !== undefined && row.extracted !== null && h("p", { class: "sum" }, "taken as ", h("b", {}, String(row.extracted))));
  area.append(h("div", { class: "bar" }, h("h1", {}, `Question ${question}`), h("a", { class: "button", href: link("evaluations", { eval: chosen }), "data-go": true }, "All questions")),
    rows.length ? h("section", { class: "card" }, h("h2", {}, "Prompt"), h("div", { class: "text" }, first.prompt ?? "")) : notice("This question has no answers."),
    h("p", { class: "facts" }, "Reference: ", h("b", {}, String(first.reference ?? "–"))),
    h("div", { class: "answers" }, answer.evals.flatMap((one) => one.answers.map((row) => card(row, one.id)))));
}
