import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { checkAccessibility, feed, launch, open, Service } from "./harness.js";

/** @type {Service} */ let service;
/** @type {import("playwright-core").Browser} */ let browser;

before(async () => {
  [service, browser] = await Promise.all([Service.start({ keys: true }), launch()]);
  await feed("create", service.url, service.keys.admin, "camera-1");
});

after(async () => {
  await browser?.close();
  await service?.stop();
});

async function signIn(page, key) {
  await page.getByLabel("API key").fill(key);
  await page.getByRole("button", { name: "Sign in" }).click();
}

/** Chromium reports each response with an error as a console error; those that a test expects are left out. */
const unexpected = (errors) => errors.filter((text) => !/status of 40[134]/.test(text));

test("a wrong key is rejected, and the right one opens the table", async () => {
  const { page, errors, close } = await open(browser, service);
  await page.getByRole("heading", { name: "Sign in to ProtoDCS" }).waitFor();
  await checkAccessibility(page);
  await signIn(page, "pdcs_wrong_key");
  await page.getByText("This key is unknown, expired or revoked.").waitFor();
  await signIn(page, service.keys.admin);
  await page.getByRole("link", { name: "camera-1" }).waitFor();
  await page.reload();
  await page.getByRole("link", { name: "camera-1" }).waitFor();
  assert.equal(await page.evaluate(() => document.cookie), "");
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByRole("heading", { name: "Sign in to ProtoDCS" }).waitFor();
  assert.deepEqual(unexpected(errors), []);
  await close();
});

test("a read-only key sees no actions", async () => {
  const { page, errors, close } = await open(browser, service);
  await signIn(page, service.keys.reader);
  await page.getByRole("link", { name: "camera-1" }).waitFor();
  assert.equal(await page.getByRole("checkbox").count(), 0);
  await page.getByRole("link", { name: "camera-1" }).click();
  await page.getByRole("heading", { name: "camera-1" }).waitFor();
  for (const name of ["Freeze", "Save snapshot", "Roll back", "Edit classes", "Reset"]) {
    assert.equal(await page.getByRole("button", { name }).count(), 0, name);
  }
  assert.deepEqual(unexpected(errors), []);
  await close();
});

test("only a key for images shows thumbnails", async () => {
  await feed("demo", service.url, service.keys.admin, "camera-1", 120, 8);
  for (const [key, images] of /** @type {[string, boolean][]} */ ([
    [service.keys.reader, false],
    [service.keys.viewer, true],
  ])) {
    const { page, errors, close } = await open(browser, service);
    await signIn(page, key);
    await page.getByRole("link", { name: "camera-1" }).click();
    const unknown = page.getByRole("region", { name: "Recent unknown images" });
    await unknown.getByRole("button").first().waitFor();
    if (images) {
      await page.waitForFunction(() => document.querySelector(".thumbnails img")?.naturalWidth > 0);
    }
    assert.equal((await unknown.getByRole("img").count()) > 0, images);
    assert.equal((await unknown.getByText("Images are hidden").count()) > 0, !images);
    assert.deepEqual(unexpected(errors), []);
    assert.ok(!errors.some((text) => text.includes("403")), "the page asked for an image that it may not see");
    await close();
  }
});

test("a stream of another tenant is not shown and cannot be reached", async () => {
  const { page, close } = await open(browser, service);
  await signIn(page, service.keys.rival);
  await page.getByText("There are no streams yet").waitFor();
  await page.goto(`${service.url}/ui/#/streams/camera-1`);
  await page.getByText("There is no stream “camera-1”").waitFor();
  await close();
});

test("a session that has ended leads back to the sign-in page", async () => {
  const { page, close } = await open(browser, service);
  await signIn(page, service.keys.admin);
  await page.getByRole("link", { name: "camera-1" }).waitFor();
  await page.context().clearCookies();
  await page.getByText("Your session has ended. Sign in again.").waitFor();
  await signIn(page, service.keys.admin);
  await page.getByRole("link", { name: "camera-1" }).waitFor();
  await close();
});
