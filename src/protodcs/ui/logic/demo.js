/** The truth and the decisions of frozen zero-shot, which `protodcs demo` sends in its image references. Pure functions. */

/** @typedef {import("./history.js").Decision} Decision */

/**
 * What is known of an image of the demo.
 * @typedef {object} Told
 * @property {number} place of the image in its round, from 0
 * @property {number} images number of images of a round
 * @property {string} shift such as "fog"
 * @property {number} left number of images until the next shift, this one included
 * @property {string} next shift
 * @property {string} truth what the image shows
 * @property {boolean} known whether that was a class from the start
 * @property {string | null} frozen label of frozen zero-shot; null if it says unknown
 */

/** @typedef {{decision: Decision, told: Told}} Step */
/** @typedef {{correct: number, known: number, rejected: number, unknown: number, found: number}} Counts */

const PREFIX = "demo?";

/** Return what an image reference tells; null if it is not one of the demo. @param {string | null} reference @returns {Told | null} */
export function toldBy(reference) {
  if (!reference?.startsWith(PREFIX)) {
    return null;
  }
  const values = new URLSearchParams(reference.slice(PREFIX.length));
  const text = (/** @type {string} */ name) => values.get(name) ?? "";
  return {
    place: Number(text("place")),
    images: Number(text("images")),
    shift: text("shift"),
    left: Number(text("left")),
    next: text("next"),
    truth: text("truth"),
    known: text("known") === "1",
    frozen: text("frozen") || null,
  };
}

/** Return the decisions of the demo with what is known of them. @param {Decision[]} decisions @returns {Step[]} */
export function stepsOf(decisions) {
  return decisions.flatMap((decision) => {
    const told = toldBy(decision.imageRef);
    return told === null ? [] : [{ decision, told }];
  });
}

/**
 * Return whether a label is right. A kind that was unknown may have a name by now: then its name is right too.
 * @param {Told} told
 * @param {string | null} label
 */
export function isRight(told, label) {
  return label === told.truth || (label === null && !told.known);
}

/** @param {Step[]} steps @param {(step: Step) => string | null} labelOf @returns {Counts} */
export function countsOf(steps, labelOf) {
  const counts = { correct: 0, known: 0, rejected: 0, unknown: 0, found: 0 };
  for (const step of steps) {
    const label = labelOf(step);
    const right = isRight(step.told, label);
    counts.correct += right ? 1 : 0;
    if (step.told.known) {
      counts.known += 1;
      counts.rejected += label === null ? 1 : 0;
    } else {
      counts.unknown += 1;
      counts.found += right ? 1 : 0;
    }
  }
  return counts;
}

/** @param {Step} step */
export const adapted = ({ decision }) => decision.label;
/** @param {Step} step */
export const frozen = ({ told }) => told.frozen;

/**
 * Return the share of right decisions among the last ones, for each step from the first full window on.
 * @param {Step[]} steps
 * @param {(step: Step) => string | null} labelOf
 * @param {number} window
 */
export function rightShares(steps, labelOf, window) {
  const right = steps.map((step) => (isRight(step.told, labelOf(step)) ? 1 : 0));
  let sum = 0;
  return right.map((value, place) => {
    sum += value - (right[place - window] ?? 0);
    return place + 1 < window ? null : sum / window;
  });
}

/**
 * Return the stretches of steps with one shift, without those that have none.
 * @param {Step[]} steps
 * @returns {{from: number, to: number, label: string}[]} places in `steps`
 */
export function shiftBands(steps) {
  /** @type {{from: number, to: number, label: string}[]} */
  const bands = [];
  steps.forEach(({ told: { shift } }, place) => {
    const last = bands.at(-1);
    if (last && last.label === shift && last.to === place) {
      last.to = place + 1;
    } else if (shift !== "clean") {
      bands.push({ from: place, to: place + 1, label: shift });
    }
  });
  return bands;
}
