import assert from "node:assert/strict";
import { test } from "node:test";
import { classKeys, meaningOf } from "../../../src/protodcs/ui/logic/review_keys.js";

const CLASSES = Array.from({ length: 40 }, (_, place) => `class ${place}`);

test("each key means one thing, and the key of a class answers with this class", () => {
  const keys = classKeys(CLASSES).filter(([key]) => key !== "");
  assert.equal(new Set(keys.map(([key]) => key)).size, keys.length);
  assert.ok(keys.length >= 30);
  for (const [key, name] of keys) {
    assert.deepEqual(meaningOf(key, CLASSES), { answer: name });
  }
});

test("the other keys confirm, skip, undo and answer unknown", () => {
  assert.deepEqual(meaningOf("U", CLASSES), { answer: null });
  assert.equal(meaningOf("Enter", CLASSES), "confirm");
  assert.equal(meaningOf("z", CLASSES), "undo");
  assert.equal(meaningOf("ArrowRight", CLASSES), "skip");
  assert.equal(meaningOf("Escape", CLASSES), null);
  assert.equal(meaningOf("9", ["cat"]), null);
});
