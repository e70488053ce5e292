/** Sign in with an API key. The service answers with a cookie that scripts cannot read. */

import { request } from "../api.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/**
 * @param {{expired: boolean, onSignedIn: () => void}} props
 */
export function SignIn({ expired, onSignedIn }) {
  const [key, setKey] = useState("");
  const [failure, setFailure] = useState("");
  const [busy, setBusy] = useState(false);
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => field.current?.focus(), []);
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setFailure("");
    try {
      await request("POST", "v1/session", { headers: { Authorization: `Bearer ${key.trim()}` } });
      setKey("");
      onSignedIn();
    } catch (problem) {
      const error = /** @type {import("../api.js").ApiError} */ (problem);
      setFailure(error.status === 401 ? "This key is unknown, expired or revoked." : error.message);
    }
    setBusy(false);
  };
  return h(
    "main",
    { class: "sign-in" },
    h("h1", null, "Sign in to ProtoDCS"),
    expired && h("p", { class: "notice", role: "status" }, "Your session has ended. Sign in again."),
    h(
      "form",
      { onSubmit: submit },
      h("label", { for: "key" }, "API key"),
      h("input", {
        id: "key",
        ref: field,
        type: "password",
        autocomplete: "current-password",
        placeholder: "pdcs_…",
        required: true,
        value: key,
        onInput: (/** @type {any} */ event) => setKey(event.target.value),
      }),
      failure && h("p", { class: "failure", role: "alert" }, failure),
      h("button", { type: "submit", class: "primary", disabled: busy }, busy ? "Signing in…" : "Sign in"),
    ),
    h("p", { class: "hint" }, "An administrator creates keys with ", h("code", null, "protodcs keys create"), "."),
  );
}
