// Tokens of an answer as elements, and the tip above one. The pages of rollouts and the console share this.

export const PROBABILITY_BINS = [0.9, 0.5, 0.2, 0.05, 0.01];

/** Return the class that colours a token by its logprob: q0 for the likeliest, q5 for the least likely. */
export function probabilityClass(logprob) {
  const bin = PROBABILITY_BINS.findIndex((lowest) => Math.exp(logprob) >= lowest);
  return `q${bin < 0 ? PROBABILITY_BINS.length : bin}`;
}

/** Divide a text into elements. `lengthCodes` has the UTF-16 units of each, and "*n" for n tokens that make one character. */
export function tokenElements(text, lengthCodes, controls) {
  let offset = 0, token = 0;
  return lengthCodes.map((code, index) => {
    const [units, count] = code.split("*").map(Number), span = document.createElement("span");
    span.textContent = text.slice(offset, offset + units);
    span.first = token;
    span.last = token + (count || 1);
    if (controls.has(index)) span.classList.add("control");
    offset += units;
    token = span.last;
    return span;
  });
}

/** Return a token's text; one that could not be seen is quoted. */
export const visibleText = (text) => (/^\s|\s$|[^\x20-\x7e]/.test(text) ? JSON.stringify(text) : text);

export function percentText(logprob) {
  const percent = 100 * Math.exp(logprob);
  return `${percent >= 10 ? percent.toFixed(1) : percent.toPrecision(2)} %`;
}

/** Put a tip above a token, or below it at the top of the window. */
export function placeTip(tip, span) {
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect(), size = tip.getBoundingClientRect(), above = box.top - size.height - 6;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - size.width - 6))}px`;
  tip.style.top = `${above > 6 ? above : box.bottom + 6}px`;
}
