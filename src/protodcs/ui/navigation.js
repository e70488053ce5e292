/** The page in view, as the fragment of the address: `#/`, `#/streams/ID` or `#/streams/ID/TAB`. */

import { useEffect, useState } from "./vendor/hooks.js";

/** @typedef {{stream: string | null, tab: string}} Place */

/** @param {string} fragment @returns {Place} */
export function parsePlace(fragment) {
  const parts = fragment.replace(/^#?\/?/, "").split("/");
  if (parts[0] !== "streams" || !parts[1]) {
    return { stream: null, tab: "" };
  }
  try {
    return { stream: decodeURIComponent(parts[1]), tab: parts[2] ?? "" };
  } catch {
    return { stream: null, tab: "" };
  }
}

/** @param {string | null} stream @param {string} [tab] */
export function linkTo(stream, tab = "") {
  return stream === null ? "#/" : `#/streams/${encodeURIComponent(stream)}${tab && `/${tab}`}`;
}

/** @returns {Place} */
export function usePlace() {
  const [place, setPlace] = useState(() => parsePlace(location.hash));
  useEffect(() => {
    const changed = () => setPlace(parsePlace(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return place;
}
