/** Review: samples that the stream is least sure about, one after the other, answered with the keyboard. */

import { get, may, post, request, streamPath } from "../api.js";
import { ClassInput } from "../components/correct.js";
import { ImagesHint, Picture } from "../components/picture.js";
import { Empty, Failure, Loading, Pill } from "../components/states.js";
import { percent, quantity } from "../logic/format.js";
import { asDecision } from "../logic/history.js";
import { likelyClasses, meaningOf, SEARCH_KEY, SKIP_KEY, UNDO_KEY, UNKNOWN_KEY } from "../logic/review_keys.js";
import { useCallback, useEffect, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../api.js").ApiError} ApiError */
/** @typedef {import("../logic/history.js").Decision} Decision */
/** @typedef {{decision: Decision, label: string | null, place: number}} Answer `place`: of the sample in the queue */

const PAGE = 30;
/** An answer is sent after so many milliseconds, or with the next one. Until then it can be undone. */
const UNDO_TIME = 6000;

/**
 * @param {{status: StreamStatus, session: import("../api.js").Session}} props
 */
export function Review({ status, session }) {
  const { id, classes } = status;
  const reviews = may(session, "observe");
  const [queue, setQueue] = useState(/** @type {Decision[] | null} */ (null));
  const [place, setPlace] = useState(0);
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [pending, setPending] = useState(/** @type {Answer | null} */ (null));
  const [unsent, setUnsent] = useState(/** @type {{answer: Answer, problem: ApiError}[]} */ ([]));
  const [delivered, setDelivered] = useState(/** @type {Answer[]} */ ([]));
  const [best, setBest] = useState(/** @type {string[]} */ ([]));
  const waiting = useRef(/** @type {{answer: Answer, timer: ReturnType<typeof setTimeout>} | null} */ (null));

  const load = useCallback(() => {
    setQueue(null);
    setPlace(0);
    get(streamPath(id, `/review?limit=${PAGE}`)).then(({ items }) => {
      setQueue(items.map(asDecision));
      setError(null);
    }, setError);
  }, [id]);
  useEffect(load, [load]);

  const deliver = useCallback(
    (/** @type {Answer} */ given) =>
      post(streamPath(id, "/feedback"), { position: given.decision.position, label: given.label }).then(
        () => setDelivered((before) => [...before, given]),
        (problem) => setUnsent((before) => [...before, { answer: given, problem }]),
      ),
    [id],
  );
  /** Send the answer that waits. */
  const send = useCallback(async () => {
    const { current } = waiting;
    waiting.current = null;
    setPending(null);
    if (current !== null) {
      clearTimeout(current.timer);
      await deliver(current.answer);
    }
  }, [deliver]);
  const sendAgain = () => {
    setUnsent([]);
    for (const { answer: given } of unsent) {
      deliver(given);
    }
  };
  useEffect(() => {
    addEventListener("pagehide", send);
    return () => {
      removeEventListener("pagehide", send);
      send();
    };
  }, [send]);

  const decision = queue?.[place] ?? null;
  const position = decision?.position;
  useEffect(() => {
    setBest([]);
    if (position === undefined) {
      return undefined;
    }
    const stop = new AbortController();
    get(streamPath(id, `/decisions/${position}/explanation`), stop.signal).then(
      (found) => setBest(found.best.map((/** @type {[string, number]} */ [name]) => name)),
      () => {},
    );
    return () => stop.abort();
  }, [id, position]);
  const likely = likelyClasses(best, decision?.nearest ?? null, classes);
  const answer = (/** @type {string | null} */ label) => {
    if (decision === null || !reviews) {
      return;
    }
    send();
    const given = { decision, label, place };
    waiting.current = { answer: given, timer: setTimeout(send, UNDO_TIME) };
    setPending(given);
    setPlace(place + 1);
  };
  const undo = () => {
    const last = waiting.current?.answer ?? delivered.at(-1);
    if (last === undefined) {
      return;
    }
    if (waiting.current !== null) {
      clearTimeout(waiting.current.timer);
      waiting.current = null;
      setPending(null);
    } else {
      setDelivered(delivered.slice(0, -1));
      request("DELETE", streamPath(id, `/feedback/${last.decision.position}`)).catch(setError);
    }
    setPlace(last.place);
  };
  const skip = () => decision !== null && setPlace(place + 1);
  const search = useRef(/** @type {HTMLDivElement | null} */ (null));
  const act = useRef(/** @type {(event: KeyboardEvent) => void} */ (() => {}));
  act.current = (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const elsewhere = ["INPUT", "SELECT", "TEXTAREA", "DIALOG"].includes(target.tagName);
    const pressesButton = event.key === "Enter" && ["BUTTON", "A"].includes(target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey || elsewhere || pressesButton) {
      return;
    }
    const meaning = meaningOf(event.key, likely);
    if (meaning === null) {
      return;
    }
    event.preventDefault();
    if (meaning === "undo") {
      undo();
    } else if (meaning === "skip") {
      skip();
    } else if (meaning === "search") {
      search.current?.querySelector("input")?.focus();
    } else if (meaning === "confirm") {
      decision !== null && answer(decision.label);
    } else {
      answer(meaning.answer);
    }
  };
  useEffect(() => {
    const pressed = (/** @type {KeyboardEvent} */ event) => act.current(event);
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);

  if (error) {
    return error.status === 409 || error.status === 422
      ? h(Empty, { title: "This stream stores no samples" }, error.message)
      : h(Failure, { error, retry: load });
  }
  if (queue === null) {
    return h(Loading, { what: "the review queue" });
  }
  if (!reviews) {
    return h(
      Empty,
      { title: "Your key may not review" },
      "Reviewing changes the stream. It needs a key with the role observe.",
    );
  }
  const problem = unsent[0]?.problem;
  const failures =
    problem &&
    h(
      "p",
      { class: "notice toolbar", role: "alert" },
      `${quantity(unsent.length, "answer")} could not be sent: ${problem.message} `,
      h("button", { type: "button", onClick: sendAgain }, "Send again"),
      h("button", { type: "button", class: "quiet", onClick: () => setUnsent([]) }, "Discard"),
    );
  const bar = h(
    "p",
    { class: "toolbar review-bar", role: "status" },
    `${quantity(delivered.length, "answer")} sent.`,
    pending && ` “${pending.label ?? "unknown"}” is sent in a few seconds.`,
    (pending || delivered.length > 0) &&
      h("button", { type: "button", onClick: undo }, `Undo (${UNDO_KEY.toUpperCase()})`),
  );
  if (decision === null) {
    return h(
      "div",
      null,
      failures,
      bar,
      h(
        Empty,
        { title: queue.length === 0 ? "There is nothing to review yet" : "You have seen all samples of this queue" },
        "Samples appear here as the stream decides. ",
        h("button", { type: "button", onClick: () => send().then(load) }, "Load more"),
      ),
    );
  }
  return h(
    "div",
    null,
    failures,
    bar,
    h(
      "section",
      { class: "panel review", "aria-label": "Sample to review" },
      h(
        "div",
        { class: "sample" },
        h(Picture, { id, position: decision.position, exists: decision.hasThumbnail }),
        h(ImagesHint, {}),
        h(
          "p",
          null,
          `Sample ${place + 1} of ${queue.length}: `,
          h(Pill, { kind: decision.outcome }, decision.label ?? "unknown"),
          ` probability of unknown ${percent(decision.pUnknown)}; most like ${decision.nearest}.`,
        ),
      ),
      h("h2", null, "What is it?"),
      h(
        "div",
        { class: "keys" },
        h(KeyButton, {
          name: "Enter",
          label: `correct: ${decision.label ?? "unknown"}`,
          press: () => answer(decision.label),
        }),
        h(KeyButton, { name: UNKNOWN_KEY, label: "unknown", press: () => answer(null) }),
        h(KeyButton, { name: SKIP_KEY, label: "skip", press: skip }),
      ),
      h(
        "div",
        { class: "keys", role: "group", "aria-label": "Classes" },
        likely.map((name, at) =>
          h(KeyButton, { key: name, name: String(at + 1), label: name, press: () => answer(name) }),
        ),
        h(
          "div",
          { class: "keys", ref: search },
          h("kbd", null, SEARCH_KEY),
          h(ClassInput, {
            classes,
            choose: (name) => {
              answer(name);
              // The keys mean answers again.
              search.current?.querySelector("input")?.blur();
            },
          }),
        ),
      ),
    ),
  );
}

/** @param {{name: string, label: string, press: () => void}} props */
function KeyButton({ name, label, press }) {
  return h(
    "button",
    // A click must not move the focus here: Enter would press the button again, and not confirm the next sample.
    { type: "button", onClick: press, onMouseDown: (/** @type {MouseEvent} */ event) => event.preventDefault() },
    name && h("kbd", null, name.length === 1 ? name.toUpperCase() : name),
    " ",
    label,
  );
}
