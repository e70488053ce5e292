/** Why a sample was decided as it was: bars and sentences. */

import { get, streamPath } from "../api.js";
import { Dialog } from "../components/dialog.js";
import { Picture } from "../components/picture.js";
import { Failure, Loading, Pill } from "../components/states.js";
import { decimal, percent } from "../logic/format.js";
import { warningText } from "../logic/problems.js";
import { spansOf } from "../logic/spans.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { Bars } from "./overview.js";

/** @typedef {import("../logic/history.js").Decision} Decision */
/** @typedef {import("../api.js").ApiError} ApiError */

/**
 * @param {{id: string, decision: Decision, onClose: () => void}} props
 */
export function ExplainDialog({ id, decision, onClose }) {
  const answer = decision.label ?? "unknown";
  return h(
    Dialog,
    { title: `Decision ${decision.position}: ${answer}`, onClose, wide: true },
    h(
      "div",
      { class: "body explain" },
      h(
        "div",
        { class: "sample" },
        h(Picture, { id, position: decision.position, exists: decision.hasThumbnail }),
        h(
          "div",
          null,
          h(
            "p",
            null,
            h(Pill, { kind: decision.outcome }, decision.outcome),
            decision.rolledBack && h(Pill, { kind: "frozen" }, "rolled back"),
          ),
          h("p", null, `Probability of unknown: ${percent(decision.pUnknown, 1)}`),
          h("p", null, `Score: ${decimal(decision.score)}`),
          decision.nearest && h("p", null, `Nearest class: ${decision.nearest}`),
          decision.reason && h("p", null, warningText(decision.reason)),
        ),
      ),
      h(Explanation, { id, decision }),
    ),
  );
}

/** @param {{id: string, decision: Decision}} props */
function Explanation({ id, decision }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  useEffect(() => {
    get(streamPath(id, `/decisions/${decision.position}/explanation`)).then(setFound, setError);
  }, [id, decision.position]);
  if (error) {
    return error.status === 404 || error.status === 409
      ? h("p", { class: "hint" }, "The stream no longer stores this sample, so it cannot be explained.")
      : h(Failure, { error });
  }
  if (found === null) {
    return h(Loading, { what: "the explanation" });
  }
  const { verification, best } = found;
  const highest = Math.max(...best.map((/** @type {[string, number]} */ [, logit]) => logit));
  const weights = best.map((/** @type {[string, number]} */ [, logit]) => Math.exp(logit - highest));
  const total = weights.reduce((/** @type {number} */ sum, /** @type {number} */ weight) => sum + weight, 0);
  return h(
    "div",
    null,
    h("h3", null, "What the stream would decide now"),
    verification && h("p", null, sentence(verification.reason)),
    verification?.threshold != null && h(Bars, scoreBars(verification)),
    h("h3", null, "Best classes"),
    h(Bars, {
      bars: best.map((/** @type {[string, number]} */ [name], /** @type {number} */ place) => ({
        name,
        size: weights[place] / total,
        text: percent(weights[place] / total, 1),
      })),
    }),
    found.class_bias != null &&
      h("p", { class: "hint" }, `The class bias adds ${decimal(found.class_bias, 3)} to the logit of ${best[0]?.[0]}.`),
  );
}

const SCORES = ["text_score", "head_score", "score", "threshold"];

/** @param {Record<string, number>} verification */
function scoreBars(verification) {
  const values = SCORES.map((name) => verification[name] ?? 0);
  const { zero, spans } = spansOf(values);
  const bars = SCORES.map((name, place) => {
    const value = /** @type {number} */ (values[place]);
    // What the head adds has no threshold of its own.
    const limit = name === "head_score" ? 0 : (verification.threshold ?? 0);
    const span = /** @type {{start: number, size: number}} */ (spans[place]);
    const kind = name === "threshold" || value < limit ? "unknown" : "known";
    return { name: name.replace("_", " "), text: decimal(value), kind, ...span };
  });
  return { bars, zero };
}

/** @param {string} text */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
