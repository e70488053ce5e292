/** Webhooks: where the service sends notices of warnings and guards. */

import { get, post, request } from "../api.js";
import { Dialog } from "../components/dialog.js";
import { Failure, Loading } from "../components/states.js";
import { quantity } from "../logic/format.js";
import { useCallback, useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").ApiError} ApiError */
/** @typedef {{id: string, url: string, events: string[], streams: string[] | null, failed: number}} Webhook */

/** @type {[string, string][]} */
const EVENTS = [
  ["many_unknown", "unknown rate"],
  ["possible_shift", "shift"],
  ["guard", "guard"],
];

/** @param {{onClose: () => void}} props */
export function WebhooksDialog({ onClose }) {
  const [webhooks, setWebhooks] = useState(/** @type {Webhook[] | null} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [secret, setSecret] = useState("");
  const load = useCallback(() => {
    list().then(setWebhooks, setError);
  }, []);
  useEffect(load, [load]);
  const remove = (/** @type {string} */ id) => request("DELETE", `v1/webhooks/${id}`).then(load, setError);
  return h(
    Dialog,
    { title: "Webhooks", onClose, wide: true },
    h(
      "div",
      { class: "body" },
      h("p", { class: "hint" }, "The service sends a signed POST request when a warning begins or a guard acts."),
      error && h(Failure, { error }),
      webhooks === null && !error && h(Loading, { what: "webhooks" }),
      webhooks?.length === 0 && h("p", null, "There are no webhooks yet."),
      h(
        "ul",
        { class: "list" },
        (webhooks ?? []).map(({ id, url, events, streams, failed }) =>
          h(
            "li",
            { key: id },
            h("strong", null, url),
            h(
              "span",
              { class: "aside" },
              EVENTS.flatMap(([name, label]) => (events.includes(name) ? label : [])).join(", "),
            ),
            h("span", { class: "aside" }, streams === null ? "all streams" : quantity(streams.length, "stream")),
            failed > 0 && h("span", { class: "failure" }, `${quantity(failed, "delivery", "deliveries")} failed`),
            h("button", { type: "button", "aria-label": `Delete ${url}`, onClick: () => remove(id) }, "Delete"),
          ),
        ),
      ),
      secret !== "" &&
        h(
          "p",
          { class: "notice", role: "status" },
          "Copy the secret that signs the requests. It is not shown again: ",
          h("code", null, secret),
        ),
      h(NewWebhook, {
        created: (made) => {
          setSecret(made);
          load();
        },
      }),
    ),
  );
}

/** @returns {Promise<Webhook[]>} */
async function list() {
  const { webhooks } = await get("v1/webhooks");
  return Promise.all(
    webhooks.map(async (/** @type {Webhook} */ webhook) => {
      const { items } = await get(`v1/webhooks/${webhook.id}/dead-letters`);
      return { ...webhook, failed: items.length };
    }),
  );
}

/** @param {{created: (secret: string) => void}} props */
function NewWebhook({ created }) {
  const [url, setUrl] = useState("");
  const [events, setEvents] = useState(() => new Set(EVENTS.map(([name]) => name)));
  const [streams, setStreams] = useState("");
  const [failure, setFailure] = useState("");
  const toggle = (/** @type {string} */ name) => {
    const after = new Set(events);
    after.delete(name) || after.add(name);
    setEvents(after);
  };
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setFailure("");
    const names = streams
      .split(",")
      .map((name) => name.trim())
      .filter(Boolean);
    try {
      const { secret } = await post("v1/webhooks", {
        url: url.trim(),
        events: [...events],
        streams: names.length > 0 ? names : null,
      });
      setUrl("");
      created(secret);
    } catch (problem) {
      setFailure(/** @type {Error} */ (problem).message);
    }
  };
  return h(
    "form",
    { onSubmit: submit },
    h("label", { for: "webhook-url" }, "New webhook"),
    h("input", {
      id: "webhook-url",
      type: "url",
      required: true,
      placeholder: "https://example.org/hook",
      value: url,
      onInput: (/** @type {any} */ event) => setUrl(event.target.value),
    }),
    h(
      "div",
      { class: "choices" },
      EVENTS.map(([name, label]) =>
        h(
          "label",
          { key: name },
          h("input", { type: "checkbox", checked: events.has(name), onChange: () => toggle(name) }),
          label,
        ),
      ),
    ),
    h("label", { for: "webhook-streams" }, "Only these streams, separated by commas (empty: all)"),
    h("input", {
      id: "webhook-streams",
      value: streams,
      onInput: (/** @type {any} */ event) => setStreams(event.target.value),
    }),
    failure && h("p", { class: "failure", role: "alert" }, failure),
    h(
      "footer",
      null,
      h("button", { type: "submit", class: "primary", disabled: url.trim() === "" || events.size === 0 }, "Create"),
    ),
  );
}
