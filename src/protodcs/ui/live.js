/** Server-sent events of a stream: batches of events, reconnection, and whether the page is up to date. */

import { address, get } from "./api.js";

/** @typedef {"connecting" | "live" | "reconnecting" | "stale" | "paused"} LiveState */
/** @typedef {{type: string, data: any}} LiveEvent */

const TYPES = ["decision", "stats", "guard", "warning", "heartbeat"];
/** Events are handed over in batches, so that the page is drawn at most ten times per second. Milliseconds. */
const BATCH = 100;
/** Without any event, also no heartbeat, for so long, the page may be out of date. Milliseconds. */
const STALE = 30_000;
const RETRY = [500, 1000, 2000, 5000];

/**
 * Follow the events of a path. Closes while the tab is hidden, because browsers allow few connections.
 * @param {string} path
 * @param {{events: (batch: LiveEvent[]) => void, state: (state: LiveState) => void, connected: () => void}} listener
 *   `connected` is called after each connection: load what may have been missed.
 * @returns {() => void} stops following
 */
export function follow(path, listener) {
  /** @type {EventSource | null} */
  let source = null;
  /** @type {LiveEvent[]} */
  let batch = [];
  let last = "";
  let attempts = 0;
  let opened = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let flushing;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let retrying;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let silence;

  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => listener.state("stale"), STALE);
  };
  const flush = () => {
    flushing = undefined;
    const events = batch;
    batch = [];
    listener.events(events);
  };
  const received = (/** @type {MessageEvent} */ event) => {
    last = event.lastEventId || last;
    heard();
    listener.state("live");
    if (event.type !== "heartbeat") {
      batch.push({ type: event.type, data: JSON.parse(event.data) });
      flushing ??= setTimeout(flush, BATCH);
    }
  };
  const close = () => {
    source?.close();
    source = null;
    clearTimeout(retrying);
    clearTimeout(silence);
  };
  const open = () => {
    close();
    if (document.hidden) {
      return;
    }
    listener.state(opened ? "reconnecting" : "connecting");
    source = new EventSource(address(path) + (last ? `?after=${encodeURIComponent(last)}` : ""));
    source.onopen = () => {
      attempts = 0;
      opened = true;
      heard();
      listener.state("live");
      listener.connected();
    };
    source.onerror = () => {
      close();
      listener.state("reconnecting");
      // An EventSource does not say why it failed: if the session has ended, this request finds out.
      get("v1/streams?limit=1").catch(() => null);
      retrying = setTimeout(open, RETRY[Math.min(attempts++, RETRY.length - 1)]);
    };
    for (const type of TYPES) {
      source.addEventListener(type, received);
    }
  };
  const visibility = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", visibility);
  open();
  return () => {
    document.removeEventListener("visibilitychange", visibility);
    clearTimeout(flushing);
    close();
  };
}
