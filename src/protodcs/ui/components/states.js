/** What a view shows if it has no data, and small parts that many views share. */

import { ago } from "../logic/format.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").ApiError} ApiError */
/** @typedef {import("../logic/problems.js").Problem} Problem */

/** @param {{what: string}} props */
export function Loading({ what }) {
  return h(
    "p",
    { class: "state", role: "status" },
    h("span", { class: "spinner", "aria-hidden": "true" }),
    `Loading ${what}…`,
  );
}

/** @param {{title: string, children?: any}} props */
export function Empty({ title, children }) {
  return h("div", { class: "state" }, h("strong", null, title), h("p", null, children));
}

/** @param {{error: ApiError, retry?: () => void}} props */
export function Failure({ error, retry }) {
  const titles = { 403: "Your key may not do this", 404: "Not found" };
  const title = error.unreachable
    ? "The service cannot be reached"
    : (titles[/** @type {403 | 404} */ (error.status)] ?? "Something went wrong");
  return h(
    "div",
    { class: "state", role: "alert" },
    h("strong", null, title),
    h("p", null, error.unreachable ? "The page tries again every few seconds." : error.message),
    retry && h("button", { type: "button", onClick: retry }, "Try again"),
  );
}

/**
 * A line that says how old the data is, if that matters.
 * @param {{state: "live" | "connecting" | "reconnecting" | "stale" | "paused", loaded: number, now: number}} props
 */
export function Freshness({ state, loaded, now }) {
  const texts = {
    live: "Live",
    connecting: "Connecting…",
    reconnecting: `Reconnecting… Data is from ${ago(loaded || null, now)}.`,
    stale: `No data for a while. Data is from ${ago(loaded || null, now)}.`,
    paused: "Paused",
  };
  return h(
    "span",
    { class: `freshness ${state}`, role: "status" },
    h("span", { class: "dot", "aria-hidden": "true" }),
    texts[state],
  );
}

/** @param {{kind: string, title?: string, children?: any}} props */
export function Pill({ kind, title, children }) {
  return h("span", { class: `pill ${kind}`, title }, children);
}

/** @param {{problems: Problem[], isNew: boolean}} props */
export function ProblemPills({ problems, isNew }) {
  if (problems.length > 0) {
    return problems.map(({ kind, label, text }) => h(Pill, { key: kind, kind, title: text }, label));
  }
  return isNew ? h(Pill, { kind: "new" }, "No samples") : h(Pill, { kind: "fine" }, "OK");
}
