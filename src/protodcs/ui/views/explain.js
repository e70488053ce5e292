/** Why a sample was decided as it was: one axis, one sentence, the best classes, and similar samples. Correct it there. */

import { get, streamPath } from "../api.js";
import { Correct } from "../components/correct.js";
import { Dialog } from "../components/dialog.js";
import { Picture } from "../components/picture.js";
import { ScoreAxis } from "../components/score_axis.js";
import { Failure, Loading, Pill } from "../components/states.js";
import { toldBy } from "../logic/demo.js";
import { decimal, percent } from "../logic/format.js";
import { asDecision } from "../logic/history.js";
import { warningText } from "../logic/problems.js";
import { whySentence } from "../logic/reasons.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { Bars } from "./overview.js";

/** @typedef {import("../logic/history.js").Decision} Decision */
/** @typedef {import("../api.js").ApiError} ApiError */

const RECENT = 1000;
const SIMILAR = 5;

/**
 * @param {{id: string, decision: Decision, classes?: string[], onCorrected?: () => void, onClose: () => void}} props
 *   `classes` that a correction may name; without them, nothing can be corrected
 */
export function ExplainDialog({ id, decision, classes = [], onCorrected = () => {}, onClose }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [recent, setRecent] = useState(/** @type {Decision[]} */ ([]));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [said, setSaid] = useState(/** @type {string | undefined} */ (undefined));
  useEffect(() => {
    const stop = new AbortController();
    const failed = (/** @type {ApiError} */ problem) => stop.signal.aborted || setError(problem);
    get(streamPath(id, `/decisions/${decision.position}/explanation`), stop.signal).then(setFound, failed);
    get(streamPath(id, `/decisions?limit=${RECENT}`), stop.signal).then(
      ({ items }) => setRecent(items.map(asDecision)),
      failed,
    );
    return () => stop.abort();
  }, [id, decision.position, said]);
  const likely = (found?.best ?? []).map((/** @type {[string, number]} */ [name]) => name);
  const corrected = (/** @type {string | null} */ label) => {
    setSaid(label ?? "unknown");
    onCorrected();
  };
  return h(
    Dialog,
    { title: `Decision ${decision.position}: ${decision.label ?? "unknown"}`, onClose, wide: true },
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
          decision.nearest && h("p", null, `Nearest class: ${decision.nearest}`),
          decision.reason && h("p", null, warningText(decision.reason)),
          decision.imageRef &&
            h("p", { class: "hint reference" }, toldBy(decision.imageRef)?.truth ?? decision.imageRef),
        ),
      ),
      found !== null &&
        classes.length > 0 &&
        h(Correct, { id, position: decision.position, classes, likely, done: corrected }),
      said !== undefined && h("p", { class: "notice", role: "status" }, `Corrected: it is ${said}.`),
      error
        ? error.status === 404 || error.status === 409
          ? h("p", { class: "hint" }, "The stream no longer stores this sample, so it cannot be explained.")
          : h(Failure, { error })
        : found === null
          ? h(Loading, { what: "the explanation" })
          : h(Explanation, { id, found, recent, position: decision.position }),
    ),
  );
}

/** @param {{id: string, found: any, recent: Decision[], position: number}} props */
function Explanation({ id, found, recent, position }) {
  const { verification, best } = found;
  const highest = Math.max(...best.map((/** @type {[string, number]} */ [, logit]) => logit));
  const weights = best.map((/** @type {[string, number]} */ [, logit]) => Math.exp(logit - highest));
  const total = weights.reduce((/** @type {number} */ sum, /** @type {number} */ weight) => sum + weight, 0);
  const byPosition = new Map(recent.map((one) => [one.position, one]));
  const similar = /** @type {number[]} */ (found.similar ?? []).flatMap((place) => {
    const one = byPosition.get(place);
    return one === undefined || one.position === position || one.label === null ? [] : [one];
  });
  return h(
    "div",
    null,
    h("h3", null, "What the stream would decide now"),
    verification &&
      h("p", null, whySentence({ ...verification, nearest: best[0]?.[0], isKnown: found.decision?.known ?? false })),
    verification && h(ScoreAxis, { recent, score: verification.score, threshold: verification.threshold }),
    similar.length > 0 && [
      h("h3", { key: "title" }, "Similar images that are known"),
      h(
        "ul",
        { key: "images", class: "thumbnails" },
        similar
          .slice(0, SIMILAR)
          .map((one) =>
            h(
              "li",
              { key: one.position },
              h(Picture, { id, position: one.position, exists: one.hasThumbnail }),
              h("small", null, one.label),
            ),
          ),
      ),
    ],
    h("h3", null, "Best classes"),
    h(Bars, {
      bars: best.map((/** @type {[string, number]} */ [name], /** @type {number} */ place) => ({
        name,
        size: weights[place] / total,
        text: percent(weights[place] / total, 1),
      })),
    }),
    verification &&
      h("details", null, h("summary", null, "Numbers"), h("p", { class: "hint" }, `${sentence(verification.reason)}`)),
    found.class_bias != null &&
      h("p", { class: "hint" }, `The class bias adds ${decimal(found.class_bias, 3)} to the logit of ${best[0]?.[0]}.`),
  );
}

/** @param {string} text */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
