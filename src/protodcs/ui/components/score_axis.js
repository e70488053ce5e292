/** One axis of scores: the recent known and unknown decisions, the threshold, and one sample. */

import { decimal } from "../logic/format.js";
import { histogram } from "../logic/groups.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../logic/history.js").Decision} Decision */

/** Units of the drawing are pixels on a phone, so that its text can be read. */
const WIDEST = 600;
const MARGINS = 70;
const HEIGHT = 150;
/** Room above the bars for the sample, and below them for numbers. */
const TOP = 34;
const BOTTOM = 34;
const BINS = 48;

/**
 * @param {{recent: Decision[], score: number, threshold: number | null}} props
 */
export function ScoreAxis({ recent, score, threshold }) {
  const total = Math.min(WIDEST, innerWidth - MARGINS);
  const scores = recent.map((decision) => decision.score).filter(Number.isFinite);
  const values = [...scores, score, ...(threshold === null ? [] : [threshold])];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = 0.04 * (high - low || 1);
  const across = (/** @type {number} */ value) => (total * (value - low + margin)) / (high - low + 2 * margin);
  const { centres, width, known, unsure, unknown } = histogram(recent, BINS, threshold);
  const most = Math.max(1, ...centres.map((_, bin) => (known[bin] ?? 0) + (unsure[bin] ?? 0) + (unknown[bin] ?? 0)));
  const room = HEIGHT - TOP - BOTTOM;
  const bars = centres.flatMap((centre, bin) => {
    let floor = HEIGHT - BOTTOM;
    return /** @type {[string, number[]][]} */ ([
      ["unknown", unknown],
      ["unsure", unsure],
      ["known", known],
    ]).map(([kind, counts]) => {
      const height = (room * (counts[bin] ?? 0)) / most;
      floor -= height;
      const left = across(centre - width / 2);
      return h("rect", {
        key: `${kind} ${bin}`,
        class: `fill-${kind}`,
        x: left,
        y: floor,
        width: Math.max(1, across(centre + width / 2) - left - 1),
        height,
      });
    });
  });
  const at = across(score);
  const limit = threshold === null ? null : across(threshold);
  const anchor = (/** @type {number} */ x) => (x < 0.2 * total ? "start" : x > 0.8 * total ? "end" : "middle");
  const said = threshold === null ? "there is no threshold yet" : `the threshold is ${decimal(threshold)}`;
  return h(
    "svg",
    {
      class: "score-axis",
      viewBox: `0 0 ${total} ${HEIGHT}`,
      role: "img",
      "aria-label": `The score of this sample is ${decimal(score)}, ${said}. The bars are the scores of the last ${recent.length} decisions.`,
    },
    bars,
    h("line", { class: "axis", x1: 0, x2: total, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    limit !== null && [
      h("line", { key: "line", class: "limit", x1: limit, x2: limit, y1: TOP - 6, y2: HEIGHT - BOTTOM + 6 }),
      h(
        "text",
        { key: "text", x: limit, y: HEIGHT - 14, "text-anchor": anchor(limit) },
        `threshold ${decimal(threshold)}`,
      ),
    ],
    h("path", { class: "sample", d: `M ${at - 7} ${TOP - 12} h 14 l -7 10 z` }),
    h("line", { class: "sample-line", x1: at, x2: at, y1: TOP - 4, y2: HEIGHT - BOTTOM }),
    h("text", { class: "strong", x: at, y: TOP - 17, "text-anchor": anchor(at) }, `this image ${decimal(score)}`),
    h("text", { class: "muted", x: 4, y: HEIGHT - 2 }, "← looks unknown"),
    h("text", { class: "muted", x: total - 4, y: HEIGHT - 2, "text-anchor": "end" }, "looks known →"),
  );
}
