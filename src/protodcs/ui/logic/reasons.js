/** Why a sample is decided as it is, in one sentence. Pure functions. */

import { decimal } from "./format.js";

/**
 * @param {{score: number, threshold: number | null, correction_score: number, nearest: string, isKnown: boolean}} about
 */
export function whySentence({ score, threshold, correction_score, nearest, isKnown }) {
  if (threshold === null) {
    return "The stream has seen too few samples for a threshold.";
  }
  const [first, second] = isKnown
    ? [`above the threshold of ${decimal(threshold)}`, `${nearest} stands out clearly enough from the other classes`]
    : [`below the threshold of ${decimal(threshold)}`, `not even ${nearest}, the nearest class, stands out enough`];
  const corrected = correction_score ? " Corrections of similar images moved the score." : "";
  return `The score of ${decimal(score)} is ${first}: ${second}.${corrected}`;
}
