/** The wall: the newest image and a small chart of each stream, grouped by the beginning of their ids. */

import { get, streamPath } from "../api.js";
import { Picture } from "../components/picture.js";
import { ProblemPills } from "../components/states.js";
import { ago, percent, quantity } from "../logic/format.js";
import { asDecision } from "../logic/history.js";
import { groupsOf, unknownShares } from "../logic/wall.js";
import { linkTo } from "../navigation.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {ReturnType<typeof import("../logic/problems.js").arrange>[number]} Line */
/** @typedef {import("../logic/history.js").Decision} Decision */

/** Decisions behind a chart, and how often those of a card in view are loaded, in seconds. */
const RECENT = 96;
const PERIOD = 10;

/** @param {{lines: Line[], now: number}} props */
export function Wall({ lines, now }) {
  const groups = groupsOf(lines);
  return h(
    "div",
    { class: "wall" },
    groups.map(([name, members]) =>
      h(
        "section",
        { key: name, "aria-label": name || "Streams" },
        (name !== "" || groups.length > 1) &&
          h("h2", null, name || "Others", h("span", { class: "hint" }, ` ${quantity(members.length, "stream")}`)),
        h(
          "ul",
          null,
          members.map((line) => h(Card, { key: line.row.id, line, now })),
        ),
      ),
    ),
  );
}

/** @param {{line: Line, now: number}} props */
function Card({ line: { row, problems }, now }) {
  const place = useRef(/** @type {HTMLLIElement | null} */ (null));
  const [recent, setRecent] = useState(/** @type {Decision[] | null} */ (null));
  useEffect(() => {
    const stop = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const load = async () => {
      if (!document.hidden) {
        const page = await get(streamPath(row.id, `/decisions?limit=${RECENT}`), stop.signal).catch(() => null);
        if (page !== null && !stop.signal.aborted) {
          setRecent(page.items.map(asDecision).reverse());
        }
      }
      timer = stop.signal.aborted ? undefined : setTimeout(load, PERIOD * 1000);
    };
    // Only cards in view ask for their decisions.
    const watcher = new IntersectionObserver(([entry]) => {
      clearTimeout(timer);
      entry?.isIntersecting && load();
    });
    watcher.observe(/** @type {HTMLLIElement} */ (place.current));
    return () => {
      stop.abort();
      clearTimeout(timer);
      watcher.disconnect();
    };
  }, [row.id]);
  const newest = recent?.at(-1);
  return h(
    "li",
    { ref: place, class: "panel" },
    h(
      "a",
      { href: linkTo(row.id), title: row.id },
      newest
        ? h(Picture, { id: row.id, position: newest.position, exists: newest.hasThumbnail })
        : h("span", { class: "no-image" }, recent === null ? "…" : "no sample"),
      h("span", { class: "name" }, h("bdi", null, row.id)),
    ),
    h("p", null, h(ProblemPills, { problems, isNew: row.lastSeen === null })),
    h(UnknownChart, { recent: recent ?? [] }),
    h("p", { class: "hint" }, `${percent(row.unknownRate)} unknown, ${ago(row.lastSeen, now)}`),
  );
}

const WIDTH = 120;
const HEIGHT = 26;

/** @param {{recent: Decision[]}} props */
function UnknownChart({ recent }) {
  const shares = unknownShares(recent);
  const step = WIDTH / Math.max(1, shares.length);
  return h(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `Share of unknown samples among the last ${recent.length}, oldest first: ${shares.map((share) => percent(share)).join(", ")}`,
    },
    shares.map((share, at) =>
      h("rect", {
        key: at,
        class: "fill-unknown",
        x: at * step,
        y: HEIGHT * (1 - share),
        width: step - 1,
        height: HEIGHT * share,
      }),
    ),
    h("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
  );
}
