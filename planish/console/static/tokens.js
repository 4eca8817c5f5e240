// Tokens of an answer as coloured text, and the tip that says what a token is.

import { fill, h, number, signed } from "./dom.js";
import { percentText, placeTip, probabilityClass, tokenElements, visibleText } from "./token_text.js";

export const MODES = [["probability", "probability"], ["advantage", "advantage"], ["gap", "gap between sampler and trainer"], ["mask", "trained or not"], ["none", "no colours"]];

const tip = h("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);
let shown = null;

/** Return an element with the answer of a turn, painted in a mode. The arrow keys move from token to token. */
export function answerElement(turn, rollout, mode) {
  const element = h("div", { class: "answer", tabindex: "0", role: "textbox", "aria-readonly": "true", "aria-label": "answer; arrow keys go through its tokens" });
  element.turn = turn;
  element.rollout = rollout;
  const sizes = (turn.piece_lengths ?? "").split(" ").filter(Boolean);
  if (!sizes.length) {
    element.textContent = turn.answer ?? "";
    return element;
  }
  element.append(...tokenElements(turn.answer, sizes, new Set(turn.control_pieces ?? [])));
  paint(element, mode);
  return element;
}

/** Colour the tokens of an answer. */
export function paint(element, mode) {
  const { turn, rollout } = element;
  for (const span of element.children) {
    span.className = span.classList.contains("control") ? "control" : "";
    const name = className(mode, turn, rollout, span);
    if (name) span.classList.add(name);
  }
}

function className(mode, turn, rollout, span) {
  if (mode === "probability" && turn.logprobs) {
    const logprob = turn.logprobs.slice(span.first, span.last).reduce((sum, each) => sum + (each ?? 0), 0);
    return probabilityClass(logprob);
  }
  if (mode === "mask") return isTrained(turn, rollout) ? "trained" : "untrained";
  if (mode === "advantage") {
    const value = tokenAdvantage(turn, rollout, span.first);
    return value ? (value > 0 ? "up" : "down") + Math.min(3, Math.ceil(Math.abs(value) * 2)) : "";
  }
  if (mode === "gap") {
    const gap = largestGap(turn, span);
    return gap === null ? "" : gap === 0 ? "nogap" : `gap${Math.min(3, 1 + Math.floor(Math.max(0, Math.log10(Math.abs(gap) / 1e-4))))}`;
  }
  return "";
}

/** Whether the loss has the tokens of a turn. Evaluations and groups without a signal have no advantage. */
const isTrained = (turn, rollout) => turn.is_trained && Boolean(turn.advantages || (rollout.advantage !== null && rollout.advantage !== undefined));
const tokenAdvantage = (turn, rollout, token) => (isTrained(turn, rollout) ? (turn.advantages?.[token] ?? rollout.advantage) : 0);
const tokenGap = (turn, token) => (turn.trainer_logprobs ? turn.trainer_logprobs[token] - turn.logprobs[token] : turn.has_equal_trainer_logprobs ? 0 : null);

/** Return the largest gap of the tokens that make a character; null if the trainer's logprobs are unknown. */
function largestGap(turn, span) {
  let largest = null;
  for (let token = span.first; token < span.last; token++) {
    const gap = tokenGap(turn, token);
    if (gap !== null && Math.abs(gap) >= Math.abs(largest ?? 0)) largest = gap;
  }
  return largest;
}

/** Call `listener` with the element of a token that is clicked, or chosen with Enter, until `signal` aborts. */
export function onTokenChosen(listener, signal) {
  const choose = (span) => { if (span && span.parentNode.rollout.texts?.turns.includes(span.parentNode.turn)) listener(span); };
  document.addEventListener("click", (event) => { if (event.target instanceof Element) choose(event.target.closest(".answer > span")); }, { signal });
  document.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.classList?.contains("answer")) choose(shown); }, { signal });
}

function fillTip(span) {
  const { turn, rollout } = span.parentNode, lines = [];
  const line = (label, value) => lines.push(h("div", {}, h("span", {}, label), value));
  lines.push(h("code", {}, visibleText(span.textContent)));
  if (span.last - span.first > 1) line(`${span.last - span.first} tokens make this character`, "");
  for (let token = span.first; token < span.last; token++) {
    const logprob = turn.logprobs?.[token];
    line("token", String(turn.answer_ids?.[token] ?? "–"));
    if (logprob !== undefined && logprob !== null) {
      line("logprob", String(logprob));
      line("probability", percentText(logprob));
    }
    const gap = tokenGap(turn, token);
    if (gap !== null) line("trainer − sampler", gap === 0 ? "0" : gap.toExponential(2));
    line("advantage", isTrained(turn, rollout) ? signed(tokenAdvantage(turn, rollout, token)) : "not trained on");
    line("position", `${token + 1} of ${number(turn.answer_ids?.length)}`);
  }
  fill(tip, ...lines);
}

function show(span) {
  if (span === shown) return;
  shown?.classList.remove("pointed");
  shown = span;
  tip.hidden = !span;
  if (!span) return;
  span.classList.add("pointed");
  fillTip(span);
  placeTip(tip, span);
}

document.addEventListener("pointerover", (event) => show(event.target instanceof Element ? event.target.closest(".answer > span") : null));
document.addEventListener("scroll", () => show(null), { passive: true, capture: true });
document.addEventListener("focusout", (event) => { if (event.target.classList?.contains("answer")) show(null); });
document.addEventListener("keydown", (event) => {
  const answer = event.target instanceof Element && event.target.classList.contains("answer") ? event.target : null;
  if (!answer) return;
  if (event.key === "Escape") return show(null);
  const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!offset || !answer.children.length) return;
  event.preventDefault();
  const next = shown?.parentNode === answer ? (offset > 0 ? shown.nextElementSibling : shown.previousElementSibling) : answer.firstElementChild;
  if (next) show(next);
});
