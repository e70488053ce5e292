/** The newest decisions of a stream, each once. Pure: no clock, no network. */

import { seconds } from "./format.js";

/**
 * @typedef {object} Decision
 * @property {number} position place in the journal of the stream; decisions are told apart by it
 * @property {number} time seconds since 1970
 * @property {"known" | "unsure" | "unknown"} outcome
 * @property {string | null} label
 * @property {string | null} nearest class that the sample resembles most
 * @property {number} pUnknown
 * @property {number} score
 * @property {string | null} reason
 * @property {boolean} rolledBack
 * @property {boolean} hasThumbnail
 * @property {string | null} imageRef
 * @property {string | null} key of the request
 */

/** @param {any} item a decision of the API @returns {Decision} */
export function asDecision(item) {
  return {
    position: item.position,
    time: seconds(item.time) ?? 0,
    outcome: item.outcome,
    label: item.label ?? null,
    nearest: item.nearest_class ?? item.label ?? null,
    pUnknown: item.p_unknown,
    score: item.score,
    reason: item.reason ?? null,
    rolledBack: item.rolled_back ?? false,
    hasThumbnail: item.has_thumbnail ?? false,
    imageRef: item.image_ref ?? null,
    key: item.key ?? null,
  };
}

/** Decisions in the order of their positions. */
export class History {
  /** @param {number} limit how many of the newest decisions are stored */
  constructor(limit) {
    this.limit = limit;
    /** @type {Decision[]} */
    this.decisions = [];
  }

  /** Add decisions in any order. One with a known position replaces the older one. @param {Decision[]} added */
  add(added) {
    if (added.length === 0) {
      return;
    }
    const last = this.decisions.at(-1)?.position ?? -1;
    const inOrder = added.every((one, place) => one.position > (added[place - 1]?.position ?? last));
    if (inOrder) {
      this.decisions.push(...added);
    } else {
      const byPosition = new Map(this.decisions.map((one) => [one.position, one]));
      for (const one of added) {
        byPosition.set(one.position, one);
      }
      this.decisions = [...byPosition.values()].sort((a, b) => a.position - b.position);
    }
    if (this.decisions.length > 1.2 * this.limit) {
      this.decisions.splice(0, this.decisions.length - this.limit);
    }
  }

  /** Forget everything, as after the stream was deleted and created again. */
  clear() {
    this.decisions = [];
  }

  /** @param {number} amount */
  newest(amount) {
    return this.decisions.slice(-amount);
  }

  /** Return the time of the decision at a position, or of the next one. @param {number} position */
  timeAt(position) {
    const { decisions } = this;
    const place = this.placeOf(position);
    return place === 0 && (decisions[0]?.position ?? position) > position ? null : (decisions[place]?.time ?? null);
  }

  /** Return the time of the last decision before a position. @param {number} position */
  timeBefore(position) {
    return this.decisions[this.placeOf(position) - 1]?.time ?? null;
  }

  /** Return how many decisions come before a position. @param {number} position */
  placeOf(position) {
    let low = 0;
    let high = this.decisions.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (/** @type {Decision} */ (this.decisions[middle]).position < position) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
}

/**
 * Return how many decisions had each class, most frequent first.
 * @param {Decision[]} decisions
 * @returns {[string, number][]}
 */
export function classCounts(decisions) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const { label } of decisions) {
    if (label !== null) {
      counts.set(label, (counts.get(label) ?? 0) + 1);
    }
  }
  return [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
}
