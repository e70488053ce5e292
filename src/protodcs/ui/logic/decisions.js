/** The filters of the decision log: in the address, in requests, and in what the page itself leaves out. Pure functions. */

/** @typedef {import("./history.js").Decision} Decision */

/**
 * @typedef {object} Filters
 * @property {string} class only decisions with this label
 * @property {string} outcome only this one
 * @property {string} since, @property {string} until local times, as `<input type="datetime-local">` has them
 * @property {string} least, @property {string} most limits of the score
 * @property {string} reason only with this one; "none": only without any
 * @property {string} corrected "yes" or "no"
 * @property {string} q text in position, class, image reference or key
 */

/** @type {Filters} */
export const NO_FILTERS = {
  class: "",
  outcome: "",
  since: "",
  until: "",
  least: "",
  most: "",
  reason: "",
  corrected: "",
  q: "",
};

/** @param {string} query @returns {Filters} */
export function filtersOf(query) {
  const values = new URLSearchParams(query);
  const names = /** @type {(keyof Filters)[]} */ (Object.keys(NO_FILTERS));
  return /** @type {Filters} */ (Object.fromEntries(names.map((name) => [name, values.get(name) ?? ""])));
}

/** Return the query of an address; empty if nothing is filtered. @param {Filters} filters */
export function queryOf(filters) {
  return new URLSearchParams(Object.entries(filters).filter(([, value]) => value !== "")).toString();
}

/** Return the parameters of a request: what the service can filter. @param {Filters} filters @returns {[string, string][]} */
export function parametersOf(filters) {
  const moment = (/** @type {string} */ local) => (local === "" ? "" : new Date(local).toISOString());
  /** @type {[string, string][]} */
  const all = [
    ["label", filters.class],
    ["outcome", filters.outcome],
    ["since", moment(filters.since)],
    ["until", moment(filters.until)],
  ];
  return all.filter(([, value]) => value !== "");
}

/**
 * Return whether a decision matches what the service cannot filter.
 * @param {Decision} decision
 * @param {Filters} filters
 * @param {Set<number>} corrected positions
 */
export function matches(decision, filters, corrected) {
  const { least, most, reason, q } = filters;
  if ((least !== "" && !(decision.score >= Number(least))) || (most !== "" && !(decision.score <= Number(most)))) {
    return false;
  }
  if (reason !== "" && (decision.reason ?? "none") !== reason) {
    return false;
  }
  if (filters.corrected !== "" && corrected.has(decision.position) !== (filters.corrected === "yes")) {
    return false;
  }
  const texts = [
    String(decision.position),
    decision.label ?? "unknown",
    decision.nearest,
    decision.imageRef,
    decision.key,
  ];
  const wanted = q.trim().toLowerCase();
  return wanted === "" || texts.some((text) => text?.toLowerCase().includes(wanted));
}
