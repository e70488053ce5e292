/** The table of all streams: problem streams first, search, filters, and actions on many streams. */

import { listStreams, may, post, streamPath } from "../api.js";
import { Confirm } from "../components/dialog.js";
import { Empty, Failure, Freshness, Loading, ProblemPills } from "../components/states.js";
import { ago, count, percent, quantity } from "../logic/format.js";
import { arrange, countProblems } from "../logic/problems.js";
import { rowsInView } from "../logic/window.js";
import { linkTo, setQuery } from "../navigation.js";
import { useNow, usePolling } from "../polling.js";
import { useCallback, useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { Wall } from "./wall.js";
import { WebhooksDialog } from "./webhooks.js";

/** @typedef {import("../logic/problems.js").Row} Row */
/** @typedef {import("../logic/problems.js").Column} Column */
/** @typedef {import("../logic/problems.js").Kind | "all" | "any"} Filter */
/** @typedef {ReturnType<typeof arrange>[number]} Line */

const PERIOD = 5;
const MANY_PERIOD = 15;
const MANY = 1000;
const STALE_SECONDS = 45;
const AT_ONCE = 4;

/** @type {[Filter, string][]} */
const FILTERS = [
  ["all", "All"],
  ["any", "Problems"],
  ["unloadable", "Not loaded"],
  ["guard", "Guard"],
  ["unknown", "Unknown rate"],
  ["silent", "Silent"],
  ["warning", "Shift"],
  ["frozen", "Frozen"],
];

/** @type {[Column, string][]} */
const COLUMNS = [
  ["id", "Stream"],
  ["problem", "State"],
  ["unknownRate", "Unknown now"],
  ["usualRate", "Usual"],
  ["lastSeen", "Last sample"],
];

/** Return what the address says of the page. @param {string} query */
function stateOf(query) {
  const values = new URLSearchParams(query);
  const sort = values.get("sort") ?? "-problem";
  const column = COLUMNS.find(([name]) => name === sort.replace(/^-/, ""))?.[0] ?? "problem";
  return {
    search: values.get("q") ?? "",
    kind: FILTERS.find(([name]) => name === values.get("kind"))?.[0] ?? "all",
    view: values.get("view") ?? "",
    order: { column, descending: sort.startsWith("-") },
  };
}

/**
 * @param {{session: import("../api.js").Session, query: string}} props
 */
export function Streams({ session, query }) {
  const [many, setMany] = useState(false);
  const { data, error, loaded, reload } = usePolling(listStreams, many ? MANY_PERIOD : PERIOD, []);
  const { search, kind, view, order } = useMemo(() => stateOf(query), [query]);
  const set = (/** @type {Record<string, string>} */ changes) => {
    const values = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) {
      value === "" ? values.delete(name) : values.set(name, value);
    }
    setQuery(values.toString());
  };
  const [selected, setSelected] = useState(/** @type {Set<string>} */ (new Set()));
  const [webhooks, setWebhooks] = useState(false);
  const now = useNow(PERIOD);
  const admin = may(session, "admin");

  useEffect(() => setMany((data?.length ?? 0) > MANY), [data]);
  const counts = useMemo(() => countProblems(data ?? [], now), [data, now]);
  const lines = useMemo(() => arrange(data ?? [], { now, search, kind, ...order }), [data, now, search, kind, order]);
  const sortBy = (/** @type {Column} */ column) => {
    const descending = order.column === column ? !order.descending : column !== "id";
    set({ sort: descending ? `-${column}` : column });
  };

  if (data === null) {
    return h("main", null, error ? h(Failure, { error, retry: reload }) : h(Loading, { what: "streams" }));
  }
  const old = now - loaded > STALE_SECONDS;
  return h(
    "main",
    { class: "streams" },
    h(
      "div",
      { class: "toolbar" },
      h("h1", null, "Streams"),
      h("input", {
        type: "search",
        "aria-label": "Search streams",
        placeholder: "Search by id",
        value: search,
        onInput: (/** @type {any} */ event) => set({ q: event.target.value }),
      }),
      h(
        "button",
        {
          type: "button",
          "aria-pressed": view === "wall",
          onClick: () => set({ view: view === "wall" ? "" : "wall" }),
        },
        view === "wall" ? "Show the table" : "Show the wall",
      ),
      admin && h("button", { type: "button", onClick: () => setWebhooks(true) }, "Webhooks"),
      webhooks && h(WebhooksDialog, { onClose: () => setWebhooks(false) }),
      h(Freshness, { state: error ? "reconnecting" : old ? "stale" : "live", loaded, now }),
    ),
    h(
      "div",
      { class: "filters", role: "group", "aria-label": "Filter by problem" },
      FILTERS.map(([name, label]) =>
        h(
          "button",
          {
            key: name,
            type: "button",
            "aria-pressed": kind === name,
            onClick: () => set({ kind: name === "all" ? "" : name }),
          },
          `${label} `,
          h("span", { class: "count" }, count(counts[name])),
        ),
      ),
    ),
    admin && selected.size > 0 && h(BulkActions, { selected, clear: () => setSelected(new Set()), reload }),
    data.length === 0
      ? h(
          Empty,
          { title: "There are no streams yet" },
          "Create one with ",
          h("code", null, "protodcs streams create camera-1 --classes …"),
          ".",
        )
      : lines.length === 0
        ? h(Empty, { title: "No stream matches" }, "Change the search or the filter.")
        : view === "wall"
          ? h(Wall, { lines, now })
          : h(Table, { lines, order, sortBy, selected, setSelected, selectable: admin, now }),
  );
}

/**
 * @param {{lines: Line[], order: {column: Column, descending: boolean}, sortBy: (column: Column) => void,
 *   selected: Set<string>, setSelected: (ids: Set<string>) => void, selectable: boolean, now: number}} props
 */
function Table({ lines, order, sortBy, selected, setSelected, selectable, now }) {
  const body = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [view, setView] = useState({ scrolled: 0, height: 800, rowHeight: 44 });
  const measure = useCallback(() => {
    const element = body.current;
    if (element) {
      const rowHeight = Number.parseFloat(getComputedStyle(element).getPropertyValue("--row-height")) || 44;
      setView((before) => {
        const after = { scrolled: element.scrollTop, height: element.clientHeight, rowHeight };
        const { first, end } = rowsInView(after.scrolled, after.height, rowHeight, lines.length);
        const old = rowsInView(before.scrolled, before.height, before.rowHeight, lines.length);
        return first === old.first && end === old.end && rowHeight === before.rowHeight ? before : after;
      });
    }
  }, [lines.length]);
  useEffect(() => {
    measure();
    addEventListener("resize", measure);
    return () => removeEventListener("resize", measure);
  }, [measure]);

  const { first, end } = rowsInView(view.scrolled, view.height, view.rowHeight, lines.length);
  const all = lines.length > 0 && lines.every(({ row }) => selected.has(row.id));
  const toggle = (/** @type {string} */ id) => {
    const after = new Set(selected);
    after.delete(id) || after.add(id);
    setSelected(after);
  };
  return h(
    "div",
    {
      class: `table ${selectable ? "selectable" : ""}`,
      role: "table",
      "aria-label": "Streams",
      "aria-rowcount": lines.length + 1,
    },
    h(
      "div",
      { class: "row head", role: "row", "aria-rowindex": 1 },
      selectable &&
        h(
          "span",
          { class: "cell check", role: "columnheader" },
          h("input", {
            type: "checkbox",
            "aria-label": "Select all shown streams",
            checked: all,
            onChange: () => setSelected(all ? new Set() : new Set(lines.map(({ row }) => row.id))),
          }),
        ),
      COLUMNS.map(([column, label]) =>
        h(
          "span",
          {
            key: column,
            class: `cell ${column}`,
            role: "columnheader",
            "aria-sort": order.column === column ? (order.descending ? "descending" : "ascending") : "none",
          },
          h("button", { type: "button", class: "quiet", onClick: () => sortBy(column) }, label),
        ),
      ),
    ),
    h(
      "div",
      { class: "rows", role: "rowgroup", ref: body, onScroll: measure, tabIndex: 0, "aria-label": "Rows" },
      h("div", { class: "spacer", role: "presentation", style: { height: `${first * view.rowHeight}px` } }),
      lines.slice(first, end).map((line, place) =>
        h(StreamRow, {
          key: line.row.id,
          line,
          place: first + place + 2,
          now,
          selectable,
          selected: selected.has(line.row.id),
          toggle,
        }),
      ),
      h("div", {
        class: "spacer",
        role: "presentation",
        style: { height: `${(lines.length - end) * view.rowHeight}px` },
      }),
    ),
  );
}

/**
 * @param {{line: Line, place: number, now: number, selectable: boolean, selected: boolean,
 *   toggle: (id: string) => void}} props
 */
function StreamRow({ line, place, now, selectable, selected, toggle }) {
  const { row, problems } = line;
  return h(
    "div",
    { class: `row ${selected ? "selected" : ""}`, role: "row", "aria-rowindex": place },
    selectable &&
      h(
        "span",
        { class: "cell check", role: "cell" },
        h("input", {
          type: "checkbox",
          "aria-label": `Select ${row.id}`,
          checked: selected,
          onChange: () => toggle(row.id),
        }),
      ),
    h(
      "span",
      { class: "cell id", role: "cell" },
      h("a", { href: linkTo(row.id), title: row.id }, h("bdi", null, row.id)),
    ),
    h(
      "span",
      { class: "cell problem", role: "cell" },
      h(ProblemPills, { problems, isNew: row.lastSeen === null }),
      h("span", { class: "why" }, problems[0]?.text),
    ),
    h("span", { class: "cell unknownRate", role: "cell" }, percent(row.unknownRate)),
    h("span", { class: "cell usualRate", role: "cell" }, percent(row.usualRate)),
    h("span", { class: "cell lastSeen", role: "cell" }, ago(row.lastSeen, now)),
  );
}

/** @typedef {"acknowledge" | "freeze" | "unfreeze"} BulkAction */
/** @type {Record<BulkAction, {verb: string, text: string}>} */
const BULK = {
  acknowledge: { verb: "Acknowledge", text: "Their warnings end. What they show now counts as usual." },
  freeze: { verb: "Freeze", text: "They go on deciding and stop learning." },
  unfreeze: { verb: "Unfreeze", text: "They learn again." },
};

/**
 * @param {{selected: Set<string>, clear: () => void, reload: () => void}} props
 */
function BulkActions({ selected, clear, reload }) {
  const [asked, setAsked] = useState(/** @type {BulkAction | null} */ (null));
  const [done, setDone] = useState(0);
  const run = async () => {
    const failed = await onEach([...selected], (id) => post(streamPath(id, `/${asked}`)), setDone);
    reload();
    if (failed.length > 0) {
      throw new Error(`${quantity(failed.length, "stream")} failed. ${failed[0]?.id}: ${failed[0]?.message}`);
    }
    clear();
  };
  return h(
    "div",
    { class: "bulk" },
    h("strong", null, `${quantity(selected.size, "stream")} selected`),
    Object.entries(BULK).map(([action, { verb }]) =>
      h("button", { key: action, type: "button", onClick: () => setAsked(/** @type {BulkAction} */ (action)) }, verb),
    ),
    h("button", { type: "button", class: "quiet", onClick: clear }, "Clear selection"),
    asked &&
      h(
        Confirm,
        {
          title: `${BULK[asked].verb} ${quantity(selected.size, "stream")}?`,
          action: BULK[asked].verb,
          run,
          onClose: () => {
            setAsked(null);
            setDone(0);
          },
        },
        h("p", null, BULK[asked].text),
        done > 0 && h("progress", { max: selected.size, value: done, "aria-label": "Streams done" }),
      ),
  );
}

/**
 * Run an action on many streams, a few at a time. Return those that failed.
 * @param {string[]} ids
 * @param {(id: string) => Promise<unknown>} action
 * @param {(done: number) => void} progress
 */
async function onEach(ids, action, progress) {
  /** @type {{id: string, message: string}[]} */
  const failed = [];
  let next = 0;
  let done = 0;
  const work = async () => {
    while (next < ids.length) {
      const id = /** @type {string} */ (ids[next++]);
      await action(id).catch((problem) => failed.push({ id, message: problem.message }));
      progress(++done);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return failed;
}
