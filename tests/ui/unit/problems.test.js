import assert from "node:assert/strict";
import { test } from "node:test";
import { arrange, countProblems, problemsOf, SILENT_SECONDS } from "../../../src/protodcs/ui/logic/problems.js";

const NOW = 1_000_000;
const row = (id, changes = {}) => ({
  id,
  created: NOW - 10,
  lastSeen: NOW - 1,
  frozen: false,
  unknownRate: 0.1,
  usualRate: 0.1,
  guard: null,
  warning: null,
  problem: null,
  ...changes,
});
const kinds = (stream) => problemsOf(stream, NOW).map(({ kind }) => kind);

test("a stream that behaves as usual has no problem", () => {
  assert.deepEqual(kinds(row("a")), []);
  assert.deepEqual(kinds(row("new", { lastSeen: null, unknownRate: null, usualRate: null })), []);
});

test("a stream that never sent a sample is silent after a while", () => {
  const old = row("dead", { created: NOW - SILENT_SECONDS, lastSeen: null });
  assert.deepEqual(
    problemsOf(old, NOW).map(({ kind, text }) => [kind, text]),
    [["silent", "It never sent a sample"]],
  );
});

test("each problem of a stream is found, the guard first", () => {
  const stream = row("a", {
    guard: "rejection",
    frozen: true,
    lastSeen: NOW - SILENT_SECONDS,
    warning: "possible_shift",
  });
  assert.deepEqual(kinds(stream), ["guard", "silent", "warning"]);
  assert.deepEqual(kinds(row("b", { frozen: true })), ["frozen"]);
});

test("a stream that cannot be loaded is the worst problem, and says why", () => {
  const stream = row("a", { guard: "rejection", problem: "This version cannot load the stream." });
  assert.deepEqual(kinds(stream), ["unloadable", "guard"]);
  assert.equal(problemsOf(stream, NOW)[0].text, "This version cannot load the stream.");
  assert.equal(countProblems([stream, row("b")], NOW).unloadable, 1);
});

test("the service decides whether an unknown rate is a problem", () => {
  assert.deepEqual(kinds(row("a", { unknownRate: 0.9 })), []);
  assert.deepEqual(kinds(row("a", { unknownRate: 0.6, warning: "many_unknown" })), ["unknown"]);
});

test("problem streams come first, and ids are in numeric order", () => {
  const rows = [
    row("camera-10"),
    row("camera-9"),
    row("camera-2", { frozen: true }),
    row("camera-7", { guard: "drift" }),
  ];
  const ids = arrange(rows, { now: NOW }).map((line) => line.row.id);
  assert.deepEqual(ids, ["camera-7", "camera-2", "camera-9", "camera-10"]);
});

test("search, filter and column order are applied together", () => {
  const rows = [row("Gate-1", { frozen: true }), row("gate-2"), row("dock-1", { frozen: true })];
  const options = { now: NOW, search: "gate", kind: /** @type {const} */ ("frozen") };
  assert.deepEqual(
    arrange(rows, options).map((line) => line.row.id),
    ["Gate-1"],
  );
  const byId = arrange(rows, { now: NOW, column: "id", descending: false }).map((line) => line.row.id);
  assert.deepEqual(byId, ["dock-1", "Gate-1", "gate-2"]);
});

test("problems are counted once per stream and kind", () => {
  const rows = [
    row("a", { frozen: true }),
    row("b", { guard: "drift", frozen: true, warning: "many_unknown" }),
    row("c"),
  ];
  const counts = countProblems(rows, NOW);
  assert.deepEqual([counts.all, counts.any, counts.guard, counts.unknown, counts.frozen], [3, 2, 1, 1, 1]);
});
