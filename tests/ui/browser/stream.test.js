import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { checkAccessibility, checkWidth, feed, launch, open, Service } from "./harness.js";

/** Unknown to the stream, and a word that the encoder does not know. */
const KIND = "clock";

/** @type {Service} */ let service;
/** @type {import("playwright-core").Browser} */ let browser;

before(async () => {
  [service, browser] = await Promise.all([Service.start(), launch()]);
  const config = { review_rate: 0.05 };
  await service.request("POST", "v1/streams", { id: "camera", classes: "demo", discovery: true, config });
  await feed("planted", service.url, "", "camera", KIND, 60, 3);
});

after(async () => {
  await browser?.close();
  await service?.stop();
});

const status = () => service.request("GET", "v1/streams/camera");

test("the overview shows decisions, scores, classes and unknown images, and explains one of them", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera");
  await page.getByText("Live").waitFor();
  await page.getByRole("img", { name: /^Histogram of the scores/ }).waitFor();
  await page.getByRole("img", { name: /^Known, unsure and unknown decisions/ }).waitFor();
  const { sequence } = await status();
  await page.getByText(`Last ${sequence} decisions, one bar`).waitFor();
  await checkAccessibility(page);
  await page.getByRole("region", { name: "Recent unknown images" }).getByRole("button").first().click();
  const dialog = page.getByRole("dialog");
  await dialog.getByText("Best classes").waitFor();
  await checkAccessibility(page);
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  await page.setViewportSize({ width: 390, height: 800 });
  await checkWidth(page);
  assert.deepEqual(errors, []);
  await close();
});

test("an operator asks what the stream can and cannot decide", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera");
  const scores = page.getByRole("region", { name: "Scores" });
  await scores.getByRole("button", { name: "Check classes" }).click();
  await scores.getByText(/^If a class were missing from your list, about \d+ %/).waitFor();
  const { sentences } = await service.request("GET", "v1/streams/camera/diagnosis");
  assert.deepEqual(await scores.getByRole("listitem").allTextContents(), sentences);
  await scores.getByRole("button", { name: "Check again" }).waitFor();
  await checkAccessibility(page);
  if (process.env.PROTODCS_PICTURE) {
    await page.screenshot({ path: process.env.PROTODCS_PICTURE });
  }
  await page.setViewportSize({ width: 390, height: 800 });
  await checkWidth(page);
  assert.deepEqual(errors, []);
  await close();
});

test("a check that fails says so, and can be repeated", async () => {
  const { page, close } = await open(browser, service, "#/streams/camera");
  const failure = { status: 500, contentType: "application/problem+json", body: '{"detail": "No worker."}' };
  await page.route("**/diagnosis", (route) => route.fulfill(failure));
  await page.getByRole("button", { name: "Check classes" }).click();
  await page.getByText("No worker.").waitFor();
  await page.unroute("**/diagnosis");
  await page.getByRole("button", { name: "Check classes" }).click();
  await page.getByText(/^If a class were missing/).waitFor();
  await close();
});

test("a planted kind becomes a cluster, is named, and later images of it get the new class", async (context) => {
  const { share: earlier } = await feed("recognised", service.url, "", "camera", KIND, 30, 99);
  const { page, errors, close } = await open(browser, service, "#/streams/camera/clusters");
  const card = page.locator(".clusters > li").first();
  await card.getByRole("button", { name: "Name" }).waitFor();
  assert.equal(await page.locator(".clusters .no-image").count(), 0, "a sample of a cluster has no image");
  await checkAccessibility(page);
  // The kind is in some clusters, by colour.
  for (const box of await page.getByRole("checkbox", { name: /^Select/ }).all()) {
    await box.check();
  }
  await page.getByRole("button", { name: /^Merge \d clusters/ }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Merge" }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  await page.getByText(/ 1 cluster\.$/).waitFor();
  await card.getByRole("button", { name: "Name" }).click();
  await page.getByLabel("Name", { exact: true }).fill(KIND);
  const preview = page.getByText(/^Of the last \d+ samples, \d+ would become clock, 0 of them known today\.$/);
  await preview.waitFor();
  const would = Number(/, (\d+) would/.exec((await preview.textContent()) ?? "")?.[1]);
  assert.ok(would >= 40, `the preview shows ${would} of 60 images`);
  await checkAccessibility(page);
  await page.getByRole("dialog").getByRole("button", { name: "Add class" }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  assert.ok((await status()).classes.includes(KIND));
  const { share } = await feed("recognised", service.url, "", "camera", KIND, 30, 99);
  context.diagnostic(`share of new images with the name ${KIND}: ${earlier} before, ${share} after`);
  assert.equal(earlier, 0);
  assert.ok(share >= 0.7, `only ${share} of the new images get the new class`);
  await page.getByRole("button", { name: "Undo" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  assert.ok(!(await status()).classes.includes(KIND));
  assert.deepEqual(errors, []);
  await close();
});

test("samples are reviewed with the keyboard, and answers can be undone, also sent ones", async () => {
  const queue = async () => (await service.request("GET", "v1/streams/camera/review?limit=30")).items;
  const before = await queue();
  const { page, errors, close } = await open(browser, service, "#/streams/camera/review");
  await page.getByText("Sample 1 of").waitFor();
  await checkAccessibility(page);
  await page.keyboard.press("u");
  await page.getByText("Sample 2 of").waitFor();
  await page.keyboard.press("z");
  await page.getByText("Sample 1 of").waitFor();
  await page.keyboard.press("/");
  await page.keyboard.type("umbr");
  await page.keyboard.press("Enter");
  await page.getByText("Sample 2 of").waitFor();
  await page.keyboard.press("s");
  await page.getByText("Sample 3 of").waitFor();
  await page.keyboard.press("Enter");
  await page.getByText("1 answer sent.").waitFor();
  const left = (await queue()).map(({ position }) => position);
  assert.ok(!left.includes(before[0].position), "the answered sample is still in the queue");
  assert.ok(left.includes(before[1].position), "the skipped sample is gone");
  await page.keyboard.press("z");
  await page.getByText("Sample 3 of").waitFor();
  const withdrawn = page.waitForResponse((response) => response.request().method() === "DELETE");
  await page.keyboard.press("z");
  await page.getByText("Sample 1 of").waitFor();
  await withdrawn;
  assert.ok(
    (await queue()).some(({ position }) => position === before[0].position),
    "the answer was not withdrawn",
  );
  assert.deepEqual(errors, []);
  await close();
});

test("after an answer and a skip, undo goes back to the sample of the answer", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera/review");
  await page.getByText("Sample 1 of").waitFor();
  const pressed = async (/** @type {string} */ key, /** @type {number} */ sample) => {
    await page.keyboard.press(key);
    await page.getByText(`Sample ${sample} of`).waitFor();
  };
  await pressed("Enter", 2);
  await pressed("s", 3);
  await pressed("z", 1);
  assert.equal(await page.getByRole("button", { name: /^Undo/ }).count(), 0);
  assert.deepEqual(errors, []);
  await close();
});

test("Enter confirms the next sample after a class was clicked", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera/review");
  /** @type {{position: number, label: string | null}[]} */
  const sent = [];
  await page.route("**/feedback", (route) => {
    sent.push(route.request().postDataJSON());
    return route.fulfill({ json: {} });
  });
  const { items } = await service.request("GET", "v1/streams/camera/review?limit=30");
  await page.getByText("Sample 1 of").waitFor();
  const second = page.getByRole("group", { name: "Classes" }).getByRole("button", { name: /^2 / });
  const other = ((await second.textContent()) ?? "").slice(2);
  await second.click();
  await page.getByText("Sample 2 of").waitFor();
  await page.keyboard.press("Enter");
  await page.getByText("Sample 3 of").waitFor();
  await page.getByText("2 answers sent.").waitFor();
  assert.deepEqual(sent, [
    { position: items[0].position, label: other },
    { position: items[1].position, label: items[1].label },
  ]);
  assert.deepEqual(errors, []);
  await close();
});

test("an answer that fails once stays, and is sent again", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera/review");
  const busy = {
    status: 503,
    contentType: "application/problem+json",
    body: '{"detail": "The worker is restarting."}',
  };
  await page.route("**/feedback", (route) => route.fulfill(busy));
  await page.getByText("Sample 1 of").waitFor();
  await page.keyboard.press("u");
  await page.getByText("Sample 2 of").waitFor();
  await page.keyboard.press("u");
  await page.getByText("1 answer could not be sent: The worker is restarting.").waitFor();
  await page.getByText("Sample 3 of").waitFor();
  await checkAccessibility(page);
  await page.unroute("**/feedback");
  await page.getByRole("button", { name: "Send again" }).click();
  await page.getByText("2 answers sent.").waitFor();
  await page.getByText("could not be sent").waitFor({ state: "detached" });
  assert.deepEqual(
    errors.filter((text) => !text.includes("503")),
    [],
  );
  await close();
});

test("an operator searches the log, sees why an image was decided so, and corrects a known one", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera/decisions");
  const tiles = page.locator(".decisions > li");
  await tiles.first().waitFor();
  await page.getByLabel("Outcome").selectOption("known");
  await page.getByLabel("Search the log").fill("umbrella");
  await page.getByLabel("Search the log").press("Enter");
  await page.waitForURL(/outcome=known&q=umbrella/);
  await page.waitForFunction(() =>
    [...document.querySelectorAll(".decisions strong")].every((label) => label.textContent === "umbrella"),
  );
  await checkAccessibility(page);
  await tiles.first().getByRole("button").click();
  const dialog = page.getByRole("dialog");
  await dialog.getByText(/^The score of .* is above the threshold of .*: umbrella stands out/).waitFor();
  await dialog.getByRole("img", { name: /^The score of this sample is/ }).waitFor();
  await dialog.getByRole("heading", { name: "Similar images that are known" }).waitFor();
  await checkAccessibility(page);
  await dialog.getByRole("button", { name: "unknown", exact: true }).click();
  await dialog.getByText("Corrected: it is unknown.").waitFor();
  await dialog.getByText(/is below the threshold/).waitFor();
  await page.keyboard.press("Escape");
  await page.getByLabel("Corrected", { exact: true }).selectOption("yes");
  await tiles.getByText("corrected").first().waitFor();
  await page.setViewportSize({ width: 390, height: 800 });
  await checkWidth(page);
  assert.deepEqual(errors, []);
  await close();
});

test("the page of the demo says what is happening, and compares with the truth", async () => {
  await feed("story", service.url, "", "camera", 90, 4);
  const { page, errors, close } = await open(browser, service, "#/streams/camera/demo");
  await page.getByText("Fog comes in 11 images.").waitFor();
  await page.getByRole("img", { name: /^Share of right decisions among the last 60 images/ }).waitFor();
  const row = page.getByRole("row", { name: /^Unknown found/ });
  assert.match((await row.textContent()) ?? "", /\d+ of \d+/);
  await checkAccessibility(page);
  await page.setViewportSize({ width: 390, height: 800 });
  await checkWidth(page);
  assert.deepEqual(errors, []);
  await close();
});

test("a stream is rolled back after a preview, and reset only after its name was typed", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera");
  const saved = (await status()).sequence;
  await page.getByRole("button", { name: "Save snapshot" }).click();
  await page.getByLabel("Name").fill("good");
  await page.getByRole("dialog").getByRole("button", { name: "Save" }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  await page.getByRole("img", { name: /Snapshot good\./ }).waitFor();
  await page.getByRole("region", { name: "Snapshots" }).getByText(`${saved} samples`).waitFor();
  await feed("demo", service.url, "", "camera", 6, 8);
  await page.getByRole("button", { name: "Roll back" }).click();
  await page.getByRole("row", { name: `Samples ${saved + 6} ${saved}` }).waitFor();
  await checkAccessibility(page);
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  assert.equal((await status()).sequence, saved);
  await page.getByRole("button", { name: "Reset" }).click();
  const reset = page.getByRole("dialog").getByRole("button", { name: "Reset" });
  assert.ok(await reset.isDisabled());
  await page.getByLabel("Type camera to confirm").fill("camera");
  await reset.click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
  assert.equal((await status()).sequence, 0);
  assert.deepEqual(errors, []);
  await close();
});

test("after the service was killed and started again, the page shows each decision once", async () => {
  const { page, errors, close } = await open(browser, service, "#/streams/camera");
  await feed("demo", service.url, "", "camera", 4, 5);
  await page.getByText("Live").waitFor();
  await service.kill();
  await page.getByText(/^Reconnecting/).waitFor();
  await service.resume();
  await feed("demo", service.url, "", "camera", 5, 6);
  await page.getByText("Live").waitFor();
  const { items } = await service.request("GET", "v1/streams/camera/decisions?limit=1000");
  await page.getByText(`Last ${items.length} decisions, one bar`).waitFor();
  const { sequence } = await status();
  await page.waitForFunction(
    ([selector, expected]) => document.querySelector(selector)?.firstChild?.textContent === expected,
    [".tile dd", String(sequence)],
  );
  assert.deepEqual(
    errors.filter((text) => !text.includes("ERR_")),
    [],
  );
  await close();
});
