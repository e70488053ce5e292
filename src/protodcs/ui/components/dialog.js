/** Dialogs over the page: a native `<dialog>`, which keeps the focus and closes with Escape. */

import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/**
 * @param {{title: string, onClose: () => void, wide?: boolean, children?: any}} props
 */
export function Dialog({ title, onClose, wide = false, children }) {
  const element = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    element.current?.showModal();
  }, []);
  return h(
    "dialog",
    { ref: element, onClose, class: wide ? "wide" : "", "aria-label": title },
    h(
      "header",
      null,
      h("h2", null, title),
      h(
        "button",
        { type: "button", class: "quiet", "aria-label": "Close", onClick: () => element.current?.close() },
        "✕",
      ),
    ),
    children,
  );
}

/**
 * Ask before an action, run it, and show what failed.
 * @param {{title: string, action: string, destructive?: boolean, ready?: boolean, run: () => Promise<unknown>,
 *   onClose: () => void, children?: any}} props
 */
export function Confirm({ title, action, destructive = false, ready = true, run, onClose, children }) {
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const confirm = async (/** @type {Event} */ event) => {
    event.preventDefault();
    if (busy || !ready) {
      return;
    }
    setBusy(true);
    setFailure("");
    try {
      await run();
      onClose();
    } catch (problem) {
      setFailure(/** @type {Error} */ (problem).message);
      setBusy(false);
    }
  };
  return h(
    Dialog,
    { title, onClose },
    h(
      "form",
      { onSubmit: confirm },
      children,
      failure && h("p", { class: "failure", role: "alert" }, failure),
      h(
        "footer",
        null,
        h("button", { type: "button", onClick: onClose }, "Cancel"),
        h(
          "button",
          { type: "submit", class: destructive ? "destructive" : "primary", disabled: busy || !ready },
          busy ? "Working…" : action,
        ),
      ),
    ),
  );
}
