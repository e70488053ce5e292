import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { checkAccessibility, checkWidth, feed, launch, open, Service } from "./harness.js";

/** @type {Service} */ let service;
/** @type {import("playwright-core").Browser} */ let browser;

before(async () => {
  [service, browser] = await Promise.all([Service.start(), launch()]);
  await feed("create", service.url, "", "camera-1");
  const streams = Array.from({ length: 400 }, (_, place) => ({ id: `gate-${place}`, like: "camera-1" }));
  await service.request("POST", "v1/streams:batch", { streams });
  await service.request("POST", "v1/streams/gate-77/freeze");
});

after(async () => {
  await browser?.close();
  await service?.stop();
});

test("the root of the service leads to the table, with problem streams first", async () => {
  const { page, errors, close } = await open(browser, service);
  await page.goto(`${service.url}/`);
  await page.getByRole("link", { name: "gate-77" }).waitFor();
  assert.match(await page.getByRole("row").nth(1).textContent(), /gate-77\s*Frozen/);
  assert.equal(await page.getByRole("table").getAttribute("aria-rowcount"), "402");
  assert.ok((await page.getByRole("row").count()) < 60, "rows out of view are drawn");
  await checkAccessibility(page);
  assert.deepEqual(errors, []);
  await close();
});

test("search, filters and scrolling find every stream", async () => {
  const { page, errors, close } = await open(browser, service);
  await page.getByRole("searchbox").fill("gate-399");
  await page.getByRole("link", { name: "gate-399" }).waitFor();
  assert.equal(await page.getByRole("row").count(), 2);
  await page.getByRole("searchbox").fill("no such stream");
  await page.getByText("No stream matches").waitFor();
  await page.getByRole("searchbox").fill("");
  await page.getByRole("button", { name: /^Frozen/ }).click();
  await page.getByRole("link", { name: "gate-77" }).waitFor();
  assert.equal(await page.getByRole("row").count(), 2);
  await page.getByRole("button", { name: /^All/ }).click();
  await page.getByRole("rowgroup").evaluate((element) => element.scrollTo(0, element.scrollHeight));
  await page.getByRole("link", { name: "gate-399" }).waitFor();
  assert.deepEqual(errors, []);
  await close();
});

test("the wall shows streams by the beginning of their ids, and the address keeps what is shown", async () => {
  const { page, errors, close } = await open(browser, service, "#/?q=gate-7");
  await page.getByRole("button", { name: "Show the wall" }).click();
  await page.getByRole("heading", { name: /^gate 11 streams/ }).waitFor();
  await page.waitForURL(/q=gate-7&view=wall/);
  await page.getByText("no sample").first().waitFor();
  await checkAccessibility(page);
  await page.setViewportSize({ width: 390, height: 800 });
  await checkWidth(page);
  assert.deepEqual(errors, []);
  await close();
});

test("a webhook is created and deleted", async () => {
  const { page, errors, close } = await open(browser, service);
  await page.getByRole("button", { name: "Webhooks" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("New webhook").fill("https://8.8.8.8/hook");
  await dialog.getByLabel("guard").uncheck();
  await dialog.getByRole("button", { name: "Create" }).click();
  await dialog.getByText(/^whsec_/).waitFor();
  await checkAccessibility(page);
  const { webhooks } = await service.request("GET", "v1/webhooks");
  assert.deepEqual(webhooks[0].events, ["possible_shift", "many_unknown"]);
  await dialog.getByRole("button", { name: "Delete https://8.8.8.8/hook" }).click();
  await dialog.getByText("There are no webhooks yet.").waitFor();
  assert.deepEqual(errors, []);
  await close();
});

test("many streams are frozen and unfrozen after a confirmation", async () => {
  const { page, errors, close } = await open(browser, service);
  await page.getByRole("searchbox").fill("gate-10");
  await page.getByRole("checkbox", { name: "Select all shown streams" }).check();
  const selected = 11; // gate-10 and gate-100 to gate-109
  for (const [verb, frozen] of /** @type {[string, boolean][]} */ ([
    ["Freeze", true],
    ["Unfreeze", false],
  ])) {
    await page.getByRole("checkbox", { name: "Select all shown streams" }).check();
    await page.getByRole("button", { name: verb, exact: true }).click();
    const dialog = page.getByRole("dialog");
    await dialog.getByText(`${verb} ${selected} streams?`).waitFor();
    await dialog.getByRole("button", { name: verb }).click();
    await dialog.waitFor({ state: "detached" });
    const found = await service.request("GET", "v1/streams?frozen=true&limit=1000");
    assert.equal(found.streams.filter(({ id }) => id.startsWith("gate-10")).length, frozen ? selected : 0);
  }
  assert.deepEqual(errors, []);
  await close();
});

for (const [width, colorScheme] of /** @type {[number, "dark" | "light"][]} */ ([
  [1024, "dark"],
  [390, "dark"],
  [390, "light"],
])) {
  test(`the table fits ${width} pixels, ${colorScheme}`, async () => {
    const { page, errors, close } = await open(browser, service, "", { viewport: { width, height: 800 }, colorScheme });
    await page.getByRole("link", { name: "gate-77" }).waitFor();
    await checkWidth(page);
    await checkAccessibility(page);
    assert.deepEqual(errors, []);
    await close();
  });
}
