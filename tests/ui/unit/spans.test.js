import assert from "node:assert/strict";
import { test } from "node:test";
import { spansOf } from "../../../src/protodcs/ui/logic/spans.js";

test("bars of negative values end at zero, those of positive ones start there", () => {
  const { zero, spans } = spansOf([3, -1, 0]);
  assert.equal(zero, 0.25);
  assert.deepEqual(spans, [
    { start: 0.25, size: 0.75 },
    { start: 0, size: 0.25 },
    { start: 0.25, size: 0 },
  ]);
});

test("values of one sign have zero at an end, and zeros have no bars", () => {
  assert.equal(spansOf([1, 2]).zero, 0);
  assert.equal(spansOf([-1, -2]).zero, 1);
  assert.deepEqual(spansOf([-1, -2]).spans[0], { start: 0.5, size: 0.5 });
  assert.deepEqual(spansOf([0, 0]).spans, [
    { start: 0, size: 0 },
    { start: 0, size: 0 },
  ]);
});
