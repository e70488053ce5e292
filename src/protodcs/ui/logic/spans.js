/** Bars of numbers that may be negative. Pure functions. */

/**
 * Return where the bar of each value starts and how long it is, and where zero is, as fractions of the track.
 * Bars of negative values end at zero, those of positive values start there.
 * @param {number[]} values
 * @returns {{zero: number, spans: {start: number, size: number}[]}}
 */
export function spansOf(values) {
  const low = Math.min(0, ...values);
  const width = Math.max(0, ...values) - low || 1;
  const spans = values.map((value) => ({
    start: (Math.min(0, value) - low) / width,
    size: Math.abs(value) / width,
  }));
  return { zero: (0 - low) / width, spans };
}
