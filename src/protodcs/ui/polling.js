/** Data that is loaded again and again while the page is visible. */

import { useCallback, useEffect, useRef, useState } from "./vendor/hooks.js";

/** @typedef {import("./api.js").ApiError} ApiError */

/**
 * @template T
 * @typedef {object} Polled
 * @property {T | null} data the newest data, also while the service cannot be reached
 * @property {ApiError | null} error of the newest request
 * @property {number} loaded time of the data in seconds since 1970; 0 before the first
 * @property {() => void} reload
 */

/**
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {number} period seconds between two requests
 * @param {unknown[]} dependencies load at once if one of these changes
 * @param {boolean} [paused] load nothing for now
 * @returns {Polled<T>}
 */
export function usePolling(load, period, dependencies, paused = false) {
  const [state, setState] = useState(
    /** @type {{data: T | null, error: ApiError | null, loaded: number}} */ ({ data: null, error: null, loaded: 0 }),
  );
  const [round, setRound] = useState(0);
  const newest = useRef(load);
  newest.current = load;
  useEffect(() => {
    const abort = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const next = async () => {
      clearTimeout(timer);
      if (document.hidden || paused) {
        return;
      }
      try {
        const data = await newest.current(abort.signal);
        if (abort.signal.aborted) {
          return;
        }
        setState({ data, error: null, loaded: Date.now() / 1000 });
      } catch (problem) {
        if (abort.signal.aborted) {
          return;
        }
        setState((before) => ({ ...before, error: /** @type {ApiError} */ (problem) }));
      }
      timer = setTimeout(next, period * 1000);
    };
    next();
    document.addEventListener("visibilitychange", next);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", next);
    };
  }, [round, period, paused, ...dependencies]);
  const reload = useCallback(() => setRound((before) => before + 1), []);
  return { ...state, reload };
}

/** Return the time in seconds since 1970, again every `period` seconds. @param {number} period */
export function useNow(period) {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), period * 1000);
    return () => clearInterval(timer);
  }, [period]);
  return now;
}
