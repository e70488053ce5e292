/** A real service, a real browser, and checks that hold for every page: no console error and no outside request. */

import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { promisify } from "node:util";
import { chromium } from "playwright-core";

const PYTHON = process.env.PROTODCS_PYTHON ?? "python3";
const BROWSER = process.env.PROTODCS_CHROMIUM ?? "/usr/bin/chromium";
const FEED = new URL("../feed.py", import.meta.url).pathname;
const AXE = new URL("../node_modules/axe-core/axe.min.js", import.meta.url);
/** Only for hangs. */
export const HANG = 120_000;

const run = promisify(execFile);

async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(undefined)));
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  await new Promise((resolve) => server.close(resolve));
  return port;
}

/** Run a command of feed.py. */
export async function feed(...given) {
  const { stdout } = await run(PYTHON, ["-W", "ignore", FEED, ...given.map(String)], { maxBuffer: 2 ** 24 });
  return JSON.parse(stdout);
}

/** `protodcs serve` in one process. */
export class Service {
  static async start({ keys = false, encoder = true } = {}) {
    const service = new Service();
    service.folder = await mkdtemp(join(tmpdir(), "protodcs-ui-"));
    service.port = await freePort();
    service.url = `http://127.0.0.1:${service.port}`;
    service.options = ["--port", String(service.port), "--store", `sqlite:${service.folder}/streams`, "--json"];
    if (encoder) {
      service.options.push("--encoder", "demo");
    }
    if (keys) {
      service.keys = await feed("keys", service.folder);
      service.options.push("--keys", service.keys.file);
    }
    await service.resume();
    return service;
  }

  async resume() {
    const child = spawn(PYTHON, ["-W", "ignore", "-m", "protodcs", "serve", ...this.options], {
      cwd: this.folder,
      stdio: ["ignore", "pipe", "inherit"],
    });
    this.process = child;
    const lines = createInterface({ input: child.stdout });
    await new Promise((resolve, reject) => {
      lines.on("line", (line) => line.includes('"serving"') && resolve(undefined));
      child.on("exit", (code) => reject(new Error(`the service ended with ${code}`)));
    });
  }

  async kill() {
    const ended = new Promise((resolve) => this.process.on("exit", resolve));
    this.process.kill("SIGKILL");
    await ended;
  }

  async stop() {
    const ended = new Promise((resolve) => this.process.on("exit", resolve));
    this.process.kill("SIGTERM");
    await ended;
    await rm(this.folder, { recursive: true, force: true });
  }

  /** Send a request without the browser. */
  async request(method, path, body, key) {
    const headers = {
      ...(body ? { "Content-Type": "application/json" } : {}),
      ...(key ? { Authorization: `Bearer ${key}` } : {}),
    };
    const response = await fetch(`${this.url}/${path}`, { method, headers, body: body && JSON.stringify(body) });
    assert.ok(response.ok, `${method} ${path}: ${response.status}`);
    return response.status === 204 ? null : response.json();
  }
}

export async function launch() {
  return chromium.launch({ executablePath: BROWSER, args: ["--no-sandbox", "--enable-precise-memory-info"] });
}

/**
 * Open a page of the UI.
 * @param {import("playwright-core").Browser} browser
 * @param {Service} service
 * @param {string} fragment such as "#/streams/camera"
 * @param {object} [options] of the browser context
 */
export async function open(browser, service, fragment = "", options = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, ...options });
  context.setDefaultTimeout(HANG);
  const page = await context.newPage();
  /** @type {string[]} */
  const errors = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(error.message));
  page.on(
    "request",
    (request) => request.url().startsWith(service.url) || errors.push(`outside request: ${request.url()}`),
  );
  await page.goto(`${service.url}/ui/${fragment}`);
  return { page, errors, close: () => context.close() };
}

/** Fail on serious and critical findings of axe-core. The policy of the page forbids script tags, so it is evaluated. */
export async function checkAccessibility(page) {
  await page.evaluate(await readFile(AXE, "utf8"));
  const { violations } = await page.evaluate(() => /** @type {any} */ (globalThis).axe.run());
  const found = violations
    .filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => node.html)}`);
  assert.deepEqual(found, []);
}

/** Fail if a page stays wider than its window. Charts follow the window after a moment. */
export async function checkWidth(page) {
  const widths = () => page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  let [content, view] = await widths();
  for (let tries = 0; content > view && tries < 100; tries++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    [content, view] = await widths();
  }
  assert.ok(content <= view, `the page is ${content} pixels wide in a window of ${view}`);
}
