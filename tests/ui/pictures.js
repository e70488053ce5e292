/**
 * Take pictures of every page of the UI in three widths and two themes: `node tests/ui/pictures.js FOLDER [NAMES]`.
 * NAMES are separated by commas. Without a folder, write the pictures of docs/how-to/ui.md.
 */

import { join } from "node:path";
import { feed, launch, open, Service } from "./browser/harness.js";

const ASSETS = new URL("../../docs/assets/", import.meta.url).pathname;
const [folder = "", names = ""] = process.argv.slice(2);
const WIDTHS = [1440, 1024, 390];
const THEMES = /** @type {const} */ (["light", "dark"]);

const service = await Service.start();
const browser = await launch();
const config = { review_rate: 0.1 };
await service.request("POST", "v1/streams", { id: "camera", classes: "demo", discovery: true, config });
const gates = ["north-gate-1", "north-gate-2", "south-gate-1", "south-gate-2"];
for (const id of [...gates, "story", "never-sent"]) {
  await service.request("POST", "v1/streams", { id, classes: "demo", discovery: true });
}
await feed("demo", service.url, "", "camera", 500, 1);
await feed("planted", service.url, "", "camera", "clock", 60, 2);
await feed("story", service.url, "", "story", 290, 3);
for (const [place, id] of gates.entries()) {
  await feed("demo", service.url, "", id, 120 + 60 * place, 10 + place);
}
await feed("planted", service.url, "", "north-gate-2", "robot", 60, 5);
await service.request("POST", "v1/streams/south-gate-1/freeze");

/** @typedef {(page: import("playwright-core").Page) => Promise<void>} Act */

/** @type {(name: RegExp | string) => Act} */
const press = (name) => (page) => page.getByRole("button", { name }).first().click();

/** @type {[string, string, Act?][]} */
const PAGES = [
  ["streams", ""],
  ["wall", "#/?view=wall"],
  ["webhooks", "", press("Webhooks")],
  ["demo", "#/streams/story/demo"],
  ["overview", "#/streams/camera", press("Check classes")],
  ["decisions", "#/streams/camera/decisions"],
  ["explain", "#/streams/camera/decisions", (page) => page.locator(".thumbnails button").first().click()],
  ["clusters", "#/streams/camera/clusters"],
  [
    "name",
    "#/streams/camera/clusters",
    async (page) => {
      await press(/^Name$/)(page);
      await page.getByLabel("Name", { exact: true }).fill("clock");
      await page.getByText(/would become clock/).waitFor();
    },
  ],
  ["review", "#/streams/camera/review"],
  ["reset", "#/streams/camera", press("Reset")],
  ["roll-back", "#/streams/camera", press("Roll back")],
  ["edit", "#/streams/camera", press("Edit classes")],
  ["warning", "#/streams/north-gate-2"],
  ["new", "#/streams/never-sent"],
  ["missing", "#/streams/nowhere"],
];

/** Wait until everything that is in view is loaded and drawn. @type {Act} */
async function settled(page) {
  await page.waitForFunction(
    () =>
      !document.querySelector(".spinner") &&
      // Images below are not loaded before they come into view.
      [...document.images].every((image) => image.complete || image.getBoundingClientRect().top > innerHeight),
  );
  await page.waitForTimeout(1000);
}

/**
 * @param {string} path
 * @param {string} fragment
 * @param {Act | undefined} act
 * @param {{width: number, height: number}} viewport
 * @param {"light" | "dark"} colorScheme
 * @param {boolean} whole whether the picture has the whole page
 */
async function shoot(path, fragment, act, viewport, colorScheme, whole) {
  const { page, close } = await open(browser, service, fragment, { viewport, colorScheme });
  await settled(page);
  await act?.(page);
  await settled(page);
  if (whole) {
    const height = await page.evaluate(() => document.documentElement.scrollHeight);
    await page.setViewportSize({ ...viewport, height: Math.min(height, 3000) });
    await settled(page);
  }
  await page.screenshot({ path });
  await close();
}

if (folder === "") {
  const [wide, phone] = [
    { width: 1180, height: 760 },
    { width: 390, height: 760 },
  ];
  await shoot(join(ASSETS, "ui-streams.png"), "", undefined, { ...wide, height: 420 }, "light", false);
  await shoot(join(ASSETS, "ui-stream.png"), "#/streams/camera", undefined, { ...wide, height: 1000 }, "light", false);
  await shoot(join(ASSETS, "ui-phone.png"), "#/streams/camera", undefined, phone, "light", false);
} else {
  for (const [name, fragment, act] of PAGES.filter(([name]) => names === "" || names.split(",").includes(name))) {
    for (const width of WIDTHS) {
      for (const theme of THEMES) {
        const path = join(folder, `${name}-${width}-${theme}.png`);
        await shoot(path, fragment, act, { width, height: width === 390 ? 844 : 900 }, theme, true);
      }
    }
  }
}
await browser.close();
await service.stop();
