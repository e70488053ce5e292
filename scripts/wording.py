"""Measure how easy the documentation is to read, and find private words.

    python scripts/wording.py                     # figures for README and docs
    python scripts/wording.py --sentences 40      # and 40 random sentences
    python scripts/wording.py --words             # every private word in documentation and code, with its line

Sentences come from paragraphs and list items. Tables, headings, code and generated pages do not count.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LONG = 25
_WORDS = Path(__file__).with_name("private_words.txt")

_FENCE = re.compile(r"^(\s*)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")
_LINK = re.compile(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])")
_TAG = re.compile(r"<[^>]+>")
_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`\[])")
_TOKEN = re.compile(r"[A-Za-z0-9][\w'./%-]*")
_VOWELS = re.compile(r"[aeiouy]+")
# Full stops that end no sentence.
_ABBREVIATIONS = (("e.g.", "eg"), ("i.e.", "ie"), ("etc.", "etc"), ("vs.", "vs"))


class Figures(NamedTuple):
    """Readability of some text."""

    words: int
    sentences: int
    long: float
    private: float
    flesch: float

    def __str__(self) -> str:
        return (
            f"{self.words:7,} words {self.sentences:6,} sentences {self.long:5.1%} above {LONG} words "
            f"{self.private:5.2f} private words per 1,000  Flesch {self.flesch:4.1f}"
        )


class Finding(NamedTuple):
    """A private word in a file."""

    file: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}. Use: {self.instead}"


def sentences(markdown: str) -> list[str]:
    """Return the sentences in the prose of a Markdown text."""
    return [sentence for block in _blocks(markdown) for sentence in _split(block)]


def _blocks(markdown: str) -> Iterator[str]:
    """Yield paragraphs and list items, without markup."""
    block: list[str] = []
    in_list = False
    for line in [*_FENCE.sub("\n", markdown).splitlines(), ""]:
        item = _ITEM.match(line)
        is_code = line.startswith("    ") and not in_list and not item
        is_markup = line.lstrip().startswith(("|", "#", ":::", "--8<--", "!!!", "???", "===", "![", "<")) or is_code
        if not line.strip() or is_markup or item:
            if block:
                yield " ".join(block)
            block = []
        if item:
            in_list = True
            block = [line[item.end() :]]
        elif line.strip() and not is_markup:
            in_list = in_list and line.startswith(" ")
            block.append(line.strip())


def _split(block: str) -> Iterator[str]:
    text = _TAG.sub("", _LINK.sub(r"\1", block)).replace("**", "")
    for written, replaced in _ABBREVIATIONS:
        text = text.replace(written, replaced)
    for sentence in _END.split(text):
        if len(_TOKEN.findall(sentence)) > 2:
            yield sentence.strip()


def syllables(word: str) -> int:
    """Return about how many syllables an English word has."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    if not letters:
        return 1
    count = len(_VOWELS.findall(letters)) - letters.endswith("e") + letters.endswith(("le", "ee"))
    return max(1, count)


def figures(texts: Iterable[str]) -> Figures:
    """Return the readability of some Markdown texts together."""
    texts = list(texts)
    found = [sentence for text in texts for sentence in sentences(text)]
    counts = [len(_TOKEN.findall(sentence)) for sentence in found]
    words = [word for sentence in found for word in _TOKEN.findall(sentence)]
    private = sum(len(pattern.findall(sentence.lower())) for sentence in found for pattern, _ in private_words())
    total = max(1, len(words))
    flesch = 206.835 - 1.015 * total / max(1, len(found)) - 84.6 * sum(map(syllables, words)) / total
    long = sum(count > LONG for count in counts) / max(1, len(found))
    return Figures(len(words), len(found), long, 1000 * private / total, flesch)


@cache
def private_words() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns in `private_words.txt`, each with what to write instead."""
    lines = (line for line in _WORDS.read_text().splitlines() if line and not line.startswith("#"))
    return [(re.compile(pattern), instead) for pattern, instead in (re.split(r"\s{2,}", line) for line in lines)]


def documents(root: Path = ROOT) -> list[Path]:
    """Return the pages that people read. Tables of results that programs write are left out."""
    pages = [page for page in sorted((root / "docs").rglob("*.md")) if len(page.relative_to(root / "docs").parts) < 4]
    generated = [page for page in pages if page.parent.parent.name == "results"]
    return [root / "README.md", root / "CONTRIBUTING.md", *(page for page in pages if page not in generated)]


def in_document(file: Path) -> Iterator[Finding]:
    """Yield the private words in a Markdown file."""
    yield from _in_lines(file, enumerate(file.read_text().splitlines(), start=1))


def in_code(file: Path) -> Iterator[Finding]:
    """Yield the private words in docstrings, comments and names of a Python file."""
    source = file.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _in_lines(file, [(token.start[0], token.string)])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = getattr(node, "lineno", 1)
            yield from _in_lines(file, [(line, ast.get_docstring(node) or "")])
        for name in _names(node):
            yield from _in_lines(file, [(getattr(node, "lineno", 1), _as_words(name))])


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node introduces."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def _as_words(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ")


def _in_lines(file: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    for number, line in lines:
        for pattern, instead in private_words():
            for match in pattern.finditer(line.lower()):
                yield Finding(file, number, match[0], instead)


def main() -> None:
    """Print the figures, and what else was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--pages", action="store_true", help="print a line per page")
    parser.add_argument("--sentences", type=int, default=0, help="print this many random sentences")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sentences (default: 0)")
    parser.add_argument("--words", action="store_true", help="print every private word in documentation and code")
    options = parser.parse_args()
    pages = documents(options.root)
    for page in pages if options.pages else ():
        print(figures([page.read_text()]), page.relative_to(options.root))
    print(figures(page.read_text() for page in pages))
    everything = [sentence for page in pages for sentence in sentences(page.read_text())]
    for sentence in random.Random(options.seed).sample(everything, options.sentences):
        print("-", sentence)
    if options.words:
        code = sorted((options.root / "src").rglob("*.py"))
        for found in [*(f for page in pages for f in in_document(page)), *(f for file in code for f in in_code(file))]:
            print(found._replace(file=found.file.relative_to(options.root)))


if __name__ == "__main__":
    main()
