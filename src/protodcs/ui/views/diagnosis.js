/** What the stream can and cannot decide, estimated by the service when an operator asks for it. */

import { get, streamPath } from "../api.js";
import { Failure } from "../components/states.js";
import { linkTo } from "../navigation.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").ApiError} ApiError */
/** @typedef {{sentences: string[], misses_similar: boolean}} Diagnosis */

/** @param {{id: string, incarnation: string}} props */
export function ClassCheck({ id, incarnation }) {
  const [found, setFound] = useState(/** @type {Diagnosis | null} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [asked, setAsked] = useState(0);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    setFound(null);
    setError(null);
    setAsked(0);
  }, [id, incarnation]);
  useEffect(() => {
    if (asked === 0) {
      return undefined;
    }
    const stop = new AbortController();
    const end = (/** @type {() => void} */ change) => {
      if (!stop.signal.aborted) {
        change();
        setBusy(false);
      }
    };
    setBusy(true);
    setError(null);
    get(streamPath(id, "/diagnosis"), stop.signal).then(
      (answer) => end(() => setFound(answer)),
      (problem) => end(() => setError(problem)),
    );
    return () => stop.abort();
  }, [asked]);
  return h(
    "div",
    { class: "check", "aria-live": "polite" },
    found &&
      h(
        "ul",
        null,
        found.sentences.map((sentence) => h("li", { key: sentence }, sentence)),
      ),
    found?.misses_similar && h("p", null, h("a", { href: linkTo(id, "review") }, "Review the most doubtful decisions")),
    found?.sentences.length === 0 && h("p", { class: "hint" }, "Too few samples to say anything."),
    error && h(Failure, { error }),
    h(
      "button",
      { type: "button", disabled: busy, onClick: () => setAsked((before) => before + 1) },
      busy ? "Checking…" : found ? "Check again" : "Check classes",
    ),
  );
}
