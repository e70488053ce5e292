import assert from "node:assert/strict";
import { test } from "node:test";
import { linkTo, parsePlace } from "../../../src/protodcs/ui/navigation.js";

test("a link leads to its place, whatever the id of the stream is", () => {
  for (const stream of ["camera-7", "a b/c?d#e", "Kamera Süd", "100%"]) {
    assert.deepEqual(parsePlace(linkTo(stream, "review")), { stream, tab: "review", query: "" });
  }
  assert.deepEqual(parsePlace(linkTo(null)), { stream: null, tab: "", query: "" });
  assert.deepEqual(parsePlace("#/streams/a/decisions?class=cat&q=b?c"), {
    stream: "a",
    tab: "decisions",
    query: "class=cat&q=b?c",
  });
  assert.deepEqual(parsePlace("#/?view=wall"), { stream: null, tab: "", query: "view=wall" });
});

test("an address that means nothing leads to the table", () => {
  for (const fragment of ["", "#", "#/nowhere", "#/streams/", "#/streams/%E0%A4%A"]) {
    assert.deepEqual(parsePlace(fragment), { stream: null, tab: "", query: "" });
  }
});
