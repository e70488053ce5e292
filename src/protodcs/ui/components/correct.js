/** Correct a decision: choose what the image shows. The likely classes come first, the others by typing. */

import { post, streamPath } from "../api.js";
import { useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

const LIKELY = 5;

/**
 * @param {{id: string, position: number, classes: string[], likely: string[], done: (label: string | null) => void}} props
 */
export function Correct({ id, position, classes, likely, done }) {
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const say = async (/** @type {string | null} */ label) => {
    setBusy(true);
    setFailure("");
    try {
      await post(streamPath(id, "/feedback"), { position, label });
      done(label);
    } catch (problem) {
      setFailure(/** @type {Error} */ (problem).message);
    }
    setBusy(false);
  };
  return h(
    "div",
    { class: "correct", role: "group", "aria-label": "Correct this decision" },
    h("strong", null, "It is"),
    likely
      .slice(0, LIKELY)
      .map((name) => h("button", { key: name, type: "button", disabled: busy, onClick: () => say(name) }, name)),
    h("button", { type: "button", disabled: busy, onClick: () => say(null) }, "unknown"),
    h(ClassInput, { classes, choose: say }),
    failure && h("p", { class: "failure", role: "alert" }, failure),
  );
}

/**
 * A field that completes class names. A name is chosen with Enter, or as soon as it is complete by a click in its list.
 * @param {{classes: string[], choose: (name: string) => void}} props
 */
export function ClassInput({ classes, choose }) {
  const [text, setText] = useState("");
  const take = (/** @type {string} */ name) => {
    setText("");
    choose(name);
  };
  const typed = text.trim().toLowerCase();
  const found = classes.filter((name) => name.toLowerCase().startsWith(typed));
  return h(
    "form",
    {
      class: "class-input",
      onSubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        const exact = classes.find((name) => name.toLowerCase() === typed);
        const name = exact ?? (found.length === 1 ? found[0] : undefined);
        if (typed !== "" && name !== undefined) {
          take(name);
        }
      },
    },
    h("input", {
      list: "all-classes",
      "aria-label": "Another class",
      placeholder: "another class…",
      value: text,
      autocomplete: "off",
      onInput: (/** @type {any} */ event) => setText(event.target.value),
    }),
    h(
      "datalist",
      { id: "all-classes" },
      classes.map((name) => h("option", { key: name, value: name })),
    ),
  );
}
