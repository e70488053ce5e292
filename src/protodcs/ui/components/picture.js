/** The thumbnail of a sample, a place that says that there is none, or nothing if the session may not see images. */

import { address, streamPath } from "../api.js";
import { useContext, useState } from "../vendor/hooks.js";
import { createContext, h } from "../vendor/preact.js";

/** Whether the session may see images. */
export const ImagesAllowed = createContext(true);

/** @param {{id: string, position: number, exists: boolean}} props */
export function Picture({ id, position, exists }) {
  const allowed = useContext(ImagesAllowed);
  const [failed, setFailed] = useState(false);
  if (!allowed) {
    return null;
  }
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

/** Says why a view has no images, if the session may not see them. */
export function ImagesHint() {
  return useContext(ImagesAllowed)
    ? null
    : h("span", { class: "hint" }, "Images are hidden: your key or the service does not allow them.");
}
