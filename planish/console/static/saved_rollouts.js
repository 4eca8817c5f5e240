// Answers requests for rollouts from those that an exported page contains, as the console answers them.

const MAX_BARS = 24;

/** Return the rollouts that pass the filters of a request, one page of them with snippets. */
export function savedRollouts(saved, params) {
  const without = { ...params, reward_from: "", reward_to: "" };
  const all = saved.rollouts, inAnyReward = all.filter((row) => passes(row, without));
  const matched = ordered(inAnyReward.filter((row) => passes(row, params)), params.sort ?? "");
  const rewards = all.map((row) => row.reward).filter(Number.isFinite), steps = all.map((row) => row.step);
  const from = Number(params.offset || 0);
  return {
    total: all.length, matched: matched.length, candidates: matched.length, searched: matched.length, problems: [], saved_of: saved.total,
    rows: matched.slice(from, from + Number(params.limit || 100)).map(withSnippets),
    histogram: histogram(inAnyReward.map((row) => row.reward).filter(Number.isFinite)),
    reward_range: rewards.length ? [least(rewards), -least(rewards.map((reward) => -reward))] : [0, 0],
    steps: steps.length ? [least(steps), -least(steps.map((step) => -step))] : [null, null],
    choices: { split: counts(all, (row) => [row.split]), ending: counts(all, (row) => [row.ending]), tag: counts(all, (row) => row.tags), error: counts(all, (row) => row.errors) },
  };
}

/** Return one group with its texts, and its neighbours. */
export function savedGroup(saved, { split, step, group }) {
  const batch = saved.rollouts.filter((row) => row.split === split && row.step === Number(step));
  const rollouts = batch.filter((row) => row.group === Number(group)), numbers = [...new Set(batch.map((row) => row.group))];
  const neighbour = (number) => (number === undefined ? null : { split, step, group: number });
  return {
    path: saved.path, rollouts, tags: rollouts[0]?.tags ?? [], prompt_id: rollouts[0]?.prompt_id, sampler_step: rollouts[0]?.sampler_step,
    previous: neighbour(numbers.filter((number) => number < Number(group)).at(-1)), next: neighbour(numbers.find((number) => number > Number(group))),
  };
}

const isGiven = (value) => value !== undefined && value !== null && value !== "";
const least = (values) => values.reduce((low, value) => Math.min(low, value), Infinity);

function passes(row, params) {
  const inRange = (name) => (!isGiven(params[`${name}_from`]) || row[name] >= Number(params[`${name}_from`])) && (!isGiven(params[`${name}_to`]) || row[name] <= Number(params[`${name}_to`]))
    && (row[name] !== null || !(isGiven(params[`${name}_from`]) || isGiven(params[`${name}_to`])));
  const equals = (name) => !isGiven(params[name]) || String(row[name]) === String(params[name]);
  return inRange("step") && inRange("reward") && ["split", "ending", "group", "prompt_id"].every(equals)
    && (!isGiven(params.tag) || row.tags.includes(params.tag)) && (!isGiven(params.error) || row.errors.includes(params.error))
    && (!isGiven(params.text) || contains(row.texts?.turns, params.text.toLowerCase()));
}

/** Whether a text in a value contains a word: prompts, answers and logs. */
function contains(value, word) {
  if (typeof value === "string") return value.toLowerCase().includes(word);
  return value !== null && typeof value === "object" && Object.values(value).some((part) => contains(part, word));
}

function ordered(rows, sort) {
  const name = sort.replace(/^-/, ""), sign = sort.startsWith("-") ? -1 : 1;
  if (!name) return rows;
  const key = (row) => (row[name] === null ? Infinity : sign * row[name]);
  return [...rows].sort((a, b) => (key(a) === key(b) ? 0 : key(a) - key(b)));
}

function withSnippets(row) {
  const turns = row.texts?.turns ?? [];
  const tail = (text) => String(text ?? "").slice(-800).split(/\s+/).filter(Boolean).join(" ").slice(-200);
  return { ...row, question: tail(turns[0]?.observation), answer: tail(turns.at(-1)?.answer) };
}

function counts(rows, values) {
  const found = new Map();
  for (const row of rows) for (const value of values(row)) if (value) found.set(value, (found.get(value) ?? 0) + 1);
  return [...found].sort(([a, more], [b, less]) => less - more || (a < b ? -1 : 1));
}

/** Bars of rewards: one for each value if there are at most MAX_BARS values, else bars of equal width. */
function histogram(rewards) {
  const values = [...new Set(rewards)].sort((a, b) => a - b);
  if (values.length <= MAX_BARS) return values.map((value) => ({ low: value, high: value, count: rewards.filter((reward) => reward === value).length }));
  const low = values[0], width = (values.at(-1) - low) / MAX_BARS;
  const bars = Array.from({ length: MAX_BARS }, (_, index) => ({ low: low + index * width, high: low + (index + 1) * width, count: 0 }));
  for (const reward of rewards) bars[Math.min(MAX_BARS - 1, Math.floor((reward - low) / width))].count += 1;
  return bars;
}
