import assert from "node:assert/strict";
import { test } from "node:test";
import {
  adapted,
  countsOf,
  frozen,
  rightShares,
  shiftBands,
  stepsOf,
  toldBy,
} from "../../../src/protodcs/ui/logic/demo.js";
import { asDecision } from "../../../src/protodcs/ui/logic/history.js";
import { groupsOf, unknownShares } from "../../../src/protodcs/ui/logic/wall.js";

const reference = (changes) =>
  `demo?${new URLSearchParams({ place: "3", images: "10", shift: "clean", left: "2", next: "fog", truth: "cat", known: "1", frozen: "cat", ...changes })}`;
const decision = (position, label, changes) => asDecision({ position, label, image_ref: reference(changes) });

test("a reference of the demo tells the truth, and others tell nothing", () => {
  assert.deepEqual(toldBy(reference({ truth: "ice cream", known: "0", frozen: "" })), {
    place: 3,
    images: 10,
    shift: "clean",
    left: 2,
    next: "fog",
    truth: "ice cream",
    known: false,
    frozen: null,
  });
  assert.equal(toldBy("hall/7.jpg"), null);
  assert.equal(toldBy(null), null);
});

test("right decisions are counted, also those on kinds that got a name", () => {
  const clock = { truth: "clock", known: "0", frozen: "" };
  const steps = stepsOf([
    decision(0, "cat", {}),
    decision(1, null, { frozen: "dog" }),
    decision(2, null, clock),
    decision(3, "clock", clock),
    decision(4, "cat", { ...clock, frozen: "cat" }),
    asDecision({ position: 5, label: "cat" }),
  ]);
  assert.deepEqual(countsOf(steps, adapted), { correct: 3, known: 2, rejected: 1, unknown: 3, found: 2 });
  assert.deepEqual(countsOf(steps, frozen), { correct: 3, known: 2, rejected: 0, unknown: 3, found: 2 });
  assert.deepEqual(rightShares(steps, adapted, 2), [null, 0.5, 0.5, 1, 0.5]);
});

test("the fog is one stretch each time", () => {
  const steps = stepsOf(["clean", "fog", "fog", "clean", "fog"].map((shift, at) => decision(at, "cat", { shift })));
  assert.deepEqual(shiftBands(steps), [
    { from: 1, to: 3, label: "fog" },
    { from: 4, to: 5, label: "fog" },
  ]);
});

test("streams are grouped by the beginning of their ids", () => {
  const lines = ["hall-1", "gate", "hall-2", "roof-9"].map((id) => ({ row: { id } }));
  const groups = groupsOf(lines).map(([name, members]) => [name, members.map(({ row }) => row.id)]);
  assert.deepEqual(groups, [
    ["", ["gate", "roof-9"]],
    ["hall", ["hall-1", "hall-2"]],
  ]);
  assert.deepEqual(unknownShares([]), []);
  assert.deepEqual(unknownShares(["cat", null, "cat"].map((label, at) => decision(at, label, {}))), [0, 1, 0]);
});
