/** Clusters: unknown images that look alike. Name them, merge, split, dismiss, or assign them to a class. */

import { get, may, post, request, streamPath } from "../api.js";
import { Confirm } from "../components/dialog.js";
import { ImagesAllowed, ImagesHint, Picture } from "../components/picture.js";
import { Empty, Failure, Loading, Pill } from "../components/states.js";
import { count, decimal, quantity } from "../logic/format.js";
import { linkTo } from "../navigation.js";
import { usePolling } from "../polling.js";
import { useContext, useEffect, useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @typedef {import("../api.js").StreamStatus} StreamStatus */

/**
 * @typedef {object} Cluster
 * @property {number} id
 * @property {string | null} name
 * @property {number} size
 * @property {number} similarity
 * @property {number[]} positions of its samples, the most typical first
 */

/** @typedef {{samples: number, would_change: number, known_today: number, positions: number[]}} ClassPreview */

const PERIOD = 5;
/** Milliseconds until the clusters are loaded again while a clustering pass is under way. */
const SOON = 1000;
const SHOWN = 24;
const PREVIEWED = 12;
/** Milliseconds after the last letter of a name. */
const PREVIEW_WAIT = 300;
/** Clusters with fewer images, or whose images resemble each other less, are shown last. */
const CLEAR = 0.5;
const LARGE = 15;

/**
 * @param {{status: StreamStatus, session: import("../api.js").Session, reloadStatus: () => void}} props
 */
export function Clusters({ status, session, reloadStatus }) {
  const { id } = status;
  const { data, error, reload } = usePolling((signal) => load(id, signal), PERIOD, [id]);
  useEffect(() => {
    const timer = data?.updating ? setTimeout(reload, SOON) : undefined;
    return () => clearTimeout(timer);
  }, [data]);
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
  const { clusters, stored, updating, hasThumbnails } = data;
  const selected = clusters.filter((cluster) => merged.has(cluster.id));
  const done = () => {
    setMerged(new Set());
    reload();
    reloadStatus();
  };
  const isClass = (/** @type {Cluster} */ { name }) => name !== null && status.classes.includes(name);
  const open = clusters.filter((cluster) => !isClass(cluster)).sort((a, b) => b.similarity - a.similarity);
  /** @type {[string, Cluster[]][]} */
  const groups = [
    ["", open.filter(isClear)],
    ["Small or less clear", open.filter((cluster) => !isClear(cluster))],
    ["Classes by now", clusters.filter(isClass)],
  ];
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
    clusters.length === 0 &&
      (updating
        ? h(Loading, { what: "clusters" })
        : h(Empty, { title: "There are no clusters yet" }, "A cluster appears when enough unknown images look alike.")),
    groups.map(
      ([title, members]) =>
        members.length > 0 &&
        h(
          "section",
          { key: title, "aria-label": title || "Clear clusters" },
          title && h("h2", null, title),
          h(
            "ul",
            { class: "clusters" },
            members.map((cluster) =>
              h(ClusterCard, {
                key: cluster.id,
                id,
                cluster,
                hasThumbnails,
                edits,
                admin: may(session, "admin"),
                isClass: isClass(cluster),
                merging: merged.has(cluster.id),
                toggle: () => setMerged(toggled(merged, cluster.id)),
                ask: (action) => setAsked({ action, clusters: [cluster] }),
              }),
            ),
          ),
        ),
    ),
    asked && h(Edit, { status, question: asked, done, onClose: () => setAsked(null) }),
  );
}

/** @param {Cluster} cluster */
const isClear = ({ similarity, size }) => similarity >= CLEAR && size >= LARGE;

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
  const [found, newest] = await Promise.all([
    /** @type {Promise<{clusters: Cluster[], stored: number, updating: boolean}>} */ (
      get(streamPath(id, "/clusters?wait=false"), signal)
    ),
    get(streamPath(id, "/decisions?limit=1"), signal),
  ]);
  return { ...found, hasThumbnails: newest.items[0]?.has_thumbnail ?? false };
}

/**
 * @param {{id: string, cluster: Cluster, hasThumbnails: boolean, edits: boolean, admin: boolean, isClass: boolean,
 *   merging: boolean, toggle: () => void, ask: (action: Question["action"]) => void}} props
 */
function ClusterCard({ id, cluster, hasThumbnails, edits, admin, isClass, merging, toggle, ask }) {
  const title = cluster.name ?? `Cluster ${cluster.id}`;
  const images = useContext(ImagesAllowed);
  const button = (/** @type {Question["action"]} */ action, /** @type {string} */ label, kind = "") =>
    h("button", { type: "button", class: kind, onClick: () => ask(action) }, label);
  return h(
    "li",
    { class: "panel", "aria-label": title },
    h(
      "header",
      null,
      h(
        "span",
        null,
        edits &&
          !isClass &&
          h("input", { type: "checkbox", "aria-label": `Select ${title}`, checked: merging, onChange: toggle }),
        " ",
        h("strong", null, title),
        " ",
        isClass && h(Pill, { kind: "known" }, "class"),
      ),
      h("span", { class: "hint" }, `${quantity(cluster.size, "image")}, similarity ${decimal(cluster.similarity)}`),
    ),
    images &&
      h(
        "ul",
        { class: "thumbnails" },
        cluster.positions
          .slice(0, SHOWN)
          .map((position) => h("li", { key: position }, h(Picture, { id, position, exists: hasThumbnails }))),
      ),
    images && cluster.size > SHOWN && h("p", { class: "hint" }, `and ${count(cluster.size - SHOWN)} more`),
    isClass
      ? h(
          "div",
          { class: "actions" },
          h("a", { href: `${linkTo(id, "decisions")}?class=${encodeURIComponent(title)}` }, "Its decisions"),
          admin && button("undo", "Undo"),
        )
      : edits &&
          h(
            "div",
            { class: "actions" },
            admin && button("name", "Name", "primary"),
            button("assign", "Is a class…"),
            button("split", "Split"),
            button("dismiss", "Dismiss"),
          ),
  );
}

/**
 * What the new class would change, asked a moment after the last letter.
 * @param {{status: StreamStatus, cluster: Cluster, name: string}} props
 */
function Preview({ status, cluster, name }) {
  const [found, setFound] = useState(/** @type {ClassPreview | null} */ (null));
  const [failure, setFailure] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    setFailure("");
    const ask = () =>
      get(streamPath(status.id, `/clusters/${cluster.id}/preview?name=${encodeURIComponent(name)}`), stop.signal).then(
        setFound,
        (problem) => stop.signal.aborted || setFailure(problem.message),
      );
    const timer = setTimeout(ask, PREVIEW_WAIT);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [status.id, cluster.id, name]);
  if (failure) {
    return h("p", { class: "failure", role: "alert" }, failure);
  }
  return h(
    "div",
    { class: "class-preview", role: "status" },
    found === null
      ? h("p", { class: "hint" }, "Trying it on recent samples…")
      : [
          h(
            "p",
            { key: "text" },
            `Of the last ${quantity(found.samples, "sample")}, ${count(found.would_change)} would become ${name}, ${count(found.known_today)} of them known today.`,
          ),
          h(
            "ul",
            { key: "images", class: "thumbnails" },
            found.positions
              .slice(0, PREVIEWED)
              .map((position) => h("li", { key: position }, h(Picture, { id: status.id, position, exists: true }))),
          ),
        ],
  );
}

/** @typedef {{action: "name" | "undo" | "assign" | "split" | "dismiss" | "merge", clusters: Cluster[]}} Question */

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
      await post(streamPath(status.id, `/clusters/${cluster.id}:add-class`), { name: text.trim() });
    } else if (action === "undo") {
      await request("DELETE", streamPath(status.id, `/classes/${encodeURIComponent(cluster.name ?? "")}`));
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
      action: "Add class",
      children: [
        h(
          "p",
          null,
          "The stream gets a class of this name, made of these images. Later images that look like them get it.",
        ),
        h("label", { for: "name" }, "Name"),
        h("input", { id: "name", value: text, required: true, maxLength: 200, onInput: write }),
        text.trim() !== "" && h(Preview, { status, cluster, name: text.trim() }),
      ],
    },
    undo: {
      title: `Remove the class ${cluster.name}?`,
      action: "Remove",
      children: h("p", null, "Its images are unknown again. The cluster stays."),
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
