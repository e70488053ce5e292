/** All decisions of a stream, with filters and search. Each can be explained and corrected. */

import { get, may, streamPath } from "../api.js";
import { ImagesHint, Picture } from "../components/picture.js";
import { Empty, Failure, Loading, Pill } from "../components/states.js";
import { filtersOf, matches, NO_FILTERS, parametersOf, queryOf } from "../logic/decisions.js";
import { clock, count, quantity } from "../logic/format.js";
import { asDecision } from "../logic/history.js";
import { warningText } from "../logic/problems.js";
import { setQuery } from "../navigation.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { ExplainDialog } from "./explain.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../api.js").ApiError} ApiError */
/** @typedef {import("../logic/history.js").Decision} Decision */
/** @typedef {import("../logic/decisions.js").Filters} Filters */

const PAGE = 500;
/** So many decisions are added at once, and at most so many pages are searched for them. */
const SHOWN = 60;
const PAGES = 20;

/** @type {[string, string][]} */
const REASONS = [
  ["", "any reason"],
  ["none", "no warning"],
  ["few samples", "few samples"],
  ["possible shift", "possible shift"],
];

/** @typedef {{found: Decision[], searched: number, cursor: string | null}} Result `cursor`: null at the end of the log */

/**
 * @param {{status: StreamStatus, session: import("../api.js").Session, query: string}} props
 */
export function Decisions({ status, session, query }) {
  const { id } = status;
  const filters = useMemo(() => filtersOf(query), [query]);
  const [result, setResult] = useState(/** @type {Result | null} */ (null));
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [corrected, setCorrected] = useState(/** @type {Set<number>} */ (new Set()));
  const [opened, setOpened] = useState(/** @type {Decision | null} */ (null));
  const [round, setRound] = useState(0);

  useEffect(() => {
    const stop = new AbortController();
    const load = async () => {
      setBusy(true);
      setResult(null);
      try {
        // A stream without stored samples takes no corrections.
        const review = await get(streamPath(id, "/review?limit=1"), stop.signal).catch(() => null);
        const known = new Set(/** @type {number[]} */ (review?.corrected ?? []));
        setCorrected(known);
        setResult(await search(id, filters, known, null, stop.signal));
        setError(null);
      } catch (problem) {
        stop.signal.aborted || setError(/** @type {ApiError} */ (problem));
      }
      stop.signal.aborted || setBusy(false);
    };
    load();
    return () => stop.abort();
  }, [id, filters, round]);

  const more = async () => {
    if (result?.cursor) {
      setBusy(true);
      try {
        const next = await search(id, filters, corrected, result.cursor);
        const found = [...result.found, ...next.found];
        setResult({ found, searched: result.searched + next.searched, cursor: next.cursor });
      } catch (problem) {
        setError(/** @type {ApiError} */ (problem));
      }
      setBusy(false);
    }
  };
  return h(
    "div",
    null,
    h(FilterBar, { filters, classes: status.classes, refresh: () => setRound((before) => before + 1) }),
    h(ImagesHint, {}),
    error && h(Failure, { error, retry: () => setRound((before) => before + 1) }),
    result === null && !error && h(Loading, { what: "decisions" }),
    result !== null &&
      h(
        "p",
        { class: "hint", role: "status" },
        `${quantity(result.found.length, "decision")} found among ${count(result.searched)}${result.cursor ? ", newest first" : ""}.`,
      ),
    result?.found.length === 0 &&
      result.cursor === null &&
      h(Empty, { title: "No decision matches" }, "Change a filter."),
    result !== null &&
      h(
        "ul",
        { class: "thumbnails decisions" },
        result.found.map((decision) =>
          h(Tile, {
            key: decision.position,
            id,
            decision,
            isCorrected: corrected.has(decision.position),
            onClick: () => setOpened(decision),
          }),
        ),
      ),
    result?.cursor && h("button", { type: "button", disabled: busy, onClick: more }, busy ? "Searching…" : "Show more"),
    opened &&
      h(ExplainDialog, {
        id,
        decision: opened,
        classes: may(session, "observe") ? status.classes : [],
        onCorrected: () => setCorrected((before) => new Set([...before, opened.position])),
        onClose: () => setOpened(null),
      }),
  );
}

/**
 * Read the log until enough decisions match, or for some pages.
 * @param {string} id
 * @param {Filters} filters
 * @param {Set<number>} corrected
 * @param {string | null} cursor
 * @param {AbortSignal} [signal]
 * @returns {Promise<Result>}
 */
async function search(id, filters, corrected, cursor, signal) {
  /** @type {Result} */
  const result = { found: [], searched: 0, cursor };
  for (let page = 0; page < PAGES && result.found.length < SHOWN; page++) {
    const parameters = new URLSearchParams([...parametersOf(filters), ["limit", String(PAGE)]]);
    result.cursor && parameters.set("cursor", result.cursor);
    const { items, next_cursor } = await get(streamPath(id, `/decisions?${parameters}`), signal);
    result.cursor = next_cursor;
    for (const item of items) {
      const decision = asDecision(item);
      result.searched += 1;
      if (matches(decision, filters, corrected) && result.found.push(decision) === SHOWN) {
        // The next page begins behind this decision.
        result.cursor = item === items.at(-1) ? next_cursor : String(decision.position);
        break;
      }
    }
    if (result.cursor === null) {
      break;
    }
  }
  return result;
}

/** @param {{id: string, decision: Decision, isCorrected: boolean, onClick: () => void}} props */
function Tile({ id, decision, isCorrected, onClick }) {
  return h(
    "li",
    null,
    h(
      "button",
      { type: "button", onClick, title: decision.reason === null ? undefined : warningText(decision.reason) },
      h(Picture, { id, position: decision.position, exists: decision.hasThumbnail }),
      h("small", { class: `is-text-${decision.outcome}` }, h("strong", null, decision.label ?? "unknown")),
      h("small", null, isCorrected ? h(Pill, { kind: "fine" }, "corrected") : clock(decision.time)),
    ),
  );
}

/** An input that keeps what is being typed, until the value itself changes. @param {any} props */
function Field({ value, ...rest }) {
  const place = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (place.current) {
      place.current.value = value;
    }
  }, [value]);
  return h("input", { ...rest, ref: place });
}

/** @param {{filters: Filters, classes: string[], refresh: () => void}} props */
function FilterBar({ filters, classes, refresh }) {
  const set = (/** @type {keyof Filters} */ name) => (/** @type {any} */ event) =>
    setQuery(queryOf({ ...filters, [name]: event.target.value }));
  const select = (
    /** @type {keyof Filters} */ name,
    /** @type {string} */ label,
    /** @type {[string, string][]} */ options,
  ) =>
    h(
      "select",
      { "aria-label": label, value: filters[name], onChange: set(name) },
      options.map(([value, text]) => h("option", { key: value, value }, text)),
    );
  const input = (/** @type {keyof Filters} */ name, /** @type {string} */ label, /** @type {string} */ type) =>
    h("label", { class: "field" }, label, h(Field, { type, step: "any", value: filters[name], onChange: set(name) }));
  return h(
    "div",
    { class: "toolbar filter-bar", role: "group", "aria-label": "Filters" },
    h(Field, {
      type: "search",
      "aria-label": "Search the log",
      placeholder: "Search position, class, image or key",
      value: filters.q,
      onChange: set("q"),
    }),
    select("class", "Class", [
      ["", "all classes"],
      .../** @type {[string, string][]} */ (classes.map((name) => [name, name])),
    ]),
    select("outcome", "Outcome", [
      ["", "any outcome"],
      ["known", "known"],
      ["unsure", "unsure"],
      ["unknown", "unknown"],
    ]),
    select("reason", "Reason", REASONS),
    select("corrected", "Corrected", [
      ["", "corrected or not"],
      ["yes", "corrected"],
      ["no", "not corrected"],
    ]),
    input("least", "Score from", "number"),
    input("most", "to", "number"),
    input("since", "Since", "datetime-local"),
    input("until", "until", "datetime-local"),
    queryOf(filters) !== "" &&
      h("button", { type: "button", onClick: () => setQuery(queryOf(NO_FILTERS)) }, "Clear filters"),
    h("button", { type: "button", onClick: refresh }, "Refresh"),
  );
}
