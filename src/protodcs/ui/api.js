/** Requests to the service. All paths are relative to the page, so that the UI works behind a path prefix. */

import { seconds } from "./logic/format.js";

/** @typedef {import("./logic/problems.js").Row} Row */

/** @typedef {"read" | "observe" | "admin"} Role */
/** @typedef {{tenant: string | null, role: Role, images: boolean, key_id: string | null,
 *   expires: string | number | null}} Session `images`: whether thumbnails may be seen */

/**
 * The status of a stream.
 * @typedef {object} StreamStatus
 * @property {string} id
 * @property {string} method
 * @property {string[]} classes
 * @property {string | null} vocabulary
 * @property {string} created
 * @property {string | null} last_seen
 * @property {number | null} unknown_rate
 * @property {number | null} usual_unknown_rate
 * @property {string | null} guard_reason
 * @property {string | null} warning
 * @property {string | null} problem
 * @property {boolean} frozen
 * @property {number} sequence
 * @property {number} position
 * @property {string} incarnation
 * @property {{state: string, events?: GuardEvent[], windows?: number}} guard
 * @property {Record<string, any>} stats
 */

/** @typedef {{guard: string, action: string, position: number, window: number, value: number, threshold: number}} GuardEvent */

const ROOT = "../";

/** A response that is not a success. `status` is 0 if the service cannot be reached. */
export class ApiError extends Error {
  /** @param {number} status @param {string} code @param {string} message */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  get unreachable() {
    return this.status === 0 || this.status === 502 || this.status === 503 || this.status === 504;
  }
}

/** Called for each response 401: the session has ended. @type {() => void} */
let sessionEnded = () => {};

/** @param {() => void} listener */
export function onSessionEnd(listener) {
  sessionEnded = listener;
}

/**
 * Send a request and return the body of the response. Raise ApiError unless it succeeds.
 * @param {string} method
 * @param {string} path such as "v1/streams"
 * @param {{body?: unknown, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  /** @type {RequestInit} */
  const init = { method, headers: { ...headers }, signal: signal ?? null, credentials: "same-origin" };
  if (body instanceof Blob) {
    init.body = body;
  } else if (body !== undefined) {
    init.body = JSON.stringify(body);
    init.headers = { "Content-Type": "application/json", ...headers };
  }
  let response;
  try {
    response = await fetch(ROOT + path, init);
  } catch (problem) {
    if (signal?.aborted) {
      throw problem;
    }
    throw new ApiError(0, "unreachable", "The service cannot be reached.");
  }
  if (!response.ok) {
    const problem = await response.json().catch(() => ({}));
    if (response.status === 401 && path !== "v1/session") {
      sessionEnded();
    }
    const message = problem.detail ?? problem.title ?? `The service responded with ${response.status}.`;
    throw new ApiError(response.status, problem.code ?? "", message);
  }
  return response.status === 204 ? null : response.json();
}

/** @param {string} path @param {AbortSignal} [signal] */
export const get = (path, signal) => request("GET", path, signal ? { signal } : {});

/** @param {string} path @param {unknown} [body] */
export const post = (path, body) => request("POST", path, body === undefined ? {} : { body });

/** Return the path of a stream in the API. @param {string} id @param {string} [rest] */
export const streamPath = (id, rest = "") => `v1/streams/${encodeURIComponent(id)}${rest}`;

/** Return the address of a file for `<img>`. @param {string} path */
export const address = (path) => ROOT + path;

const PAGE = 1000;

/**
 * Return all streams of the caller.
 * @param {AbortSignal} signal
 * @returns {Promise<Row[]>}
 */
export async function listStreams(signal) {
  /** @type {Row[]} */
  const rows = [];
  let cursor = null;
  do {
    const page = await get(`v1/streams?limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`, signal);
    for (const stream of page.streams) {
      rows.push(asRow(stream));
    }
    cursor = page.next_cursor;
  } while (cursor);
  return rows;
}

/** @param {any} stream a stream of the API @returns {Row} */
export function asRow(stream) {
  return {
    id: stream.id,
    created: seconds(stream.created) ?? 0,
    lastSeen: seconds(stream.last_seen),
    frozen: stream.frozen,
    unknownRate: stream.unknown_rate,
    usualRate: stream.usual_unknown_rate ?? null,
    guard: stream.guard_reason ?? null,
    warning: stream.warning ?? null,
    problem: stream.problem ?? null,
  };
}

/** @param {Session} session @param {Role} role */
export function may(session, role) {
  const roles = ["read", "observe", "admin"];
  return roles.indexOf(session.role) >= roles.indexOf(role);
}
