/** Clusters: unknown images that look alike. Name them, merge, split, dismiss, or assign them to a class. */

import { get, may, post, streamPath } from "../api.js";
import { Confirm } from "../components/dialog.js";
import { ImagesAllowed, ImagesHint, Picture } from "../components/picture.js";
import { Empty, Failure, Loading, Pill } from "../components/states.js";
import { count, decimal, quantity } from "../logic/format.js";
import { asDecision } from "../logic/history.js";
import { usePolling } from "../polling.js";
import { useContext, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */
/** @typedef {import("../logic/history.js").Decision} Decision */

/**
 * @typedef {object} Cluster
 * @property {number} id
 * @property {string | null} name
 * @property {number} size
 * @property {number} similarity
 * @property {number[]} positions of its samples, the most typical first
 */

const PERIOD = 5;
const SHOWN = 10;

/**
 * @param {{status: StreamStatus, session: import("../api.js").Session, reloadStatus: () => void}} props
 */
export function Clusters({ status, session, reloadStatus }) {
  const { id } = status;
  const { data, error, reload } = usePolling((signal) => load(id, signal), PERIOD, [id]);
  const [merged, setMerged] = useState(/** @type {Set<number>} */ (new Set()));
  const [asked, setAsked] = useState(/** @type {Question | null} */ (null));
  const edits = may(session, "observe");

  if (data === null) {
    return error?.status === 409 || error?.status === 422
      ? h(Empty, { title: "This stream stores no samples" }, error.message)
      : error
        ? h(Failure, { error, retry: reload })
        : h(Loading, { what: "clusters" });
  }
  const { clusters, stored, samples } = data;
  const selected = clusters.filter((cluster) => merged.has(cluster.id));
  const done = () => {
    setMerged(new Set());
    reload();
    reloadStatus();
  };
  return h(
    "div",
    null,
    h(
      "div",
      { class: "toolbar" },
      h(
        "p",
        { class: "hint" },
        `${quantity(stored, "unknown image")} stored, ${quantity(clusters.length, "cluster")}.`,
      ),
      h(ImagesHint, {}),
      edits &&
        selected.length > 1 &&
        h(
          "button",
          { type: "button", onClick: () => setAsked({ action: "merge", clusters: selected }) },
          `Merge ${selected.length} clusters`,
        ),
    ),
    clusters.length === 0
      ? h(Empty, { title: "There are no clusters yet" }, "A cluster appears when enough unknown images look alike.")
      : h(
          "ul",
          { class: "clusters" },
          clusters.map((cluster) =>
            h(ClusterCard, {
              key: cluster.id,
              id,
              cluster,
              samples,
              edits,
              names: may(session, "admin"),
              merging: merged.has(cluster.id),
              toggle: () => setMerged(toggled(merged, cluster.id)),
              ask: (action) => setAsked({ action, clusters: [cluster] }),
            }),
          ),
        ),
    asked && h(Edit, { status, question: asked, done, onClose: () => setAsked(null) }),
  );
}

/** @param {Set<number>} before @param {number} id */
function toggled(before, id) {
  const after = new Set(before);
  after.delete(id) || after.add(id);
  return after;
}

/**
 * @param {string} id
 * @param {AbortSignal} signal
 */
async function load(id, signal) {
  // Rejected samples close to the threshold are unsure.
  const [found, ...logs] = await Promise.all([
    /** @type {Promise<{clusters: Cluster[], stored: number}>} */ (get(streamPath(id, "/clusters"), signal)),
    get(streamPath(id, "/decisions?outcome=unknown&limit=1000"), signal),
    get(streamPath(id, "/decisions?outcome=unsure&limit=1000"), signal),
  ]);
  const items = logs.flatMap((log) => log.items);
  /** @type {Map<number, Decision>} */
  const samples = new Map(items.map((item) => [item.position, asDecision(item)]));
  return { ...found, samples };
}

/**
 * @param {{id: string, cluster: Cluster, samples: Map<number, Decision>, edits: boolean, names: boolean, merging: boolean,
 *   toggle: () => void, ask: (action: Question["action"]) => void}} props
 */
function ClusterCard({ id, cluster, samples, edits, names, merging, toggle, ask }) {
  const title = cluster.name ?? `Cluster ${cluster.id}`;
  const images = useContext(ImagesAllowed);
  return h(
    "li",
    { class: "panel full", "aria-label": title },
    h(
      "header",
      null,
      h(
        "span",
        null,
        edits && h("input", { type: "checkbox", "aria-label": `Select ${title}`, checked: merging, onChange: toggle }),
        " ",
        h("strong", null, title),
        " ",
        cluster.name && h(Pill, { kind: "known" }, "named"),
      ),
      h("span", { class: "hint" }, `${quantity(cluster.size, "image")}, similarity ${decimal(cluster.similarity)}`),
      edits &&
        h(
          "div",
          { class: "actions" },
          names && h("button", { type: "button", class: "primary", onClick: () => ask("name") }, "Name"),
          h("button", { type: "button", onClick: () => ask("assign") }, "Is a class…"),
          h("button", { type: "button", onClick: () => ask("split") }, "Split"),
          h("button", { type: "button", onClick: () => ask("dismiss") }, "Dismiss"),
        ),
    ),
    images &&
      h(
        "ul",
        { class: "thumbnails" },
        cluster.positions
          .slice(0, SHOWN)
          .map((position) =>
            h(
              "li",
              { key: position },
              h(Picture, { id, position, exists: samples.get(position)?.hasThumbnail ?? false }),
            ),
          ),
      ),
    images && cluster.size > SHOWN && h("p", { class: "hint" }, `and ${count(cluster.size - SHOWN)} more`),
  );
}

/** @typedef {{action: "name" | "assign" | "split" | "dismiss" | "merge", clusters: Cluster[]}} Question */

/**
 * @param {{status: StreamStatus, question: Question, done: () => void, onClose: () => void}} props
 */
function Edit({ status, question, done, onClose }) {
  const { action, clusters } = question;
  const cluster = /** @type {Cluster} */ (clusters[0]);
  const [text, setText] = useState(action === "name" ? (cluster.name ?? "") : (status.classes[0] ?? ""));
  const write = (/** @type {any} */ event) => setText(event.target.value);
  const title = cluster.name ?? `cluster ${cluster.id}`;
  const run = async () => {
    if (action === "name") {
      // A class of this name first, then the samples of the cluster as examples of it.
      await post(streamPath(status.id, "/classes"), { name: text.trim() });
      await post(streamPath(status.id, `/clusters/${cluster.id}:assign`), { label: text.trim() });
    } else {
      const path = action === "merge" ? "/clusters:merge" : `/clusters/${cluster.id}:${action}`;
      await post(streamPath(status.id, path), bodies[action]);
    }
    done();
  };
  const bodies = {
    assign: { label: text },
    split: undefined,
    dismiss: undefined,
    merge: { clusters: clusters.map((one) => one.id) },
  };
  const contents = {
    name: {
      title: `Name ${title}`,
      action: "Save",
      children: [
        h("p", null, "The stream gets a new class of this name. Later images that look like these get it."),
        h("label", { for: "name" }, "Name"),
        h("input", { id: "name", value: text, required: true, maxLength: 200, onInput: write }),
      ],
    },
    assign: {
      title: `${title} is a class that exists`,
      action: "Assign",
      children: [
        h("p", null, "Later images that look like these get this class."),
        h("label", { for: "class" }, "Class"),
        h(
          "select",
          { id: "class", value: text, onChange: write },
          status.classes.map((name) => h("option", { key: name, value: name }, name)),
        ),
      ],
    },
    split: { title: `Split ${title}?`, action: "Split", children: h("p", null, "It becomes two clusters.") },
    dismiss: {
      title: `Dismiss ${title}?`,
      action: "Dismiss",
      children: h("p", null, "It is not shown again, and neither are later images that look like these."),
    },
    merge: {
      title: `Merge ${clusters.length} clusters?`,
      action: "Merge",
      children: h("p", null, "They become one cluster, with the name of the first."),
    },
  };
  const content = contents[action];
  return h(
    Confirm,
    {
      title: content.title,
      action: content.action,
      destructive: action === "dismiss",
      ready: text.trim() !== "" || (action !== "name" && action !== "assign"),
      run,
      onClose,
    },
    content.children,
  );
}
