// Typeset formulas, also after instant navigation.
window.MathJax = { tex: { inlineMath: [["\\(", "\\)"]] }, options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex" } };
