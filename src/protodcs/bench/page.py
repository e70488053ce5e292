"""One self-contained HTML page: style inside, pictures inside, nothing fetched from anywhere.

It handles layout only. `html.escape` is applied to every text.
"""

import base64
import html
from collections.abc import Iterable

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --wash: #f5f6f8; --line: #d6dae0; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --soft: #a3acb7; --paper: #14171b; --wash: #1d2127; --line: #363d47; --link: #7db7f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem clamp(0.8rem, 3vw, 2rem) 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.4rem 0; }
.lead { font-size: 1.08rem; max-width: 60rem; }
p, li, dd { max-width: 50rem; }
code { font: 0.86em/1.4 ui-monospace, "SF Mono", Consolas, monospace; background: var(--wash); padding: 0.1em 0.3em; border-radius: 3px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: 0.25rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0 1.8rem; }
figure.table figcaption { font-weight: 600; margin-bottom: 0.35rem; }
figure.table ul { margin: 0.4rem 0; padding-left: 1.1rem; color: var(--soft); font-size: 0.84rem; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.86rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 0.32rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--wash); font-weight: 600; vertical-align: bottom; white-space: normal; }
thead th.group { text-align: center; white-space: normal; min-width: 12rem; border-left: 1px solid var(--line); }
tr > :first-child { position: sticky; left: 0; text-align: left; background: var(--paper); font-weight: 500; min-width: 11rem; max-width: 15rem; white-space: normal;
  border-right: 1px solid var(--line); z-index: 1; }
thead tr > :first-child { background: var(--wash); }
tbody tr:hover > * { background: var(--wash); }
.half { color: var(--soft); font-size: 0.84em; font-weight: 400; margin-left: 0.25em; }
.card { background: #ffffff; border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem; overflow-x: auto; }
.card img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
figure.picture figcaption { font-size: 0.88rem; color: var(--soft); margin-top: 0.4rem; max-width: 56rem; overflow-wrap: anywhere; }
figure.picture figcaption b { color: var(--ink); }
details { margin: 0.5rem 0; } summary { cursor: pointer; color: var(--link); }
main > details { border-top: 1px solid var(--line); padding: 0.5rem 0 0; }
main > details > summary { font-size: 1.1rem; font-weight: 600; }
details details { margin-left: 0.6rem; }
pre { background: var(--wash); padding: 0.6rem; border-radius: 6px; overflow-x: auto; font-size: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { font-size: 15px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 0.5rem; }
  th, td { padding: 0.28rem 0.45rem; } tr > :first-child { min-width: 7.5rem; max-width: 8.5rem; }
  .card img.wide { max-width: none; width: 640px; }
}
@media print { .scroll, .card { overflow: visible; border: 0; } details > * { display: block; } }
"""  # noqa: E501
# Pictures wider than this scroll on a telephone rather than shrink until nobody can read them.
_WIDE = 640


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are ready HTML."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p></header>\n'
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    """A paragraph; what stands between backticks is shown as code."""
    return f"<p>{coded(text)}</p>"


def coded(text: str) -> str:
    """Escaped text in which backticks mark code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what they are."""
    inside = "".join(f"<dt>{html.escape(name)}</dt><dd>{coded(value)}</dd>" for name, value in pairs)
    return f"<dl>{inside}</dl>"


def folded(summary: str, parts: Iterable[str]) -> str:
    """Parts that a reader opens on demand."""
    return f"<details><summary>{html.escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


def raw(text: str) -> str:
    """Text as it stands, in a fixed width."""
    return f"<pre>{html.escape(text)}</pre>"


def picture(name: str, title: str, caption: str, png: bytes) -> str:
    """A picture on a white card, with its caption."""
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    data = base64.b64encode(png).decode()
    shown = f'class="wide" width="{width}" height="{height}"' if width > _WIDE else f'width="{width}" height="{height}"'
    return (
        f'<figure class="picture" id="{html.escape(name)}"><div class="card" tabindex="0">'
        f'<img {shown} alt="{html.escape(title)}" src="data:image/png;base64,{data}"></div>'
        f"<figcaption><b>{html.escape(title)}.</b> {html.escape(caption)}</figcaption></figure>"
    )
