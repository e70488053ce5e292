/** Numbers and times as people read them. Pure functions. */

/** @param {number | null | undefined} value @param {number} [digits] */
export function percent(value, digits = 0) {
  return value == null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(digits)} %`;
}

/** @param {number | null | undefined} value */
export function count(value) {
  return value == null ? "–" : value.toLocaleString("en-US");
}

/** @param {number | null | undefined} value @param {number} [digits] */
export function decimal(value, digits = 2) {
  return value == null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

/** @param {number} singular @param {string} noun @param {string} [plural] */
export function quantity(singular, noun, plural = `${noun}s`) {
  return `${count(singular)} ${singular === 1 ? noun : plural}`;
}

const UNITS = /** @type {const} */ ([
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
]);

/** Return a duration in its largest unit. @param {number} seconds */
export function duration(seconds) {
  for (const [size, unit] of UNITS) {
    if (seconds >= size) {
      return `${Math.floor(seconds / size)} ${unit}`;
    }
  }
  return "0 s";
}

/** Return how long ago a time was. @param {number | null} time seconds since 1970 @param {number} now */
export function ago(time, now) {
  return time === null ? "never" : `${duration(Math.max(0, now - time))} ago`;
}

/**
 * Return a time of the API in seconds since 1970.
 * @param {string | number | null | undefined} time a text of a response, or the milliseconds of an event
 */
export function seconds(time) {
  if (time == null) {
    return null;
  }
  return (typeof time === "number" ? time : Date.parse(time)) / 1000;
}

/** @param {number} time seconds since 1970 */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}
