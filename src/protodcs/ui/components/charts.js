/** Charts over uPlot: they are drawn on a canvas, and describe themselves to screen readers. */

import { clock } from "../logic/format.js";
import { STEPS } from "../logic/timeline.js";
import { useEffect, useRef } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";
import uPlot from "../vendor/uplot.js";

/** @typedef {import("../vendor/uplot.js").default} Plot */
/** @typedef {{at: number, color: string, label: string, dashed?: boolean}} Mark a vertical line */
/** @typedef {{from: number, to: number, label: string}} Band a shaded part of the x axis */

/** Return colours of the theme, as the canvas needs them. */
export function themeColors() {
  const probe = document.createElement("span");
  document.body.append(probe);
  const names = /** @type {const} */ ([
    "known",
    "unsure",
    "unknown",
    "text",
    "muted",
    "line",
    "danger",
    "surface",
    "fog",
  ]);
  const colors = /** @type {Record<(typeof names)[number], string>} */ ({});
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    colors[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return colors;
}

/**
 * A chart that follows the width of its place.
 * @param {{summary: string, height?: number, data: any, marks?: Mark[], bands?: Band[],
 *   options: (colors: ReturnType<typeof themeColors>) => Omit<uPlot.Options, "width" | "height">}} props
 *   `options` must not change; `data`, `marks` and `bands` may.
 */
export function Chart({ summary, height = 210, data, marks = [], bands = [], options }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {Plot | null} */ (null));
  const newest = useRef({ data, marks, bands });
  newest.current = { data, marks, bands };
  useEffect(() => {
    const element = /** @type {HTMLDivElement} */ (place.current);
    const draw = () => {
      plot.current?.destroy();
      const colors = themeColors();
      const given = options(colors);
      plot.current = new uPlot(
        {
          ...given,
          width: element.clientWidth || 300,
          height,
          legend: { show: false },
          cursor: { show: false },
          hooks: {
            drawClear: [(chart) => drawBands(chart, newest.current.bands, colors)],
            draw: [(chart) => drawMarks(chart, newest.current.marks)],
          },
        },
        newest.current.data,
        element,
      );
    };
    draw();
    const resizing = new ResizeObserver(() => {
      const width = element.clientWidth;
      if (plot.current && width && width !== plot.current.width) {
        plot.current.setSize({ width, height });
      }
    });
    resizing.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", draw);
    dark.addEventListener("change", draw);
    return () => {
      resizing.disconnect();
      removeEventListener("themechange", draw);
      dark.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [options, height]);
  useEffect(() => {
    plot.current?.setData(data);
  }, [data, marks, bands]);
  return h("div", { class: "chart", ref: place, role: "img", "aria-label": summary });
}

/** @param {Plot} chart @param {Band[]} bands @param {ReturnType<typeof themeColors>} colors */
function drawBands(chart, bands, colors) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  for (const { from, to, label } of bands) {
    const [left, right] = [from, to].map((value) =>
      Math.min(Math.max(chart.valToPos(value, "x", true), bbox.left), bbox.left + bbox.width),
    );
    if (left !== undefined && right !== undefined && right > left) {
      ctx.fillStyle = colors.fog;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.fillStyle = colors.muted;
      ctx.fillText(label, left + 5 * devicePixelRatio, bbox.top + 14 * devicePixelRatio);
    }
  }
  ctx.restore();
}

/** @param {Plot} chart @param {Mark[]} marks */
function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  const pixels = devicePixelRatio || 1;
  ctx.save();
  ctx.font = `${11 * pixels}px system-ui, sans-serif`;
  ctx.lineWidth = 1.5 * pixels;
  let row = 0;
  for (const { at, color, label, dashed } of marks) {
    const x = chart.valToPos(at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) {
      continue;
    }
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.setLineDash(dashed ? [4 * pixels, 3 * pixels] : []);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const right = x > bbox.left + 0.7 * bbox.width;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(label, x + (right ? -4 : 4) * pixels, bbox.top + (12 + 13 * (row++ % 3)) * pixels);
  }
  ctx.restore();
}

/** @param {Plot} _ @param {number[]} times */
const clocks = (_, times) => times.map(clock);

const BARS = /** @type {NonNullable<typeof uPlot.paths.bars>} */ (uPlot.paths.bars)({ size: [0.9, 60], align: 1 });
const CENTRED = /** @type {NonNullable<typeof uPlot.paths.bars>} */ (uPlot.paths.bars)({ size: [0.92, 60] });

/**
 * Return the options of stacked bars of the three outcomes. The data are running totals: all, unsure and unknown, unknown.
 * @param {{time: boolean}} options
 */
export function outcomeBars({ time }) {
  return (/** @type {ReturnType<typeof themeColors>} */ colors) => {
    const axis = axisOf(colors);
    const series = (/** @type {string} */ color) => ({
      stroke: color,
      fill: color,
      width: 0,
      points: { show: false },
      paths: time ? BARS : CENTRED,
    });
    const curve = (/** @type {string} */ color, /** @type {number[]} */ dash) => ({
      stroke: color,
      width: 2,
      dash,
      points: { show: false },
    });
    return {
      // Room for one half of the last time.
      padding: /** @type {uPlot.Padding} */ ([null, time ? 32 : null, null, null]),
      scales: {
        x: { time },
        y: {
          range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ most) =>
            /** @type {[number, number]} */ ([0, Math.max(1, 1.08 * most)]),
        },
      },
      axes: [
        { ...axis, size: 30, ...(time ? { space: 90, values: clocks, incrs: STEPS } : {}) },
        { ...axis, size: 44 },
      ],
      series: [
        {},
        series(colors.known),
        series(colors.unsure),
        series(colors.unknown),
        ...(time ? [] : [curve(colors.text, []), curve(colors.text, [6, 4])]),
      ],
    };
  };
}

/** @param {ReturnType<typeof themeColors>} colors */
const axisOf = (colors) => ({
  stroke: colors.muted,
  grid: { stroke: colors.line, width: 1 },
  ticks: { stroke: colors.line },
});

/** Return the options of two curves of shares, the second one dashed. @param {{low: number, high: number}} range */
export function curves({ low, high }) {
  return (/** @type {ReturnType<typeof themeColors>} */ colors) => ({
    scales: {
      x: { time: false },
      y: {
        range: (/** @type {any} */ _, /** @type {number} */ least) =>
          /** @type {[number, number]} */ ([Math.min(low, least ?? low), high]),
      },
    },
    axes: [
      { ...axisOf(colors), size: 30 },
      {
        ...axisOf(colors),
        size: 52,
        values: (/** @type {any} */ _, /** @type {number[]} */ shares) =>
          shares.map((share) => `${Math.round(100 * share)} %`),
      },
    ],
    series: [
      {},
      { stroke: colors.known, width: 2.5, points: { show: false } },
      { stroke: colors.muted, width: 2, dash: [6, 4], points: { show: false } },
    ],
  });
}

/** Return the options of two groups of dots, known and unknown ones. */
export function dots() {
  return (/** @type {ReturnType<typeof themeColors>} */ colors) => {
    const group = (/** @type {string} */ color) => ({
      paths: () => null,
      points: { show: true, size: 5, width: 0, fill: color, stroke: color },
    });
    return {
      scales: { x: { time: false } },
      axes: [
        { ...axisOf(colors), size: 30 },
        { ...axisOf(colors), size: 52 },
      ],
      series: [{}, group(colors.known), group(colors.unknown)],
    };
  };
}
