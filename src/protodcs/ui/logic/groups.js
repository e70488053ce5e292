/**
 * The scores of known and unknown samples: bins and the two fitted groups.
 * `fitGroups` is the EM of `protodcs.core.streamdcs.threshold.fit_mixture` without names; a test compares the two.
 */

/** Known scores are wider below their mode than above it, by this factor. */
const SKEW = 1.3;
/** Samples that the expected width of the known scores counts for. */
const WIDTH_PRIOR = 60;
const ITERATIONS = 25;
const SMALL = 1e-9;

/**
 * @typedef {object} Groups
 * @property {number} share of unknown samples
 * @property {number} mode of the known scores
 * @property {number} width of the known scores above their mode
 * @property {number} mean of the unknown scores
 * @property {number} deviation of the unknown scores
 * @property {number[]} unknown probability of each sample to be unknown
 */

/** @param {number[]} values */
const sum = (values) => values.reduce((total, value) => total + value, 0);
/** @param {number[]} weights @param {number[]} values */
const dot = (weights, values) => weights.reduce((total, weight, place) => total + weight * (values[place] ?? 0), 0);

/**
 * Fit two groups to scores, starting from probabilities of being unknown. The expected width is that of one group.
 * @param {number[]} scores @param {number[]} start @returns {Groups}
 */
export function fitGroups(scores, start) {
  const n = scores.length;
  const average = sum(scores) / n;
  const expected = (2 / (1 + SKEW)) * Math.sqrt(sum(scores.map((score) => (score - average) ** 2)) / n) + SMALL;
  const narrowest = 0.1 * expected;
  let unknown = start;
  let mode =
    dot(
      unknown.map((p) => 1 - p),
      scores,
    ) / Math.max(n - sum(unknown), SMALL);
  let before = Number.NEGATIVE_INFINITY;
  let share = 0;
  let mean = 0;
  let deviation = narrowest;
  let width = narrowest;
  for (let round = 0; round < ITERATIONS; round++) {
    const total = sum(unknown);
    share = Math.min(Math.max((total + 1) / (n + 2), 0.005), 0.98);
    mean = dot(unknown, scores) / Math.max(total, SMALL);
    const spread =
      dot(
        unknown,
        scores.map((score) => (score - mean) ** 2),
      ) / Math.max(total, SMALL);
    deviation = Math.max(Math.sqrt(spread), narrowest);
    const weigh = () => unknown.map((p, place) => (1 - p) / ((scores[place] ?? 0) < mode ? SKEW ** 2 : 1));
    let weights = weigh();
    mode = dot(weights, scores) / Math.max(sum(weights), SMALL);
    weights = weigh();
    const around = dot(
      weights,
      scores.map((score) => (score - mode) ** 2),
    );
    const squares = around + WIDTH_PRIOR * expected ** 2;
    width = Math.max(Math.sqrt(squares / (n - total + WIDTH_PRIOR)), narrowest);
    let likelihood = WIDTH_PRIOR * (Math.log(expected / width) + 0.5 - 0.5 * (expected / width) ** 2);
    unknown = scores.map((score) => {
      const asKnown = Math.log(1 - share) + knownLogDensity(score, mode, width);
      const asUnknown = Math.log(share / deviation) - 0.5 * ((score - mean) / deviation) ** 2;
      const most = Math.max(asKnown, asUnknown);
      const both = most + Math.log(Math.exp(asKnown - most) + Math.exp(asUnknown - most));
      likelihood += both;
      return score > mode ? 0 : Math.exp(asUnknown - both);
    });
    if (likelihood - before < 1e-5 * n) {
      break;
    }
    before = likelihood;
  }
  return { share, mode, width, mean, deviation, unknown };
}

/** @param {number} score @param {number} mode @param {number} width */
function knownLogDensity(score, mode, width) {
  const side = score < mode ? SKEW * width : width;
  return -Math.log(0.5 * (1 + SKEW) * width) - 0.5 * ((score - mode) / side) ** 2;
}

const ROOT = Math.sqrt(2 * Math.PI);

/** Return the fitted density of both groups at a score. @param {Groups} groups @param {number} score */
export function densities(groups, score) {
  return {
    known: ((1 - groups.share) * Math.exp(knownLogDensity(score, groups.mode, groups.width))) / ROOT,
    unknown:
      ((groups.share / groups.deviation) * Math.exp(-0.5 * ((score - groups.mean) / groups.deviation) ** 2)) / ROOT,
  };
}

/**
 * Return the edges of bins that hold all scores but a few outliers, and the counts of each outcome in them.
 * @param {{score: number, outcome: "known" | "unsure" | "unknown"}[]} decisions
 * @param {number} bins
 * @param {number | null} threshold is always inside
 */
export function histogram(decisions, bins, threshold) {
  const ordered = decisions.map(({ score }) => score).sort((a, b) => a - b);
  const at = (/** @type {number} */ share) => ordered[Math.round(share * (ordered.length - 1))] ?? 0;
  const low = Math.min(at(0.005), threshold ?? Number.POSITIVE_INFINITY);
  const high = Math.max(at(0.995), threshold ?? Number.NEGATIVE_INFINITY, low + SMALL);
  const width = ((high - low) * 1.06) / bins;
  const start = low - 0.03 * (high - low);
  const centres = Array.from({ length: bins }, (_, place) => start + (place + 0.5) * width);
  const counts = { known: new Array(bins).fill(0), unsure: new Array(bins).fill(0), unknown: new Array(bins).fill(0) };
  for (const { score, outcome } of decisions) {
    counts[outcome][Math.min(bins - 1, Math.max(0, Math.floor((score - start) / width)))] += 1;
  }
  return { width, centres, ...counts };
}
