/** Why a sample was decided as it was: bars and sentences. */

import { ApiError, address, may, request, streamPath } from "../api.js";
import { Dialog } from "../components/dialog.js";
import { Picture } from "../components/picture.js";
import { Failure, Loading, Pill } from "../components/states.js";
import { decimal, percent } from "../logic/format.js";
import { warningText } from "../logic/problems.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { Bars } from "./overview.js";

/** @typedef {import("../logic/history.js").Decision} Decision */

/**
 * @param {{id: string, decision: Decision, session: import("../api.js").Session, onClose: () => void}} props
 */
export function ExplainDialog({ id, decision, session, onClose }) {
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
      may(session, "observe") && decision.hasThumbnail && h(Explanation, { id, decision }),
    ),
  );
}

/** @param {{id: string, decision: Decision}} props */
function Explanation({ id, decision }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  useEffect(() => {
    explain(id, decision.position).then(setFound, setError);
  }, [id, decision.position]);
  if (error) {
    return h(Failure, { error });
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
    verification?.threshold != null &&
      h(Bars, {
        bars: ["text_score", "head_score", "score", "threshold"].map((name) => ({
          name: name.replace("_", " "),
          size:
            Math.abs(verification[name]) /
            Math.max(
              Math.abs(verification.score),
              Math.abs(verification.threshold),
              Math.abs(verification.text_score),
              1e-9,
            ),
          text: decimal(verification[name]),
          kind: name === "threshold" || verification[name] < 0 ? "unknown" : "known",
        })),
      }),
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

/** @param {string} text */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

/** @param {string} id @param {number} position */
async function explain(id, position) {
  const response = await fetch(address(streamPath(id, `/decisions/${position}/thumbnail`)));
  if (!response.ok) {
    throw new ApiError(response.status, "", "The image of this sample is no longer stored.");
  }
  return request("POST", streamPath(id, "/explain"), { body: await response.blob() });
}
