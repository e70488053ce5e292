"""A table as data, and its four faces: HTML, Markdown, LaTeX and CSV.

In the first three a share is shown in percent with two decimals; in CSV it stays a share from 0 to 1, with the ends of
its interval in columns of their own. Every text is escaped here, whoever wrote it.
"""

import csv
import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .statistics import Estimate

DASH = "-"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of samples from 0 to 1, over seeds; `bold` if nothing beats it; `signed` if it is a difference."""

    of: Estimate
    bold: bool = False
    signed: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number with its decimals, such as seconds."""

    value: float
    decimals: int = 2
    note: str = ""


Cell = str | Share | Number


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: above it.
        columns: heads; `groups` are wider heads above them: text and how many columns, together all of them.
        rows: as many cells each as there are columns.
        notes: below it, whole sentences; marked ones begin with their mark.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    groups: Sequence[tuple[str, int]] = ()

    def heads(self) -> Iterator[str]:
        """One text for each column, with its group in front."""
        spread = [text for text, width in self.groups for _ in range(width)] or [""] * len(self.columns)
        return (f"{group}: {column}" if group else column for group, column in zip(spread, self.columns, strict=True))


def percent(cell: Cell) -> tuple[str, str]:
    """A figure and what follows it: half its interval, if it has one."""
    if isinstance(cell, str):
        return cell or DASH, ""
    if isinstance(cell, Number):
        return (DASH if math.isnan(cell.value) else f"{cell.value:,.{cell.decimals}f}"), ""
    if math.isnan(cell.of.mean):
        return DASH, ""
    # Negative zero is zero.
    mean = round(100 * cell.of.mean, 2) + 0.0
    return f"{mean:{'+' if cell.signed else ''}.2f}", f"{100 * cell.of.half:.2f}" if cell.of.has_interval else ""


def _note(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell.note


def _is_bold(cell: Cell) -> bool:
    return isinstance(cell, Share) and cell.bold


def to_markdown(table: Table) -> str:
    """As GitHub reads it."""

    def shown(cell: Cell) -> str:
        mean, half = percent(cell)
        text = _markdown(mean) + (f" ± {half}" if half else "")
        return (f"**{text}**" if _is_bold(cell) else text) + (f" ({_note(cell)})" if _note(cell) else "")

    lines = [f"**{_markdown(table.title)}**", "", "| " + " | ".join(_markdown(head) for head in table.heads()) + " |"]
    lines.append("|" + "|".join("---" if not place else "---:" for place in range(len(table.columns))) + "|")
    lines += ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in table.rows]
    lines += [""] + [f"- {_markdown(note)}" for note in table.notes] if table.notes else []
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def to_latex(table: Table) -> str:
    """A table environment; needs the package booktabs."""

    def shown(cell: Cell) -> str:
        mean, half = percent(cell)
        text = escape_latex(mean) + (f"$\\,\\pm\\,{half}$" if half else "")
        mark = f"\\textsuperscript{{{escape_latex(_note(cell))}}}" if _note(cell) else ""
        return (f"\\textbf{{{text}}}" if _is_bold(cell) else text) + mark

    width = len(table.columns)
    lines = ["\\begin{table}", "  \\centering", "  \\small", "  \\setlength{\\tabcolsep}{4pt}"]
    lines += [f"  \\caption{{{escape_latex(table.title)}}}", f"  \\label{{tab:{table.name}}}"]
    lines += [f"  \\begin{{tabular}}{{l{'r' * (width - 1)}}}", "    \\toprule"]
    if table.groups:
        wide = [f"\\multicolumn{{{count}}}{{c}}{{{escape_latex(text)}}}" for text, count in table.groups]
        lines.append("    " + " & ".join(wide) + r" \\")
    lines.append("    " + " & ".join(escape_latex(column) for column in table.columns) + r" \\")
    lines.append("    \\midrule")
    lines += ["    " + " & ".join(shown(cell) for cell in row) + r" \\" for row in table.rows]
    lines.append("    \\bottomrule")
    for note in table.notes:
        lines.append(f"    \\multicolumn{{{width}}}{{p{{0.9\\linewidth}}}}{{\\footnotesize {escape_latex(note)}}} \\\\")
    return "\n".join([*lines, "  \\end{tabular}", "\\end{table}"]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    **{sign: "\\" + sign for sign in "&%$#_"},
}


def escape_latex(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> print(escape_latex("50 % of a_b & {c}"))
    50 \% of a\_b \& \{c\}
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)


def to_csv(table: Table) -> str:
    """Shares as shares, with low and high beside them where a column has intervals."""
    columns: list[str] = []
    picks: list[tuple[int, str]] = []
    for place, arrowed in enumerate(table.heads()):
        head = arrowed.removesuffix(" ↑").removesuffix(" ↓")
        cells = [row[place] for row in table.rows]
        columns.append(head)
        picks.append((place, "mean"))
        if any(isinstance(cell, Share) and cell.of.has_interval for cell in cells):
            columns += [f"{head} low", f"{head} high"]
            picks += [(place, "low"), (place, "high")]
    return write_csv(columns, ([_raw(row[place], end) for place, end in picks] for row in table.rows))


def _raw(cell: Cell, end: str) -> str | float:
    if isinstance(cell, str):
        return cell if end == "mean" else ""
    value = cell.value if isinstance(cell, Number) else getattr(cell.of, end)
    return "" if math.isnan(value) else value


def write_csv(columns: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """Comma-separated lines under a head."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return sink.getvalue()


def to_html(table: Table) -> str:
    """A figure element; wide tables scroll inside it."""

    def shown(cell: Cell, place: int) -> str:
        mean, half = percent(cell)
        text = html.escape(mean) + (f'<span class="half">&#177;&#8239;{half}</span>' if half else "")
        text = f"<strong>{text}</strong>" if _is_bold(cell) else text
        text += f"<sup>{html.escape(_note(cell))}</sup>" if _note(cell) else ""
        return f'<th scope="row">{text}</th>' if not place else f"<td>{text}</td>"

    lines = [
        f'<figure class="table" id="{html.escape(table.name)}"><figcaption>{html.escape(table.title)}</figcaption>'
    ]
    lines.append('<div class="scroll" tabindex="0"><table><thead>')
    if table.groups:
        kinds = ((' class="group"' if text else "", text, count) for text, count in table.groups)
        wide = (f'<th colspan="{count}"{kind}>{html.escape(text)}</th>' for kind, text, count in kinds)
        lines.append("<tr>" + "".join(wide) + "</tr>")
    heads = (html.escape(head).replace(" ↑", "&nbsp;↑").replace(" ↓", "&nbsp;↓") for head in table.columns)
    lines.append("<tr>" + "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr>")
    lines.append("</thead><tbody>")
    lines += ["<tr>" + "".join(shown(cell, place) for place, cell in enumerate(row)) + "</tr>" for row in table.rows]
    lines.append("</tbody></table></div>")
    if table.notes:
        lines.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in table.notes) + "</ul>")
    return "\n".join([*lines, "</figure>"])
