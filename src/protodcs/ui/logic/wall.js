/** How streams are grouped on the wall, and what their small charts show. Pure functions. */

/** @typedef {import("./history.js").Decision} Decision */

const BARS = 12;

/**
 * Return streams by the beginning of their ids, up to the last separator. A group of one has no name of its own.
 * @template {{row: {id: string}}} Line
 * @param {Line[]} lines
 * @returns {[string, Line[]][]}
 */
export function groupsOf(lines) {
  /** @type {Map<string, Line[]>} */
  const groups = new Map();
  for (const line of lines) {
    const name = /^(.+)[-_/.: ]/.exec(line.row.id)?.[1] ?? "";
    groups.set(name, [...(groups.get(name) ?? []), line]);
  }
  /** @type {Line[]} */
  const single = [];
  const named = [...groups].filter(([name, members]) => {
    if (name === "" || members.length === 1) {
      single.push(...members);
      return false;
    }
    return true;
  });
  return single.length > 0 ? [["", single], ...named] : named;
}

/** Return the share of unknown decisions in equal parts of the decisions. @param {Decision[]} decisions */
export function unknownShares(decisions) {
  const size = Math.max(1, Math.ceil(decisions.length / BARS));
  const parts = Array.from({ length: Math.ceil(decisions.length / size) }, (_, part) =>
    decisions.slice(part * size, (part + 1) * size),
  );
  return parts.map((part) => part.filter(({ label }) => label === null).length / part.length);
}
