/** Keys of the review queue. Pure functions. */

/** Keys with a meaning of their own: unknown, skip, undo. */
export const UNKNOWN_KEY = "u";
export const SKIP_KEY = "s";
export const UNDO_KEY = "z";

/** The keys of classes, in the order of the classes. */
const KEYS = [..."123456789abcdefghijklmnopqrtvwxy"];

/**
 * Return the key of each class; classes beyond the last key have none.
 * @param {string[]} classes
 * @returns {[string, string][]} key and class; the key is empty if there is none left
 */
export function classKeys(classes) {
  return classes.map((name, place) => [KEYS[place] ?? "", name]);
}

/**
 * Return what a key means.
 * @param {string} key
 * @param {string[]} classes
 * @returns {{answer: string | null} | "confirm" | "skip" | "undo" | null} `answer: null` is unknown
 */
export function meaningOf(key, classes) {
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
  const place = KEYS.indexOf(pressed);
  const name = place < 0 ? undefined : classes[place];
  return name === undefined ? null : { answer: name };
}
