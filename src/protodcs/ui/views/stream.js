/** One stream: its header, its actions, and the tabs overview, clusters and review. */

import { asRow, get, may, streamPath } from "../api.js";
import { Empty, Failure, Freshness, Loading, ProblemPills } from "../components/states.js";
import { follow } from "../live.js";
import { toldBy } from "../logic/demo.js";
import { asDecision, History } from "../logic/history.js";
import { problemsOf } from "../logic/problems.js";
import { linkTo } from "../navigation.js";
import { useNow, usePolling } from "../polling.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { Actions } from "./actions.js";
import { Clusters } from "./clusters.js";
import { Decisions } from "./decisions.js";
import { Demo } from "./demo.js";
import { Overview } from "./overview.js";
import { Review } from "./review.js";

/** @typedef {import("../api.js").Session} Session */
/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../live.js").LiveState} LiveState */

const PERIOD = 5;
const HISTORY = 3000;
const PAGE = 1000;

/** The filters that show the decisions behind a problem. @type {Partial<Record<string, string>>} */
const ALERTS = { unknown: "outcome=unknown", warning: "reason=possible+shift" };

/** @type {[string, string]} */
const DEMO = ["demo", "Demo"];
/** @type {[string, string][]} */
const TABS = [
  ["", "Overview"],
  ["decisions", "Decisions"],
  ["clusters", "Clusters"],
  ["review", "Review"],
];

/**
 * @param {{id: string, tab: string, query: string, session: Session}} props
 */
export function StreamView({ id, tab, query, session }) {
  const [paused, setPaused] = useState(false);
  const load = (/** @type {AbortSignal} */ signal) =>
    /** @type {Promise<StreamStatus>} */ (get(streamPath(id), signal));
  const { data: status, error, loaded, reload } = usePolling(load, PERIOD, [id], paused);
  const { history, version, state } = useHistory(id, status?.incarnation ?? null, paused, reload);
  const now = useNow(PERIOD);
  // `protodcs demo` sends the truth beside its images, and this page shows it.
  const isDemo = toldBy(history.decisions.at(-1)?.imageRef ?? null) !== null;
  const tabs = isDemo ? [DEMO, ...TABS] : TABS;

  if (status === null) {
    if (error?.status === 404) {
      return h(
        "main",
        null,
        h(
          Empty,
          { title: `There is no stream “${id}”` },
          "It was deleted, or it belongs to another tenant. ",
          h("a", { href: linkTo(null) }, "All streams"),
        ),
      );
    }
    return h("main", null, error ? h(Failure, { error, retry: reload }) : h(Loading, { what: id }));
  }
  const problems = problemsOf(asRow(status), now);
  const shown = error ? "reconnecting" : state;
  return h(
    "main",
    { class: "stream" },
    h("p", { class: "crumbs" }, h("a", { href: linkTo(null) }, "Streams"), " /"),
    h(
      "div",
      { class: "toolbar" },
      h("h1", null, id),
      h("span", null, h(ProblemPills, { problems, isNew: status.sequence === 0 })),
      h(Freshness, { state: paused ? "paused" : shown, loaded, now }),
      h(
        "button",
        { type: "button", class: "quiet", "aria-pressed": paused, onClick: () => setPaused(!paused) },
        paused ? "Resume" : "Pause",
      ),
      h("span", { class: "gap" }),
      may(session, "admin") && h(Actions, { status, reload }),
    ),
    h(
      "nav",
      { class: "tabs", "aria-label": "Views of the stream" },
      tabs.map(([name, label]) =>
        h("a", { key: name, href: linkTo(id, name), "aria-current": tab === name ? "page" : undefined }, label),
      ),
    ),
    problems.map(({ kind, text }) =>
      h(
        "p",
        { key: kind, class: "notice" },
        text,
        ALERTS[kind] && [". ", h("a", { href: `${linkTo(id, "decisions")}?${ALERTS[kind]}` }, "See these decisions")],
      ),
    ),
    h(View, { tab, query, status, session, history, version, reload }),
  );
}

/**
 * The tab in view.
 * @param {{tab: string, query: string, status: StreamStatus, session: Session, history: History, version: number,
 *   reload: () => void}} props
 */
function View({ tab, query, status, session, history, version, reload }) {
  switch (tab) {
    case "clusters":
      return h(Clusters, { status, session, reloadStatus: reload });
    case "decisions":
      return h(Decisions, { status, session, query });
    case "review":
      return h(Review, { status, session });
    case "demo":
      return h(Demo, { status, history, version });
    default:
      return h(Overview, { status, session, history, version });
  }
}

/**
 * Return the newest decisions of a stream. They grow with its events; `version` changes with them.
 * @param {string} id
 * @param {string | null} incarnation changes if the stream was deleted and created again
 * @param {boolean} paused
 * @param {() => void} changed called if something else than decisions has changed
 */
function useHistory(id, incarnation, paused, changed) {
  const history = useRef(new History(HISTORY));
  const [version, setVersion] = useState(0);
  const [state, setState] = useState(/** @type {LiveState} */ ("connecting"));
  useEffect(() => {
    if (incarnation === null || paused) {
      return undefined;
    }
    const store = history.current;
    let stopped = false;
    const grow = (/** @type {any[]} */ items) => {
      store.add(items.map(asDecision));
      setVersion((before) => before + 1);
    };
    const load = async () => {
      const page = await get(streamPath(id, `/decisions?limit=${PAGE}&order=newest`)).catch(() => null);
      if (page !== null && !stopped) {
        grow(page.items.toReversed());
      }
    };
    load();
    const stop = follow(streamPath(id, "/events"), {
      events: (batch) => {
        grow(batch.filter(({ type }) => type === "decision").map(({ data }) => data));
        if (batch.some(({ type }) => type === "guard" || type === "warning")) {
          changed();
        }
      },
      state: setState,
      connected: load,
    });
    return () => {
      stopped = true;
      stop();
    };
  }, [id, incarnation, paused]);
  useEffect(() => () => history.current.clear(), [incarnation]);
  return { history: history.current, version, state };
}
