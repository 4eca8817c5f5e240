// What is wrong: each finding with its reason, a remedy, and links to curves and rollouts.

import { get, poll, SHOWN_VIEWS } from "./api.js";
import { fill, h, notice, number, problems } from "./dom.js";
import { link } from "./place.js";

const LABELS = { bad: "Act on it", warning: "Look at it", note: "Note" };

export async function findingsView(area, { run, signal }) {
  let last = null;
  await poll(async () => {
    const answer = await get("findings", { run }, signal);
    if (answer === last) return;
    last = answer;
    const shows = (view) => SHOWN_VIEWS.includes(view);
    fill(area, h("h1", {}, "What is wrong"), problems(answer.problems),
      answer.findings.length ? h("ol", { class: "findings" }, answer.findings.map((finding) => h("li", { class: `card finding ${finding.severity}` },
        h("header", {}, h("span", { class: "severity" }, LABELS[finding.severity]), h("h2", {}, finding.title)),
        h("p", {}, finding.reason), h("p", {}, h("b", {}, "What to do: "), finding.remedy),
        h("p", { class: "bar" },
          finding.metric && h("a", { class: "button", href: link("curves", { run, metric: [finding.metric, ...answer.watch.filter((name) => name !== finding.metric)] }), "data-go": true }, `Curve of ${finding.metric}`),
          finding.rollouts && shows("rollouts") && h("a", { class: "button", href: link("rollouts", { run, ...finding.rollouts }), "data-go": true }, "Its rollouts"),
          finding.rollouts && finding.since_step !== null && shows("rollouts") && h("a", { class: "button", href: link("rollouts", { run, ...finding.rollouts, step_from: "", step_to: finding.since_step }), "data-go": true }, `Rollouts up to step ${number(finding.since_step)}`)))))
        : notice(answer.num_steps < 3 ? "It is too early to tell." : "Nothing is wrong, as far as the metrics show.", answer.num_steps < 3 ? "Most rules need a few steps." : "A reward that is taken literally shows in the rollouts only: read ten of them."));
  }, 3000, signal);
}
