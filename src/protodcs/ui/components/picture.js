/** The thumbnail of a sample, or a place that says that there is none. */

import { address, streamPath } from "../api.js";
import { useState } from "../vendor/hooks.js";
import { h } from "../vendor/preact.js";

/** @param {{id: string, position: number, exists: boolean}} props */
export function Picture({ id, position, exists }) {
  // A key may be allowed to see decisions and no images.
  const [failed, setFailed] = useState(false);
  return exists && !failed
    ? h("img", {
        src: address(streamPath(id, `/decisions/${position}/thumbnail`)),
        alt: `Sample ${position}`,
        loading: "lazy",
        width: 96,
        height: 96,
        onError: () => setFailed(true),
      })
    : h("span", { class: "no-image" }, "no image");
}
