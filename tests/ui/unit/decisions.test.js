import assert from "node:assert/strict";
import { test } from "node:test";
import { filtersOf, matches, NO_FILTERS, parametersOf, queryOf } from "../../../src/protodcs/ui/logic/decisions.js";
import { asDecision } from "../../../src/protodcs/ui/logic/history.js";
import { whySentence } from "../../../src/protodcs/ui/logic/reasons.js";

const decision = asDecision({
  position: 41,
  outcome: "known",
  label: "cat",
  score: 2.5,
  image_ref: "hall/7.jpg",
  key: "k1",
});
const found = (changes, corrected = []) => matches(decision, { ...NO_FILTERS, ...changes }, new Set(corrected));

test("filters survive a trip through the address", () => {
  const filters = { ...NO_FILTERS, class: "ice cream & cone", least: "-1.5", q: "a?b" };
  assert.deepEqual(filtersOf(queryOf(filters)), filters);
  assert.equal(queryOf(NO_FILTERS), "");
});

test("the service filters by class, outcome and time", () => {
  const filters = { ...NO_FILTERS, class: "cat", outcome: "known", since: "2030-01-31T12:00", least: "3" };
  assert.deepEqual(parametersOf(filters), [
    ["label", "cat"],
    ["outcome", "known"],
    ["since", new Date("2030-01-31T12:00").toISOString()],
  ]);
});

test("the page filters by score, reason, correction and text", () => {
  assert.ok(found({}));
  assert.ok(found({ least: "2.5", most: "2.5" }));
  assert.ok(!found({ least: "2.6" }));
  assert.ok(!found({ most: "-1" }));
  assert.ok(found({ reason: "none" }));
  assert.ok(!found({ reason: "few samples" }));
  assert.ok(found({ corrected: "yes" }, [41]));
  assert.ok(!found({ corrected: "yes" }, [40]));
  assert.ok(found({ corrected: "no" }, [40]));
  assert.ok(found({ q: " HALL " }));
  assert.ok(found({ q: "41" }));
  assert.ok(!found({ q: "dog" }));
});

test("a sentence says on which side of the threshold a sample is", () => {
  const about = { score: 1, threshold: 2, correction_score: 0, nearest: "cat", isKnown: false };
  assert.equal(
    whySentence(about),
    "The score of 1.00 is below the threshold of 2.00: not even cat, the nearest class, stands out enough.",
  );
  assert.match(whySentence({ ...about, score: 3, isKnown: true, correction_score: 1 }), /above.*Corrections/);
  assert.match(whySentence({ ...about, threshold: null }), /too few samples/);
});
