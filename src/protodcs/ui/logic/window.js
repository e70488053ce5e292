/** Which rows of a long list are in view. Pure functions. */

const EXTRA = 8;

/**
 * Return the first row to draw and the one after the last.
 * @param {number} scrolled pixels above the view
 * @param {number} height of the view in pixels
 * @param {number} rowHeight pixels
 * @param {number} rows number of rows
 */
export function rowsInView(scrolled, height, rowHeight, rows) {
  const first = Math.max(0, Math.floor(scrolled / rowHeight) - EXTRA);
  const end = Math.min(rows, Math.ceil((scrolled + height) / rowHeight) + EXTRA);
  return { first: Math.min(first, Math.max(0, end)), end };
}
