/** Decisions per interval of time. Pure functions. */

/** @typedef {import("./history.js").Decision} Decision */

/** Lengths of an interval in seconds. */
export const STEPS = [1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 21600, 86400];
const MOST = 120;

/**
 * Return the intervals of a timeline, and how many decisions of each outcome fall into them.
 * @param {Decision[]} decisions in the order of time
 */
export function timeline(decisions) {
  const first = decisions[0]?.time ?? 0;
  const last = decisions.at(-1)?.time ?? 0;
  const span = Math.max(last - first, 1);
  const step = STEPS.find((length) => span / length < MOST) ?? Math.ceil(span / MOST);
  const start = Math.floor(first / step) * step;
  const intervals = decisions.length === 0 ? 0 : Math.floor((last - start) / step) + 1;
  /** @type {number[]} */
  const times = Array.from({ length: intervals }, (_, place) => start + place * step);
  const known = new Array(intervals).fill(0);
  const unsure = new Array(intervals).fill(0);
  const unknown = new Array(intervals).fill(0);
  const counts = { known, unsure, unknown };
  for (const { time, outcome } of decisions) {
    const place = Math.min(intervals - 1, Math.max(0, Math.floor((time - start) / step)));
    counts[outcome][place] += 1;
  }
  return { step, times, known, unsure, unknown };
}
