/** Take pictures of the page of a running demo, for `scripts/record_demo.py`: node record.js URL FOLDER FRAMES MILLISECONDS */

import { join } from "node:path";
import { launch } from "./browser/harness.js";

const [url = "", folder = "", frames = "20", pause = "500"] = process.argv.slice(2);
/** Images of the demo before the first picture. The fog comes after 400. */
const BEFORE = 385;

const browser = await launch();
const context = await browser.newContext({ viewport: { width: 1180, height: 872 }, colorScheme: "light" });
const page = await context.newPage();
await page.goto(url);
await page.waitForFunction(
  (least) => {
    const text = document.querySelector(".strip .hint")?.textContent ?? "";
    return Number(/^Image ([\d,]+) of/.exec(text)?.[1]?.replace(",", "")) >= least;
  },
  BEFORE,
  { timeout: 0 },
);
for (let frame = 0; frame < Number(frames); frame++) {
  await page.screenshot({ path: join(folder, `frame-${String(frame).padStart(3, "0")}.png`) });
  await page.waitForTimeout(Number(pause));
}
await browser.close();
