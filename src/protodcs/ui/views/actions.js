/** Actions on a stream. Each asks before it changes anything. */

import { get, post, request, streamPath } from "../api.js";
import { Confirm } from "../components/dialog.js";
import { count, decimal, percent, quantity } from "../logic/format.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {{status: StreamStatus, onClose: () => void, done: () => void}} DialogProps */

/** @type {Record<string, (props: DialogProps) => any>} */
const DIALOGS = {
  acknowledge: Acknowledge,
  freeze: Freeze,
  snapshot: SaveSnapshot,
  rollback: RollBack,
  classes: EditClasses,
  reset: Reset,
};

/**
 * @param {{status: StreamStatus, reload: () => void}} props
 */
export function Actions({ status, reload }) {
  const [open, setOpen] = useState("");
  const labels = {
    ...(status.warning ? { acknowledge: "Acknowledge" } : {}),
    freeze: status.frozen ? "Unfreeze" : "Freeze",
    snapshot: "Save snapshot",
    rollback: "Roll back",
    classes: "Edit classes",
    reset: "Reset",
  };
  const dialog = DIALOGS[open];
  const show = (/** @type {string} */ name) => {
    // What a dialog says about the stream must be up to date.
    reload();
    setOpen(name);
  };
  return h(
    "div",
    { class: "actions", role: "group", "aria-label": "Actions" },
    Object.entries(labels).map(([name, label]) =>
      h("button", { key: name, type: "button", onClick: () => show(name) }, label),
    ),
    dialog && h(dialog, { status, onClose: () => setOpen(""), done: reload }),
  );
}

/** @param {DialogProps} props */
function Freeze({ status, onClose, done }) {
  const action = status.frozen ? "unfreeze" : "freeze";
  return h(
    Confirm,
    {
      title: `${status.frozen ? "Unfreeze" : "Freeze"} ${status.id}?`,
      action: status.frozen ? "Unfreeze" : "Freeze",
      run: () => post(streamPath(status.id, `/${action}`)).then(done),
      onClose,
    },
    h("p", null, status.frozen ? "The stream learns again." : "The stream goes on deciding and stops learning."),
  );
}

/** @param {DialogProps} props */
function Acknowledge({ status, onClose, done }) {
  return h(
    Confirm,
    {
      title: "Acknowledge the warning?",
      action: "Acknowledge",
      run: () => post(streamPath(status.id, "/acknowledge")).then(done),
      onClose,
    },
    h("p", null, "It ends, and what the latest images show counts as usual. The stream goes on as before."),
  );
}

/** @param {DialogProps} props */
function SaveSnapshot({ status, onClose, done }) {
  // Not by the number of samples: more arrive before it is saved. The Swedish form begins with the year.
  const [name, setName] = useState(() => new Date().toLocaleString("sv"));
  return h(
    Confirm,
    {
      title: "Save a snapshot",
      action: "Save",
      ready: name.trim() !== "",
      run: () => post(streamPath(status.id, "/snapshots"), { name: name.trim() }).then(done),
      onClose,
    },
    h("p", null, "It stores what the stream has learned until then."),
    h("label", { for: "snapshot" }, "Name"),
    h("input", {
      id: "snapshot",
      value: name,
      maxLength: 200,
      required: true,
      onInput: (/** @type {any} */ event) => setName(event.target.value),
    }),
  );
}

/** @param {DialogProps} props */
function RollBack({ status, onClose, done }) {
  const [names, setNames] = useState(/** @type {string[] | null} */ (null));
  const [name, setName] = useState("");
  useEffect(() => {
    get(streamPath(status.id, "/snapshots")).then(
      ({ snapshots }) => {
        setNames(snapshots.toReversed());
        setName(snapshots.at(-1) ?? "");
      },
      () => setNames([]),
    );
  }, [status.id]);
  return h(
    Confirm,
    {
      title: `Roll back ${status.id}?`,
      action: "Roll back",
      destructive: true,
      ready: name !== "",
      run: () => post(streamPath(status.id, "/rollback"), { name }).then(done),
      onClose,
    },
    names !== null && names.length === 0
      ? h("p", null, "No snapshot was saved, so there is nothing to go back to.")
      : [
          h("label", { for: "snapshot" }, "Snapshot"),
          h(
            "select",
            { id: "snapshot", value: name, onChange: (/** @type {any} */ event) => setName(event.target.value) },
            (names ?? []).map((one) => h("option", { key: one, value: one }, one)),
          ),
          h("p", null, "The stream forgets what it learned after this snapshot. Its past decisions stay in the log."),
          name !== "" && h(Preview, { status, name }),
        ],
  );
}

/**
 * What a roll-back changes.
 * @param {{status: StreamStatus, name: string}} props
 */
function Preview({ status, name }) {
  const [found, setFound] = useState(/** @type {any} */ (null));
  useEffect(() => {
    setFound(null);
    get(streamPath(status.id, `/snapshots/${encodeURIComponent(name)}`)).then(setFound, () => setFound({}));
  }, [status.id, name]);
  if (found === null) {
    return h("p", { class: "hint" }, "Loading the preview…");
  }
  if (!found.stats) {
    return h("p", { class: "hint" }, "This snapshot cannot be described.");
  }
  const rows = [
    ["Samples", count(status.sequence), count(found.sequence)],
    ["Threshold", decimal(status.stats.threshold), decimal(found.stats.threshold)],
    ["Share of unknown, estimate", percent(status.stats.share_unknown), percent(found.stats.share_unknown)],
    ["Learning", status.frozen ? "frozen" : "on", found.frozen ? "frozen" : "on"],
    ["Classes", count(status.classes.length), count(found.classes.length)],
  ];
  const lost = status.classes.filter((one) => !found.classes.includes(one));
  const back = found.classes.filter((/** @type {string} */ one) => !status.classes.includes(one));
  return h(
    "div",
    null,
    h(
      "table",
      { class: "preview" },
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          ["", "Now", "After"].map((text) => h("th", { key: text, scope: "col" }, text)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map(([label, now, after]) =>
          h(
            "tr",
            { key: label, class: now === after ? "" : "changed" },
            h("th", { scope: "row" }, label),
            h("td", null, now),
            h("td", null, after),
          ),
        ),
      ),
    ),
    lost.length > 0 && h("p", { class: "notice" }, `Classes that go: ${lost.join(", ")}`),
    back.length > 0 && h("p", { class: "notice" }, `Classes that come back: ${back.join(", ")}`),
  );
}

/** @param {{status: StreamStatus}} props */
function Facts({ status }) {
  return h(
    "p",
    { class: "hint" },
    `Now: ${count(status.sequence)} samples, threshold ${decimal(status.stats.threshold)}, ${percent(status.unknown_rate)} unknown among the last 100.`,
  );
}

/** @param {DialogProps} props */
function Reset({ status, onClose, done }) {
  const [typed, setTyped] = useState("");
  return h(
    Confirm,
    {
      title: `Reset ${status.id}?`,
      action: "Reset",
      destructive: true,
      ready: typed === status.id,
      run: () => post(streamPath(status.id, "/reset")).then(done),
      onClose,
    },
    h("p", null, `The stream forgets everything that it learned from ${count(status.sequence)} samples.`),
    h(Facts, { status }),
    h("label", { for: "confirm" }, `Type ${status.id} to confirm`),
    h("input", {
      id: "confirm",
      value: typed,
      autocomplete: "off",
      onInput: (/** @type {any} */ event) => setTyped(event.target.value),
    }),
  );
}

/** @param {DialogProps} props */
function EditClasses({ status, onClose, done }) {
  const [added, setAdded] = useState("");
  const [removed, setRemoved] = useState(/** @type {Set<string>} */ (new Set()));
  const names = added
    .split(",")
    .map((name) => name.trim())
    .filter(Boolean);
  const run = async () => {
    for (const name of names) {
      await post(streamPath(status.id, "/classes"), { name });
    }
    for (const name of removed) {
      await request("DELETE", streamPath(status.id, `/classes/${encodeURIComponent(name)}`));
    }
    done();
  };
  const toggle = (/** @type {string} */ name) => {
    const after = new Set(removed);
    after.delete(name) || after.add(name);
    setRemoved(after);
  };
  return h(
    Confirm,
    {
      title: "Edit classes",
      action: removed.size > 0 ? `Remove ${quantity(removed.size, "class", "classes")}` : "Add",
      destructive: removed.size > 0,
      ready: names.length + removed.size > 0 && removed.size < status.classes.length,
      run,
      onClose,
    },
    h("label", { for: "added" }, "Add classes, separated by commas"),
    h("input", { id: "added", value: added, onInput: (/** @type {any} */ event) => setAdded(event.target.value) }),
    h("strong", null, "Remove classes"),
    h(
      "div",
      { class: "choices" },
      status.classes.map((name) =>
        h(
          "label",
          { key: name },
          h("input", { type: "checkbox", checked: removed.has(name), onChange: () => toggle(name) }),
          name,
        ),
      ),
    ),
    removed.size > 0 && h("p", { class: "notice" }, `Samples of ${[...removed].join(", ")} will be unknown.`),
  );
}
