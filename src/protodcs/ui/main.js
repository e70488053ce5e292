/** Start the UI: session, theme, and the view of the address. */

import { get, onSessionEnd, request } from "./api.js";
import { ImagesAllowed } from "./components/picture.js";
import { Failure, Loading } from "./components/states.js";
import { usePlace } from "./navigation.js";
import { useCallback, useEffect, useState } from "./vendor/hooks.js";
import { h, render } from "./vendor/preact.js";
import { SignIn } from "./views/sign_in.js";
import { StreamView } from "./views/stream.js";
import { Streams } from "./views/streams.js";

/** @typedef {import("./api.js").Session} Session */
/** @typedef {import("./api.js").ApiError} ApiError */

const THEMES = /** @type {const} */ (["auto", "light", "dark"]);
const RETRY_SECONDS = 3;
/** A session is renewed each time that it is looked at. */
const RENEW_SECONDS = 300;

function App() {
  const [session, setSession] = useState(/** @type {Session | null} */ (null));
  const [ended, setEnded] = useState(/** @type {"" | "none" | "expired"} */ (""));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const place = usePlace();

  const load = useCallback(async () => {
    try {
      setSession(await get("v1/session"));
      setEnded("");
      setError(null);
    } catch (problem) {
      const failure = /** @type {ApiError} */ (problem);
      if (failure.status === 401) {
        setEnded((before) => before || "none");
      } else {
        setError(failure);
        setTimeout(load, RETRY_SECONDS * 1000);
      }
    }
  }, []);
  useEffect(() => {
    onSessionEnd(() => setEnded("expired"));
    load();
    const timer = setInterval(load, RENEW_SECONDS * 1000);
    return () => clearInterval(timer);
  }, [load]);
  useEffect(() => {
    document.title = place.stream === null ? "Streams – ProtoDCS" : `${place.stream} – ProtoDCS`;
  }, [place.stream]);

  const signOut = async () => {
    await request("DELETE", "v1/session").catch(() => null);
    setSession(null);
    setEnded("none");
  };
  if (ended !== "") {
    return h(SignIn, { expired: ended === "expired", onSignedIn: load });
  }
  if (session === null) {
    return h("main", null, error ? h(Failure, { error }) : h(Loading, { what: "ProtoDCS" }));
  }
  return h(
    ImagesAllowed.Provider,
    { value: session.images },
    h(
      "div",
      { class: "page" },
      h(Header, { session, signOut }),
      place.stream === null
        ? h(Streams, { session, query: place.query })
        : h(StreamView, { key: place.stream, id: place.stream, tab: place.tab, query: place.query, session }),
    ),
  );
}

/**
 * @param {{session: Session, signOut: () => void}} props
 */
function Header({ session, signOut }) {
  const [theme, setTheme] = useState(readTheme);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto";
  return h(
    "header",
    { class: "top" },
    h("a", { class: "brand", href: "#/" }, h("img", { src: "icon.svg", alt: "", width: 22, height: 22 }), "ProtoDCS"),
    h("span", { class: "gap" }),
    session.key_id && h("span", { class: "who" }, `${session.tenant} · ${session.role}`),
    h(
      "button",
      { type: "button", class: "quiet", title: `Use the ${next} theme`, onClick: () => setTheme(next) },
      `Theme: ${theme}`,
    ),
    session.key_id && h("button", { type: "button", class: "quiet", onClick: signOut }, "Sign out"),
  );
}

/** @returns {(typeof THEMES)[number]} */
function readTheme() {
  const stored = localStorage.getItem("theme");
  return THEMES.find((theme) => theme === stored) ?? "auto";
}

const root = document.getElementById("app");
if (root) {
  root.textContent = "";
  render(h(App, {}), root);
}
