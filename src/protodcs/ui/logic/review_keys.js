/** Keys of the review queue. Pure functions. */

/** Keys with a meaning of their own: unknown, skip, undo, and any other class. */
export const UNKNOWN_KEY = "u";
export const SKIP_KEY = "s";
export const UNDO_KEY = "z";
export const SEARCH_KEY = "/";

/** So many classes have a key: 1, 2, ... */
const LIKELY = 5;

/**
 * Return the classes that a sample most likely has, the likeliest first.
 * @param {string[]} best classes of its explanation; empty before it is known
 * @param {string | null} nearest
 * @param {string[]} classes of the stream
 */
export function likelyClasses(best, nearest, classes) {
  return [...new Set([...(nearest === null ? [] : [nearest]), ...best])]
    .filter((name) => classes.includes(name))
    .slice(0, LIKELY);
}

/**
 * Return what a key means.
 * @param {string} key
 * @param {string[]} likely classes
 * @returns {{answer: string | null} | "confirm" | "skip" | "undo" | "search" | null} `answer: null` is unknown
 */
export function meaningOf(key, likely) {
  const pressed = key.length === 1 ? key.toLowerCase() : key;
  if (pressed === "Enter") {
    return "confirm";
  }
  if (pressed === UNKNOWN_KEY) {
    return { answer: null };
  }
  if (pressed === SKIP_KEY || pressed === "ArrowRight") {
    return "skip";
  }
  if (pressed === UNDO_KEY || pressed === "Backspace") {
    return "undo";
  }
  if (pressed === SEARCH_KEY) {
    return "search";
  }
  const name = /^[1-9]$/.test(pressed) ? likely[Number(pressed) - 1] : undefined;
  return name === undefined ? null : { answer: name };
}
