/**
 * Measure the UI and print a Markdown table: `node tests/ui/measure.js [SECONDS]` (default: 120).
 * Needs a quiet machine: service, sender and browser share its cores.
 */

import { feed, launch, open, Service } from "./browser/harness.js";

const SECONDS = Number(process.argv[2] ?? 120);
const RATE = 50;
const STREAMS = 5000;

/** Collect the times between frames, while an action runs. */
async function frames(page, action) {
  await page.evaluate(() => {
    const times = [];
    globalThis.frameTimes = times;
    let last = performance.now();
    const next = (now) => {
      times.push(now - last);
      last = now;
      requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
  });
  await action();
  const times = (await page.evaluate(() => globalThis.frameTimes)).sort((a, b) => a - b);
  const at = (share) => times[Math.floor(share * (times.length - 1))].toFixed(0);
  return `p50 ${at(0.5)} ms, p99 ${at(0.99)} ms`;
}

async function heap(page) {
  const session = await page.context().newCDPSession(page);
  await session.send("HeapProfiler.collectGarbage");
  const { usedSize } = await session.send("Runtime.getHeapUsage");
  return usedSize;
}

const service = await Service.start();
const browser = await launch();
const rows = [];
await feed("create", service.url, "", "camera");
for (let start = 0; start < STREAMS; start += 1000) {
  const streams = Array.from({ length: 1000 }, (_, place) => ({ id: `gate-${start + place}`, like: "camera" }));
  await service.request("POST", "v1/streams:batch", { streams });
}

const table = await open(browser, service);
const session = await table.page.context().newCDPSession(table.page);
await session.send("Network.setCacheDisabled", { cacheDisabled: true });
const begun = Date.now();
await table.page.goto(`${service.url}/ui/?fresh`);
await table.page.getByRole("link", { name: "gate-0", exact: true }).waitFor();
rows.push([`load time with ${STREAMS} streams, until the first row`, `${((Date.now() - begun) / 1000).toFixed(1)} s`]);
const scrolled = await frames(table.page, async () => {
  for (let step = 0; step < 100; step++) {
    await table.page.getByRole("rowgroup").evaluate((element) => element.scrollBy(0, 900));
  }
});
rows.push([`frame times while ${STREAMS} streams are scrolled`, scrolled]);
await table.close();

const page = await open(browser, service, "#/streams/camera");
await feed("burst", service.url, "", "camera", RATE, 10, 1);
const heaps = [await heap(page.page)];
let observed = 0;
let seconds = 0;
const live = await frames(page.page, async () => {
  // In two halves: the page fills its charts in the first one and should not grow in the second one.
  for (const seed of [2, 3]) {
    const sent = await feed("burst", service.url, "", "camera", RATE, SECONDS / 2, seed);
    observed += sent.observed;
    seconds += sent.seconds;
    heaps.push(await heap(page.page));
  }
});
const rate = (observed / seconds).toFixed(0);
rows.push([`frame times on a stream page, ${rate} decisions per second for ${seconds.toFixed(0)} s`, live]);
rows.push([
  "heap after garbage collection: at first, after half of the time, at the end",
  heaps.map((size) => `${(size / 1e6).toFixed(2)} MB`).join(", "),
]);
await browser.close();
await service.stop();
console.log("| measured | value |\n|---|---|");
for (const [name, value] of rows) {
  console.log(`| ${name} | ${value} |`);
}
