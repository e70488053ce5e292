// Turn the LaTeX formulas of a page into MathML, without a server.
for (const element of document.querySelectorAll(".arithmatex")) {
  const latex = element.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
  temml.render(latex, element, { displayMode: element.tagName === "DIV" });
}
