// Sort the tables of figures by a click on a heading: largest first, smallest first, and as written.
const ORDERS = ["descending", "ascending", "none"];
/** Characters of a figure with its interval, at most. Longer cells are text. */
const LONGEST = 30;

/** Return the first number of a cell, or null. */
function numberOf(text) {
  const found = /^[^\d(]*?(-?[\d,]*\.?\d+)/.exec(text.replace("−", "-"));
  return found ? Number(found[1].replaceAll(",", "")) : null;
}

function sort(table, column, order, rows) {
  const keys = new Map(
    rows.map((row) => {
      const text = row.cells[column]?.textContent.trim() ?? "";
      return [row, { text, number: numberOf(text) }];
    }),
  );
  const numeric = [...keys.values()].some(({ number }) => number !== null);
  const sign = order === "descending" ? -1 : 1;
  const compare = (first, second) => {
    const [a, b] = [keys.get(first), keys.get(second)];
    if (!numeric) {
      return -sign * a.text.localeCompare(b.text);
    }
    // Cells without a number are last in both orders.
    return a.number === null || b.number === null
      ? (a.number === null) - (b.number === null)
      : sign * (a.number - b.number);
  };
  table.tBodies[0].append(...(order === "none" ? rows : rows.toSorted(compare)));
}

if (location.pathname.includes("/results/")) {
  for (const table of document.querySelectorAll(".md-content table:not([class])")) {
    const rows = [...(table.tBodies[0]?.rows ?? [])];
    if (rows.length < 3 || !table.tHead) {
      continue;
    }
    for (const cell of rows.flatMap((row) => [...row.cells])) {
      const text = cell.textContent.trim();
      cell.classList.toggle("figure", /^[-+−\d]/.test(text) && text.length <= LONGEST);
    }
    const headings = [...table.tHead.rows[0].cells].filter((heading) => heading.textContent.trim() !== "");
    for (const heading of headings) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...heading.childNodes);
      heading.append(button);
      heading.ariaSort = "none";
      button.addEventListener("click", () => {
        const order = ORDERS[(ORDERS.indexOf(heading.ariaSort) + 1) % ORDERS.length];
        for (const other of headings) {
          other.ariaSort = "none";
        }
        heading.ariaSort = order;
        sort(table, heading.cellIndex, order, rows);
      });
    }
  }
}
