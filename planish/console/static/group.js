// One group: the question, and all answers side by side with their grades.

import { actionsAllowed, exported, get, post } from "./api.js";
import { field, fill, h, notice, number, pill, select, signed } from "./dom.js";
import { link, setParams } from "./place.js";
import { answerElement, MODES, onTokenChosen, paint } from "./tokens.js";

const LONG = 1200;

export async function groupView(area, { run, params, signal, onKey }) {
  const [split, step, group] = ["split", "step", "group"].map((name) => params.get(name) ?? "");
  const answer = await get("group", { run, split, step, group }, signal);
  let mode = params.get("colours") ?? "probability";
  const rewards = answer.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards);
  const readable = answer.rollouts.find((rollout) => rollout.texts);
  const question = readable?.texts.turns[0]?.observation ?? "";
  const isShared = answer.rollouts.every((rollout) => !rollout.texts || (rollout.texts.turns[0]?.observation ?? "") === question);
  const cards = answer.rollouts.map((rollout) => card(rollout, { low, high, mode, isShared }));
  const neighbour = (target, label) => target
    ? h("a", { class: "button", href: link("group", { run, ...target, colours: mode === "probability" ? "" : mode }), "data-go": true, rel: label === "Next group" ? "next" : "prev" }, label)
    : h("span", { class: "button", "aria-disabled": "true" }, label);
  area.append(
    h("div", { class: "bar" },
      h("h1", {}, `${split === "train" ? "Step" : `${split}, step`} ${step}, group ${group}`),
      answer.tags.map((tag) => h("span", { class: "tag" }, tag)),
      neighbour(answer.previous, "Previous group"), neighbour(answer.next, "Next group"),
      h("a", { class: "button", href: link("rollouts", { run, split, prompt_id: answer.prompt_id }), "data-go": true }, "Same question at all steps"),
      field("Colours", select(MODES, mode, (value) => {
        mode = value;
        setParams({ colours: value === "probability" ? "" : value });
        area.querySelectorAll(".answer").forEach((element) => element.turn && paint(element, value));
        drawLegend(value);
      }, "colours of tokens"))),
    h("p", { class: "facts" }, `${answer.rollouts.length} answers, mean reward ${number(rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1))}, sampled with ${weightsText(answer.sampler_step, Number(step))}. `,
      h("span", { class: "soft" }, high > low ? "The rewards differ, so the group has advantages." : "All rewards are equal, so the group teaches nothing.")),
    h("p", { class: "token-legend soft" }));
  function drawLegend(value) {
    fill(area.querySelector(".token-legend"), ...LEGENDS[value].map(([name, text]) => h("span", { class: `swatch ${name}` }, text)));
  }
  drawLegend(mode);
  if (!answer.rollouts.length) area.append(notice("There is no such group.", exported ? "This file contains some groups of each run; the others are in the run directory." : "The run may have been resumed before this step."));
  if (isShared && question) area.append(h("section", { class: "card question-card" }, h("h2", {}, "Question"), foldable(question)));
  // Keys work while the rest of the page is still loading.
  const wanted = params.get("sample"), focus = (index) => {
    const target = cards[Math.max(0, Math.min(cards.length - 1, index))];
    target?.focus();
    target?.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const start = answer.rollouts.findIndex((rollout) => String(rollout.sample) === wanted);
  onKey((event) => {
    if (event.target.closest?.(".answer")) return;
    const here = cards.indexOf(document.activeElement?.closest?.(".rollout"));
    if (event.key === "j") focus(here < 0 ? Math.max(0, start) : here + 1);
    else if (event.key === "k") focus(here < 0 ? Math.max(0, start) : here - 1);
    else if (event.key === "n") area.querySelector("a[rel=next]")?.click();
    else if (event.key === "p") area.querySelector("a[rel=prev]")?.click();
  });
  if (await actionsAllowed(signal)) {
    const { checkpoints } = await get("checkpoints", { run }, signal);
    const place = { run, split, step: Number(step), group: Number(group) }, weights = { checkpoint: "" };
    area.append(replayBar(place, weights, checkpoints, cards));
    onTokenChosen((span) => showAlternatives(span, place, weights), signal);
  } else {
    area.append(h("p", { class: "soft" }, "To sample these answers again: ", h("code", {}, `planish replay ${answer.path} --step ${step} --group ${group}`)));
  }
  area.append(h("div", { class: "answers" }, cards));
  if (start >= 0) { cards[start].classList.add("current"); cards[start].scrollIntoView({ block: "nearest" }); }
}

/** Say which weights sampled the group, and how many steps they are behind those that it trains. */
function weightsText(sampled, trained) {
  if (sampled === null || sampled === undefined) return "weights of an unknown step";
  const lag = trained - sampled;
  return `the weights of step ${number(sampled)}${lag > 0 ? `, ${number(lag)} ${lag === 1 ? "step" : "steps"} behind (off-policy)` : ""}`;
}

const LEGENDS = {
  probability: [["q0", "90% and more"], ["q1", "50%"], ["q2", "20%"], ["q3", "5%"], ["q4", "1%"], ["q5", "less"]],
  advantage: [["up2", "made more likely"], ["down2", "made less likely"]],
  gap: [["nogap", "trainer and sampler agree"], ["gap1", "differ a little"], ["gap3", "differ by more than 0.01"]],
  mask: [["trained", "trained on"], ["untrained", "not trained on"]],
  none: [],
};

function card(rollout, { low, high, mode, isShared }) {
  const { texts } = rollout;
  const title = h("header", {}, h("strong", {}, `#${rollout.sample}`), pill(rollout.reward, low, high),
    h("span", { class: `gain ${rollout.advantage > 0 ? "up" : rollout.advantage < 0 ? "down" : ""}`, title: "advantage" }, rollout.advantage === null ? "not trained on" : signed(rollout.advantage)),
    h("span", { class: rollout.ending === "completed" ? "soft" : "flag" }, rollout.ending || "–"),
    h("span", { class: "soft" }, `${number(rollout.tokens)} tokens`), rollout.turns > 1 && h("span", { class: "soft" }, `${rollout.turns} turns`));
  const body = texts ? texts.turns.map((turn, index) => turnElement(turn, rollout, { index, isShared, mode, several: texts.turns.length > 1 })) : notice("The texts cannot be shown.", rollout.problem);
  return h("article", { class: "rollout", tabindex: "-1", id: `s${rollout.sample}` }, title, body, texts && rewardSum(texts), h("footer", { class: "soft" }, `seed ${number(rollout.seed)}`));
}

function turnElement(turn, rollout, { index, isShared, mode, several }) {
  const metrics = Object.entries(turn.metrics ?? {}).filter(([name, value]) => !(name.startsWith("stop/") && !value));
  const logs = Object.entries(turn.logs ?? {});
  return h("section", { class: "turn" }, several && h("h3", {}, `Turn ${index + 1}`),
    !(index === 0 && isShared) && turn.observation && h("div", { class: "given" }, foldable(turn.observation)),
    answerElement(turn, rollout, mode),
    logs.length > 0 && h("dl", { class: "grades" }, logs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, foldable(String(value)))])),
    h("div", {}, metrics.map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", {}, number(value))))));
}

/** Why the reward is what it is: the sum of its parts. */
function rewardSum(texts) {
  const parts = [...texts.turns.map((turn, index) => [texts.turns.length > 1 ? `turn ${index + 1}` : "turn", turn.reward]), ["group", texts.group_reward]];
  const others = Object.entries(texts.group_metrics ?? {});
  return h("p", { class: "sum" }, "reward ", h("b", {}, number(texts.total_reward)), " = ", parts.map(([name, value], index) => [index ? " + " : "", h("b", {}, number(value)), ` (${name})`]),
    others.map(([name, value]) => h("span", { class: "chip" }, `${name} `, h("b", {}, number(value)))));
}

function foldable(text) {
  if (text.length <= LONG) return h("div", { class: "text" }, text);
  return h("details", {}, h("summary", {}, `${text.slice(0, 200)} … (${text.length} characters)`), h("div", { class: "text" }, text));
}

/** Controls that sample the group again, with its own weights or with those of a checkpoint. `weights` gets the choice. */
function replayBar(place, weights, checkpoints, cards) {
  const choices = [["", "the weights that sampled it"], ...checkpoints.map((row) => [row.sampler_path ?? row.state_path, `weights after step ${row.batch}`])];
  const said = h("span", { role: "status" });
  const button = h("button", { on: { click: async () => {
    button.disabled = true;
    said.textContent = "sampling …";
    try {
      const { turns } = await post("replay", { ...place, ...weights });
      const equal = turns.filter((turn) => turn.is_equal).length;
      said.textContent = equal === turns.length ? `bit-equal: all ${turns.length} answers` : `${equal} of ${turns.length} answers are bit-equal`;
      said.className = equal === turns.length ? "equal" : "flag";
      turns.forEach((turn) => showReplay(cards.find((card) => card.id === `s${turn.sample}`), turn));
    } catch (error) {
      said.textContent = error.message;
      said.className = "flag";
    } finally {
      button.disabled = false;
    }
  } } }, "Replay");
  return h("div", { class: "bar replay" }, button, select(choices, "", (value) => { weights.checkpoint = value; }, "weights of the replay"), said, h("span", { class: "soft" }, "Click a token to continue from another one."));
}

/** Offer other tokens in place of one, below its answer, and show what follows. */
async function showAlternatives(span, group, weights) {
  const answer = span.parentNode, { rollout, turn } = answer, number_ = rollout.texts.turns.indexOf(turn) + 1;
  const place = { ...group, ...weights, sample: rollout.sample, turn: number_, token: span.first };
  answer.parentNode.querySelector(".alternatives")?.remove();
  answer.querySelectorAll(".differs").forEach((other) => other.classList.remove("differs"));
  span.classList.add("differs");
  const said = h("p", { class: "soft", role: "status" }, "…"), choices = h("span"), result = h("div");
  const text = h("input", { type: "text", "aria-label": "other text", placeholder: "or type a text" });
  const box = h("section", { class: "alternatives" }, h("form", { class: "bar", on: { submit: (event) => { event.preventDefault(); if (text.value) go({ text: text.value }); } } },
    h("span", { class: "soft" }, `Instead of token ${span.first + 1}:`), choices, text, h("button", {}, "Continue")), said, result);
  answer.after(box);
  async function go(given) {
    said.textContent = "sampling …";
    try {
      const { turn: next } = await post("continue", { ...place, ...given });
      said.textContent = `From token ${span.first + 1} on: ${number(next.answer_ids.length)} tokens, ended: ${next.stop_reason}`;
      fill(result, answerElement({ ...next, is_trained: false }, rollout, "probability"));
    } catch (error) {
      said.textContent = error.message;
    }
  }
  try {
    const { alternatives } = await post("alternatives", place);
    said.textContent = "";
    fill(choices, alternatives.map(({ token, text: shown, logprob, is_recorded: isRecorded }) => h("button", { type: "button", class: isRecorded ? "recorded" : null, title: isRecorded ? "the recorded token" : null, on: { click: () => go({ tokens: [token] }) } },
      h("code", {}, JSON.stringify(shown)), ` ${number(Number((100 * Math.exp(logprob)).toPrecision(2)))} %`)));
  } catch (error) {
    said.textContent = error.message;
  }
}

/** Write below an answer what its replay gave, and mark the first token that differs. */
function showReplay(card, turn) {
  const answer = card.querySelectorAll(".answer")[turn.turn - 1];
  answer.querySelectorAll(".differs").forEach((span) => span.classList.remove("differs"));
  if (turn.first_difference !== null) {
    [...answer.children].find((span) => turn.first_difference >= span.first && turn.first_difference < span.last)?.classList.add("differs");
  }
  answer.parentNode.querySelector(".replayed")?.remove();
  answer.after(h("p", { class: `replayed ${turn.is_equal ? "equal" : "flag"}` }, turn.text));
}
