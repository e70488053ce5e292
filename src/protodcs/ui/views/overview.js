/** The overview of a stream: numbers, timeline, scores, classes, unknown images, guards and snapshots. */

import { get, may, streamPath } from "../api.js";
import { Chart, outcomeBars, themeColors } from "../components/charts.js";
import { ImagesHint, Picture } from "../components/picture.js";
import { clock, count, decimal, percent, quantity } from "../logic/format.js";
import { densities, fitGroups, histogram } from "../logic/groups.js";
import { classCounts } from "../logic/history.js";
import { guardText } from "../logic/problems.js";
import { timeline } from "../logic/timeline.js";
import { usePolling } from "../polling.js";
import { useMemo, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { ClassCheck } from "./diagnosis.js";
import { ExplainDialog } from "./explain.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../logic/history.js").Decision} Decision */
/** @typedef {import("../logic/history.js").History} History */
/** @typedef {{name: string, position: number | null, sequence: number | null}} Snapshot null if it cannot be read */

const RECENT = 500;
const BINS = 48;
const CLASSES = 12;
const UNKNOWN = 12;
const LEAST = 30;
/** Until so many samples, the stream has too few for reliable decisions: `SHIFT_WINDOW` of StreamDCS. */
export const LEARNING = 64;
const SNAPSHOT_PERIOD = 10;
/** So many of the newest snapshots are shown. */
const SNAPSHOTS = 10;
const LABEL = 24;

const TIMELINE = outcomeBars({ time: true });
const SCORES = outcomeBars({ time: false });

/**
 * @param {{status: StreamStatus, session: import("../api.js").Session, history: History, version: number}} props
 */
export function Overview({ status, session, history, version }) {
  const [explained, setExplained] = useState(/** @type {Decision | null} */ (null));
  const recent = useMemo(() => history.newest(RECENT), [history, version]);
  const groups = useMemo(() => fittedGroups(recent, status), [recent, status]);
  const snapshots = useSnapshots(status);
  return h(
    "div",
    null,
    h(Tiles, { status }),
    h(
      "div",
      { class: "panels" },
      h(Timeline, { status, history, version, snapshots: snapshots ?? [] }),
      h(Scores, { status, recent, groups }),
      h(ClassShares, { recent }),
      h(Unknowns, { id: status.id, history, version, explain: setExplained }),
      h(Guards, { status, history }),
      h(Snapshots, { snapshots, history }),
    ),
    explained &&
      h(ExplainDialog, {
        id: status.id,
        decision: explained,
        classes: may(session, "observe") ? status.classes : [],
        onClose: () => setExplained(null),
      }),
  );
}

/** @param {Decision[]} recent @param {StreamStatus} status */
function fittedGroups(recent, status) {
  if (recent.length < LEAST || !(status.stats.two_groups > 0.5)) {
    return null;
  }
  const rejected = recent.map(({ outcome }) => outcome === "unknown");
  return rejected.includes(true) && rejected.includes(false)
    ? fitGroups(
        recent.map(({ score }) => score),
        rejected.map(Number),
      )
    : null;
}

/** @param {{status: StreamStatus}} props */
function Tiles({ status }) {
  const { stats } = status;
  const vocabulary = status.vocabulary ? `vocabulary ${status.vocabulary.slice(0, 8)}` : "no vocabulary";
  return h(
    "dl",
    { class: "tiles" },
    h(Tile, {
      name: "Samples",
      value: count(status.sequence),
      detail: `${status.classes.length} classes, ${status.method}, ${vocabulary}`,
    }),
    h(Tile, {
      name: "Unknown, last 100",
      value: percent(status.unknown_rate),
      detail: `usually ${percent(status.usual_unknown_rate)}`,
    }),
    h(Tile, {
      name: "False rejects, estimate",
      value: percent(stats.false_reject, 1),
      detail: stats.target_false_reject == null ? "" : `target ${percent(stats.target_false_reject)}`,
    }),
    h(Tile, {
      name: "Threshold",
      value: decimal(stats.threshold),
      detail: stats.two_groups > 0.5 ? "two groups of scores" : "one group of scores",
    }),
    h(Tile, {
      name: "Learning",
      value: status.frozen ? "Frozen" : status.sequence < LEARNING ? `${status.sequence} of ${LEARNING}` : "On",
      detail: status.guard.state === "off" ? "no guard" : `guard: ${status.guard.state}`,
    }),
  );
}

/** @param {{name: string, value: string, detail: string}} props */
function Tile({ name, value, detail }) {
  return h("div", { class: "tile" }, h("dt", null, name), h("dd", null, value, h("span", { class: "detail" }, detail)));
}

/** @param {{title: string, full?: boolean, aside?: any, children?: any}} props */
export function Panel({ title, full = false, aside, children }) {
  return h(
    "section",
    { class: `panel ${full ? "full" : ""}`, "aria-label": title },
    h("header", null, h("h2", null, title), aside),
    children,
  );
}

/** @param {{entries: [string, string][]}} props class of the mark, and its meaning */
export function Legend({ entries }) {
  return h(
    "span",
    { class: "legend" },
    entries.map(([kind, text]) => h("span", { key: text }, h("i", { class: kind }), text)),
  );
}

/** @type {[string, string][]} */
const OUTCOMES = [
  ["is-known", "known"],
  ["is-unsure", "unsure"],
  ["is-unknown", "unknown"],
];

/** @type {[string, string]} */
const GUARD_LINE = ["line is-danger", "guard action"];
/** @type {[string, string]} */
const SNAPSHOT_LINE = ["line dashed is-text", "snapshot"];

/**
 * @param {{status: StreamStatus, history: History, version: number, snapshots: Snapshot[]}} props
 */
function Timeline({ status, history, version, snapshots }) {
  const counts = useMemo(() => timeline(history.decisions), [history, version]);
  const data = useMemo(() => stacked(counts.times, counts), [counts]);
  const marks = useMemo(() => {
    const colors = themeColors();
    const actions = (status.guard.events ?? []).map(({ guard, action, position }) => ({
      at: history.timeAt(position),
      color: colors.danger,
      label: `${action} (${guard})`,
      dashed: false,
    }));
    const saved = snapshots.map(({ name, position }) => ({
      at: position === null ? null : history.timeBefore(position),
      color: colors.text,
      label: name.length > LABEL ? `${name.slice(0, LABEL)}…` : name,
      dashed: true,
    }));
    return [...actions, ...saved].flatMap(({ at, ...mark }) => (at === null ? [] : [{ at, ...mark }]));
  }, [status.guard.events, snapshots, history, version]);
  const decisions = history.decisions.length;
  const legend = [
    ...OUTCOMES,
    ...(marks.some(({ dashed }) => !dashed) ? [GUARD_LINE] : []),
    ...(marks.some(({ dashed }) => dashed) ? [SNAPSHOT_LINE] : []),
  ];
  const marked = marks.map(({ dashed, label }) => `${dashed ? "Snapshot" : "Guard action"} ${label}.`).join(" ");
  return h(
    Panel,
    { title: "Decisions over time", full: true, aside: h(Legend, { entries: legend }) },
    decisions === 0
      ? h("p", { class: "empty" }, "No decisions yet. They appear here as samples arrive.")
      : h(Chart, {
          summary: `Known, unsure and unknown decisions per ${counts.step} seconds, for the last ${decisions} decisions. ${marked}`,
          data,
          marks,
          options: TIMELINE,
        }),
    decisions > 0 && h("p", { class: "hint" }, `Last ${count(decisions)} decisions, one bar per ${counts.step} s.`),
  );
}

/** @param {number[]} x @param {{known: number[], unsure: number[], unknown: number[]}} counts @param {number[][]} [curves] */
function stacked(x, { known, unsure, unknown }, curves = []) {
  const upper = unknown.map((amount, place) => amount + (unsure[place] ?? 0));
  return [x, upper.map((amount, place) => amount + (known[place] ?? 0)), upper, unknown, ...curves];
}

/**
 * @param {{status: StreamStatus, recent: Decision[], groups: ReturnType<typeof fittedGroups>}} props
 */
function Scores({ status, recent, groups }) {
  /** @type {number | null} */
  const threshold = status.stats.threshold ?? null;
  const data = useMemo(() => {
    const bins = histogram(recent, BINS, threshold);
    const area = recent.length * bins.width;
    const fitted = bins.centres.map((score) => (groups ? densities(groups, score) : null));
    const curves = /** @type {const} */ (["known", "unknown"]).map((name) =>
      fitted.map((one) => (one === null ? null : area * one[name])),
    );
    return stacked(bins.centres, bins, /** @type {any} */ (curves));
  }, [recent, threshold, groups]);
  const marks = useMemo(
    () => (threshold === null ? [] : [{ at: threshold, color: themeColors().text, label: "threshold" }]),
    [threshold],
  );
  const modes = groups && `modes: known ${decimal(groups.mode)}, unknown ${decimal(groups.mean)}`;
  /** @type {[string, string][]} */
  const lines = [
    ["line is-text", "known group"],
    ["line dashed is-text", "unknown group"],
  ];
  return h(
    Panel,
    { title: "Scores", aside: h(Legend, { entries: groups ? [...OUTCOMES, ...lines] : OUTCOMES }) },
    recent.length === 0
      ? h("p", { class: "empty" }, "No scores yet.")
      : h(Chart, {
          summary: `Histogram of the scores of the last ${recent.length} decisions; threshold ${decimal(threshold)}; ${modes ?? "one group"}.`,
          data,
          marks,
          options: SCORES,
        }),
    recent.length > 0 &&
      h(
        "p",
        { class: "hint" },
        `Last ${count(recent.length)} decisions. A score below the threshold is unknown; earlier decisions used earlier thresholds. `,
        groups ? `Two groups were fitted to these scores; ${modes}.` : "The scores form one group.",
      ),
    status.sequence > 0 && h(ClassCheck, { id: status.id, incarnation: status.incarnation }),
  );
}

/** @param {{recent: Decision[]}} props */
function ClassShares({ recent }) {
  const counts = useMemo(() => classCounts(recent), [recent]);
  const shown = counts.slice(0, CLASSES);
  const most = shown[0]?.[1] ?? 1;
  const rest = counts.slice(CLASSES).reduce((sum, [, amount]) => sum + amount, 0);
  return h(
    Panel,
    { title: "Classes", aside: h("span", { class: "hint" }, `share of the last ${count(recent.length)} decisions`) },
    shown.length === 0
      ? h("p", { class: "empty" }, "No sample was known yet.")
      : h(Bars, {
          bars: shown.map(([name, amount]) => ({
            name,
            size: amount / most,
            text: percent(amount / recent.length, 1),
          })),
        }),
    rest > 0 &&
      h("p", { class: "hint" }, `${counts.length - CLASSES} more classes: ${percent(rest / recent.length, 1)}`),
  );
}

/** @param {{bars: {name: string, size: number, text: string}[]}} props */
export function Bars({ bars }) {
  return h(
    "div",
    { class: "bars" },
    bars.map(({ name, size, text }) => [
      h("span", { key: `${name} name`, title: name }, name),
      h(
        "span",
        { key: `${name} track`, class: "track" },
        h("span", { class: "bar is-known", style: { width: `${100 * Math.min(1, Math.max(0, size))}%` } }),
      ),
      h("span", { key: `${name} number`, class: "number" }, text),
    ]),
  );
}

/**
 * @param {{id: string, history: History, version: number, explain: (decision: Decision) => void}} props
 */
function Unknowns({ id, history, version, explain }) {
  const unknown = useMemo(
    () =>
      history.decisions
        .filter(({ outcome }) => outcome === "unknown")
        .slice(-UNKNOWN)
        .reverse(),
    [history, version],
  );
  return h(
    Panel,
    { title: "Recent unknown images", full: true, aside: h(ImagesHint, {}) },
    unknown.length === 0
      ? h("p", { class: "empty" }, "No unknown images yet.")
      : h(
          "ul",
          { class: "thumbnails" },
          unknown.map((decision) =>
            h(Thumbnail, { key: decision.position, id, decision, onClick: () => explain(decision) }),
          ),
        ),
  );
}

/**
 * @param {{id: string, decision: Decision, onClick: () => void}} props
 */
export function Thumbnail({ id, decision, onClick }) {
  const nearest = decision.nearest ? `like ${decision.nearest}` : "unknown";
  return h(
    "li",
    null,
    h(
      "button",
      { type: "button", onClick, title: `Explain the decision at ${clock(decision.time)}` },
      h(Picture, { id, position: decision.position, exists: decision.hasThumbnail }),
      h("small", null, nearest),
      h("small", null, clock(decision.time)),
    ),
  );
}

/** @param {{status: StreamStatus, history: History}} props */
function Guards({ status, history }) {
  const events = (status.guard.events ?? []).toReversed();
  return h(
    Panel,
    {
      title: "Guard actions",
      aside: h("span", { class: "hint" }, `${count(status.guard.windows ?? 0)} windows checked`),
    },
    events.length === 0
      ? h(
          "p",
          { class: "empty" },
          status.guard.state === "off" ? "This stream has no guard." : "The guard did not act.",
        )
      : h(
          "ul",
          { class: "list" },
          events.map(({ guard, action, position, value, threshold }) => {
            const time = history.timeAt(position);
            return h(
              "li",
              { key: position },
              h("strong", null, action),
              guardText(guard),
              h(
                "span",
                { class: "aside" },
                `${decimal(value)}, limit ${decimal(threshold)}; record ${count(position)}`,
              ),
              time !== null && h("time", null, clock(time)),
            );
          }),
        ),
  );
}

/**
 * Return the newest saved snapshots, oldest first; null while they are loaded.
 * @param {StreamStatus} status
 */
function useSnapshots({ id, incarnation }) {
  const before = useRef({ incarnation, snapshots: /** @type {Snapshot[]} */ ([]) });
  const { data } = usePolling(
    async (signal) => {
      const { snapshots } = await get(streamPath(id, "/snapshots"), signal);
      /** @type {string[]} */
      const names = snapshots.slice(-SNAPSHOTS);
      const known = before.current.incarnation === incarnation ? before.current.snapshots : [];
      const same = names.join("\n") === known.map(({ name }) => name).join("\n");
      // A snapshot that replaces another one becomes the newest. So if the order is the same, the others are too.
      const described = await Promise.all(
        names.map((name, place) => {
          const one = same && place < names.length - 1 ? known[place] : undefined;
          return one?.position == null ? describe(id, name, signal) : one;
        }),
      );
      before.current = { incarnation, snapshots: described };
      return described;
    },
    SNAPSHOT_PERIOD,
    [id, incarnation],
  );
  return data;
}

/**
 * @param {string} id
 * @param {string} name
 * @param {AbortSignal} signal
 * @returns {Promise<Snapshot>}
 */
async function describe(id, name, signal) {
  const found = await get(streamPath(id, `/snapshots/${encodeURIComponent(name)}`), signal).catch(() => null);
  return { name, position: found?.position ?? null, sequence: found?.sequence ?? null };
}

/** @param {{snapshots: Snapshot[] | null, history: History}} props */
function Snapshots({ snapshots, history }) {
  return h(
    Panel,
    { title: "Snapshots" },
    snapshots === null || snapshots.length === 0
      ? h("p", { class: "empty" }, snapshots === null ? "Loading…" : "No snapshot was saved.")
      : h(
          "ul",
          { class: "list" },
          snapshots.toReversed().map(({ name, position, sequence }) => {
            const time = position === null ? null : history.timeBefore(position);
            return h(
              "li",
              { key: name },
              h("strong", null, name),
              sequence !== null && h("span", { class: "aside" }, quantity(sequence, "sample")),
              time !== null && h("time", null, clock(time)),
            );
          }),
        ),
  );
}
