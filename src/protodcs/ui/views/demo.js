/** The page of `protodcs demo`: what is happening, the current image with its truth, and frozen zero-shot beside it. */

import { Chart, curves, dots } from "../components/charts.js";
import { ImagesHint, Picture } from "../components/picture.js";
import { Pill } from "../components/states.js";
import { adapted, countsOf, frozen, isRight, rightShares, shiftBands, stepsOf } from "../logic/demo.js";
import { count, percent, quantity } from "../logic/format.js";
import { linkTo } from "../navigation.js";
import { useMemo } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import { LEARNING, Legend, Panel } from "./overview.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../logic/history.js").History} History */
/** @typedef {import("../logic/demo.js").Step} Step */
/** @typedef {import("../logic/demo.js").Counts} Counts */

/** Images behind the figures. */
const RECENT = 400;
/** Images behind each point of the curves. */
const WINDOW = 60;
const SHOWN = 12;

const RIGHT = curves({ low: 0.4, high: 1 });
const SCORES = dots();

/** @type {Record<string, string>} */
const SHIFTS = { clean: "Clear images", fog: "Fog" };

/** @param {string} shift */
const named = (shift) => SHIFTS[shift] ?? shift;

/**
 * @param {{status: StreamStatus, history: History, version: number}} props
 */
export function Demo({ status, history, version }) {
  const steps = useMemo(() => stepsOf(history.decisions).slice(-RECENT), [history, version]);
  const newest = steps.at(-1);
  if (!newest) {
    return h("p", { class: "state", role: "status" }, "The first image arrives in a moment.");
  }
  return h(
    "div",
    null,
    h(Strip, { step: newest }),
    h(
      "div",
      { class: "panels demo" },
      h(Current, { id: status.id, step: newest, seen: status.sequence }),
      h(Figures, { steps }),
      h(Curves, { steps }),
      h(Scores, { steps }),
      h(Latest, { id: status.id, steps: steps.slice(-1 - SHOWN, -1).reverse() }),
    ),
  );
}

/** What is happening, and what comes next. @param {{step: Step}} props */
function Strip({ step: { told } }) {
  const ends = told.place + told.left >= told.images;
  const coming = ends
    ? "The demo starts again"
    : told.next === "clean"
      ? "The images clear"
      : `${named(told.next)} comes`;
  return h(
    "section",
    { class: `strip ${told.shift}`, "aria-label": "What is happening" },
    h("strong", null, named(told.shift)),
    h("span", null, `${coming} in ${quantity(told.left, "image")}.`),
    h("progress", {
      max: told.images,
      value: told.place + 1,
      "aria-label": `Image ${told.place + 1} of ${told.images}`,
    }),
    h("span", { class: "hint" }, `Image ${count(told.place + 1)} of ${count(told.images)}`),
  );
}

/** @param {{id: string, step: Step, seen: number}} props */
function Current({ id, step: { decision, told }, seen }) {
  const right = isRight(told, decision.label);
  return h(
    Panel,
    { title: "Now", aside: seen < LEARNING && h(Pill, { kind: "new" }, `learning, ${seen} of ${LEARNING} samples`) },
    h(
      "div",
      { class: "current" },
      h(Picture, { id, position: decision.position, exists: decision.hasThumbnail, key: decision.position }),
      h(ImagesHint, {}),
      h(
        "dl",
        null,
        h("dt", null, "StreamDCS says"),
        h(
          "dd",
          { class: `said is-text-${decision.label === null ? "unknown" : "known"}` },
          decision.label ?? "unknown",
        ),
        h("dt", null, "It is"),
        h("dd", null, told.known ? told.truth : `${told.truth}, not on the list`),
        h("dt", null, "So the decision is"),
        h("dd", null, h(Verdict, { right })),
        h("dt", null, "Frozen zero-shot says"),
        h("dd", null, told.frozen ?? "unknown", " ", h(Verdict, { right: isRight(told, told.frozen) })),
      ),
    ),
  );
}

/** @param {{right: boolean}} props */
const Verdict = ({ right }) => h(Pill, { kind: right ? "fine" : "bad" }, right ? "✓ right" : "✗ wrong");

/** @param {{steps: Step[]}} props */
function Figures({ steps }) {
  const all = [countsOf(steps, adapted), countsOf(steps, frozen)];
  /** @type {[string, (counts: Counts) => string, boolean][]} */
  const rows = [
    ["Right decisions", ({ correct }) => percent(correct / steps.length), true],
    ["Unknown found", ({ found, unknown }) => `${count(found)} of ${count(unknown)}`, false],
    ["Known rejected", ({ rejected, known }) => `${count(rejected)} of ${count(known)}`, false],
  ];
  return h(
    Panel,
    { title: `Last ${quantity(steps.length, "image")}` },
    h(
      "table",
      { class: "figures" },
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          ["", "StreamDCS", "frozen zero-shot"].map((text) => h("th", { key: text, scope: "col" }, text)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map(([name, text, large]) =>
          h(
            "tr",
            { key: name, class: large ? "large" : "" },
            h("th", { scope: "row" }, name),
            all.map((counts, place) => h("td", { key: place }, text(counts))),
          ),
        ),
      ),
    ),
    h(
      "p",
      { class: "hint" },
      "Both see the same images with the same encoder. Zero-shot has a fixed threshold, from labelled images without fog. StreamDCS has no labels and learns from the stream.",
    ),
  );
}

/** @param {{steps: Step[]}} props */
function Curves({ steps }) {
  const data = useMemo(() => {
    const places = steps.map((_, place) => place - steps.length + 1);
    return [places, rightShares(steps, adapted, WINDOW), rightShares(steps, frozen, WINDOW)];
  }, [steps]);
  const bands = useBands(steps);
  const [ours, theirs] = data.slice(1).map((values) => percent(values?.at(-1)));
  return h(
    Panel,
    {
      title: "Right decisions",
      aside: h(Legend, {
        entries: [
          ["line is-known", "StreamDCS"],
          ["line dashed is-text", "frozen zero-shot"],
          ["is-fog", "fog"],
        ],
      }),
    },
    steps.length < WINDOW
      ? h("p", { class: "empty" }, `The curves begin after ${WINDOW} images.`)
      : h(Chart, {
          summary: `Share of right decisions among the last ${WINDOW} images: StreamDCS ${ours}, frozen zero-shot ${theirs}.`,
          data,
          bands,
          options: RIGHT,
        }),
    h("p", { class: "hint" }, `Share among ${WINDOW} images, by image; 0 is now.`),
  );
}

/** @param {{steps: Step[]}} props */
function Scores({ steps }) {
  const data = useMemo(
    () => [
      steps.map((_, place) => place - steps.length + 1),
      ...[true, false].map((known) =>
        steps.map(({ told, decision }) => (told.known === known ? decision.score : null)),
      ),
    ],
    [steps],
  );
  const bands = useBands(steps);
  return h(
    Panel,
    {
      title: "Scores",
      aside: h(Legend, {
        entries: [
          ["is-known", "known kind"],
          ["is-unknown", "unknown kind"],
          ["is-fog", "fog"],
        ],
      }),
    },
    h(Chart, {
      summary: `Scores of the last ${steps.length} images. Those of known kinds are higher.`,
      data,
      bands,
      options: SCORES,
    }),
    h("p", { class: "hint" }, "Coloured by the truth, which StreamDCS never sees. The higher, the more known."),
  );
}

/** @param {Step[]} steps */
function useBands(steps) {
  return useMemo(
    () =>
      shiftBands(steps).map(({ from, to, label }) => ({
        from: from - steps.length + 1,
        to: to - steps.length + 1,
        label,
      })),
    [steps],
  );
}

/** @param {{id: string, steps: Step[]}} props */
function Latest({ id, steps }) {
  return h(
    Panel,
    {
      title: "Before that",
      full: true,
      aside: h("a", { href: linkTo(id, "clusters") }, "Unknown images that look alike: give them a name"),
    },
    h(
      "ul",
      { class: "thumbnails" },
      steps.map(({ decision, told }) =>
        h(
          "li",
          { key: decision.position },
          h(Picture, { id, position: decision.position, exists: decision.hasThumbnail }),
          h(
            "small",
            { class: isRight(told, decision.label) ? "" : "wrong" },
            h("strong", null, decision.label ?? "unknown"),
            isRight(told, decision.label) ? " ✓" : ` ✗ ${told.truth}`,
          ),
        ),
      ),
    ),
  );
}
