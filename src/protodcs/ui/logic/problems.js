/** Which streams need attention, why, and in which order they are shown. Pure functions. */

import { duration, percent } from "./format.js";

/**
 * A stream of the table. Times are in seconds since 1970.
 * @typedef {object} Row
 * @property {string} id
 * @property {number} created
 * @property {number | null} lastSeen
 * @property {boolean} frozen
 * @property {number | null} unknownRate share of unknown samples among the latest
 * @property {number | null} usualRate usual share of unknown samples
 * @property {string | null} guard why a guard froze the stream
 * @property {string | null} warning what the service says of the latest decisions
 * @property {string | null} problem why the service cannot load the stream
 */

/** @typedef {"unloadable" | "guard" | "unknown" | "silent" | "frozen" | "warning"} Kind */
/** @typedef {{kind: Kind, label: string, text: string, weight: number}} Problem */
/** @typedef {"id" | "problem" | "unknownRate" | "usualRate" | "lastSeen"} Column */

/** A stream without samples for so many seconds is silent. */
export const SILENT_SECONDS = 300;

/** @type {Record<string, string>} */
const GUARDS = {
  disagreement: "Decisions differ from the frozen baseline",
  rejection: "Images that look familiar are rejected",
  duplicates: "All images look alike",
  mixture: "The score groups collapsed",
  drift: "Prototypes drifted",
  numbers: "Scores are not finite",
};

/** @type {Record<string, string>} */
const WARNINGS = {
  "possible shift": "Scores dropped: known images are probably rejected",
  "few samples": "Too few samples for a threshold",
};

/** Return why a guard fired, as a sentence. @param {string} name */
export function guardText(name) {
  return GUARDS[name] ?? `The guard “${name}” fired`;
}

/** Return the reason of a decision, as a sentence. @param {string} reason */
export function warningText(reason) {
  return WARNINGS[reason] ?? reason;
}

/**
 * Return the problems of a stream, worst first.
 * @param {Row} row
 * @param {number} now seconds since 1970
 * @returns {Problem[]}
 */
export function problemsOf(row, now) {
  /** @type {Problem[]} */
  const found = [];
  if (row.problem) {
    found.push({ kind: "unloadable", label: "Not loaded", text: row.problem, weight: 100 });
  }
  if (row.guard) {
    found.push({ kind: "guard", label: "Guard", text: guardText(row.guard), weight: 50 });
  }
  if (row.warning === "many_unknown") {
    const usual = row.usualRate === null ? "" : `, usually ${percent(row.usualRate)}`;
    const text = `${percent(row.unknownRate)} unknown${usual}`;
    found.push({ kind: "unknown", label: "Unknown rate", text, weight: 30 });
  }
  const silent = now - (row.lastSeen ?? row.created);
  if (silent >= SILENT_SECONDS) {
    const text = row.lastSeen === null ? "It never sent a sample" : `No sample for ${duration(silent)}`;
    found.push({ kind: "silent", label: "Silent", text, weight: 20 });
  }
  if (row.warning === "possible_shift") {
    const text = "Images differ from the usual ones: light, fog or another view";
    found.push({ kind: "warning", label: "Shift", text, weight: 10 });
  }
  if (row.frozen && !row.guard) {
    found.push({ kind: "frozen", label: "Frozen", text: "Frozen by hand: it does not learn", weight: 5 });
  }
  return found.sort((a, b) => b.weight - a.weight);
}

/** @param {Problem[]} problems */
export function severity(problems) {
  return problems.reduce((sum, problem) => sum + problem.weight, 0);
}

/**
 * Return streams with their problems, in the order of a column.
 * @param {Row[]} rows
 * @param {{now: number, search?: string, kind?: Kind | "all" | "any", column?: Column, descending?: boolean}} options
 */
export function arrange(rows, { now, search = "", kind = "all", column = "problem", descending = true }) {
  const wanted = search.trim().toLowerCase();
  const found = [];
  for (const row of rows) {
    if (wanted && !row.id.toLowerCase().includes(wanted)) {
      continue;
    }
    const problems = problemsOf(row, now);
    if (kind === "any" ? problems.length === 0 : kind !== "all" && !problems.some((one) => one.kind === kind)) {
      continue;
    }
    found.push({ row, problems, severity: severity(problems) });
  }
  const sign = descending ? -1 : 1;
  return found.sort((a, b) => {
    const difference =
      column === "problem"
        ? a.severity - b.severity || (a.row.unknownRate ?? -1) - (b.row.unknownRate ?? -1)
        : column === "id"
          ? compareIds(a.row.id, b.row.id)
          : (a.row[column] ?? -1) - (b.row[column] ?? -1);
    return sign * difference || compareIds(a.row.id, b.row.id);
  });
}

const IDS = new Intl.Collator("en", { numeric: true });

/** Compare ids so that camera-10 comes after camera-9. @param {string} a @param {string} b */
function compareIds(a, b) {
  return IDS.compare(a, b);
}

/**
 * Return how many streams have each kind of problem.
 * @param {Row[]} rows @param {number} now
 */
export function countProblems(rows, now) {
  /** @type {Record<Kind | "any" | "all", number>} */
  const counts = { all: rows.length, any: 0, unloadable: 0, guard: 0, unknown: 0, silent: 0, frozen: 0, warning: 0 };
  for (const row of rows) {
    const problems = problemsOf(row, now);
    counts.any += problems.length > 0 ? 1 : 0;
    for (const { kind } of problems) {
      counts[kind] += 1;
    }
  }
  return counts;
}
