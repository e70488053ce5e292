import assert from "node:assert/strict";
import { test } from "node:test";
import { likelyClasses, meaningOf } from "../../../src/protodcs/ui/logic/review_keys.js";

test("the likely classes have the first keys, the nearest one first", () => {
  const classes = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"];
  const likely = likelyClasses(["cat", "ant", "gone", "dog", "elk", "fox"], "dog", classes);
  assert.deepEqual(likely, ["dog", "cat", "ant", "elk", "fox"]);
  assert.deepEqual(meaningOf("1", likely), { answer: "dog" });
  assert.deepEqual(meaningOf("5", likely), { answer: "fox" });
  assert.equal(meaningOf("6", likely), null);
  assert.deepEqual(likelyClasses([], null, classes), []);
});

test("the other keys confirm, skip, undo, search and answer unknown", () => {
  assert.deepEqual(meaningOf("U", ["cat"]), { answer: null });
  assert.equal(meaningOf("Enter", ["cat"]), "confirm");
  assert.equal(meaningOf("z", ["cat"]), "undo");
  assert.equal(meaningOf("ArrowRight", ["cat"]), "skip");
  assert.equal(meaningOf("/", ["cat"]), "search");
  assert.equal(meaningOf("Escape", ["cat"]), null);
});
