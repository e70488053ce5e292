import assert from "node:assert/strict";
import { test } from "node:test";
import { ago, duration, percent, quantity, seconds } from "../../../src/protodcs/ui/logic/format.js";
import { fitGroups, histogram } from "../../../src/protodcs/ui/logic/groups.js";
import { asDecision, classCounts, History } from "../../../src/protodcs/ui/logic/history.js";
import { timeline } from "../../../src/protodcs/ui/logic/timeline.js";
import { rowsInView } from "../../../src/protodcs/ui/logic/window.js";

const decision = (position, changes = {}) => ({
  ...asDecision({ position, time: 1000 * (1000 + position), outcome: "known", label: "cat", p_unknown: 0.1, score: 2 }),
  ...changes,
});

test("numbers and times are written for people", () => {
  assert.equal(percent(0.256, 1), "25.6 %");
  assert.equal(percent(null), "–");
  assert.equal(duration(59.9), "59 s");
  assert.equal(duration(7300), "2 h");
  assert.equal(ago(null, 5), "never");
  assert.equal(quantity(1, "stream"), "1 stream");
  assert.equal(quantity(1200, "stream"), "1,200 streams");
  assert.equal(seconds("1970-01-01T00:01:00Z"), 60);
  assert.equal(seconds(60_000), 60);
});

test("only rows in view are drawn, with a few around them", () => {
  assert.deepEqual(rowsInView(0, 400, 40, 5000), { first: 0, end: 18 });
  assert.deepEqual(rowsInView(40_000, 400, 40, 5000), { first: 992, end: 1018 });
  assert.deepEqual(rowsInView(40_000, 400, 40, 3), { first: 3, end: 3 });
});

test("a decision that arrives twice is stored once, and late ones are put in order", () => {
  const history = new History(100);
  history.add([decision(3), decision(5)]);
  history.add([decision(4), decision(5, { label: "dog" })]);
  history.add([decision(6)]);
  assert.deepEqual(
    history.decisions.map(({ position }) => position),
    [3, 4, 5, 6],
  );
  assert.equal(history.decisions[2].label, "dog");
});

test("the history keeps the newest decisions only", () => {
  const history = new History(10);
  for (let position = 0; position < 100; position++) {
    history.add([decision(position)]);
  }
  assert.ok(history.decisions.length <= 12);
  assert.equal(history.decisions.at(-1).position, 99);
});

test("the time of a position is that of its decision or the next one, if it is in the history", () => {
  const history = new History(10);
  history.add([decision(10), decision(12)]);
  assert.equal(history.timeAt(10), 1010);
  assert.equal(history.timeAt(11), 1012);
  assert.equal(history.timeAt(9), null);
  assert.equal(history.timeAt(13), null);
  assert.equal(history.timeBefore(10), null);
  assert.equal(history.timeBefore(12), 1010);
  assert.equal(history.timeBefore(20), 1012);
});

test("class counts leave unknown samples out", () => {
  const unknown = decision(3, { outcome: "unknown", label: null });
  assert.deepEqual(classCounts([decision(1, { label: "dog" }), decision(2), decision(4), unknown]), [
    ["cat", 2],
    ["dog", 1],
  ]);
});

test("every decision falls into one interval of the timeline", () => {
  const decisions = [0, 1, 600, 7200].map((time, position) =>
    decision(position, { time, outcome: position === 2 ? "unknown" : "known" }),
  );
  const { known, unknown, unsure, times } = timeline(decisions);
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  assert.deepEqual([total(known), total(unknown), total(unsure)], [3, 1, 0]);
  assert.ok(times.length <= 121);
  assert.deepEqual(timeline([]).times, []);
});

/** Numbers that look random, the same in every run. */
function* normals(seed) {
  let state = seed;
  const uniform = () => {
    state = (state * 1_103_515_245 + 12_345) % 2_147_483_648;
    return (state + 1) / 2_147_483_649;
  };
  for (;;) {
    yield Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  }
}

test("two groups of scores are found", () => {
  const random = normals(7);
  const scores = Array.from({ length: 600 }, (_, place) => random.next().value + (place % 4 === 0 ? -6 : 2));
  const rejected = scores.map((score) => score < 0.35);
  const groups = fitGroups(scores, rejected.map(Number));
  assert.ok(Math.abs(groups.mode - 2) < 0.25, `mode ${groups.mode}`);
  assert.ok(Math.abs(groups.mean + 6) < 0.25, `mean ${groups.mean}`);
  assert.ok(Math.abs(groups.share - 0.25) < 0.03, `share ${groups.share}`);
});

test("all scores are in the histogram, outliers in its outermost bins", () => {
  const decisions = Array.from({ length: 400 }, (_, place) => ({
    score: place / 100,
    outcome: /** @type {const} */ ("known"),
  }));
  decisions.push({ score: 1e6, outcome: "known" });
  const { known, centres } = histogram(decisions, 40, -1);
  assert.equal(
    known.reduce((sum, value) => sum + value, 0),
    401,
  );
  assert.ok(centres[0] < -0.9 && centres[39] > 3.5 && centres[39] < 10);
});
