/** The page in view, as the fragment of the address: `#/`, `#/streams/ID` or `#/streams/ID/TAB`, each with `?filters`. */

import { useEffect, useState } from "./vendor/hooks.js";

/** @typedef {{stream: string | null, tab: string, query: string}} Place */

/** @param {string} fragment @returns {Place} */
export function parsePlace(fragment) {
  const [path = "", query = ""] = fragment.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/");
  if (parts[0] !== "streams" || !parts[1]) {
    return { stream: null, tab: "", query };
  }
  try {
    return { stream: decodeURIComponent(parts[1]), tab: parts[2] ?? "", query };
  } catch {
    return { stream: null, tab: "", query: "" };
  }
}

/** @param {string | null} stream @param {string} [tab] */
export function linkTo(stream, tab = "") {
  return stream === null ? "#/" : `#/streams/${encodeURIComponent(stream)}${tab && `/${tab}`}`;
}

/** Put filters into the address, without a further step to go back. @param {string} query */
export function setQuery(query) {
  const path = location.hash.split("?")[0] || "#/";
  history.replaceState(null, "", query === "" ? path : `${path}?${query}`);
  dispatchEvent(new Event("hashchange"));
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
