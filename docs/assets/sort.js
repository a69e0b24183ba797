// Tables with a header sort by a click on a column: by number where every cell begins with one, else by words. Pages that
// wish it have an element of class "sortable" around the table.
"use strict";
(() => {
  const text = (row, column) => row.cells[column]?.textContent.trim() ?? "";
  const number = (word) => (word === "-" ? -Infinity : parseFloat(word.replaceAll(",", "")));

  function sort(table, column, descending) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const numeric = rows.every((row) => !Number.isNaN(number(text(row, column))));
    rows.sort((a, b) => {
      const [x, y] = [text(a, column), text(b, column)];
      const order = numeric ? number(x) - number(y) || 0 : x.localeCompare(y);
      return descending ? -order : order;
    });
    body.append(...rows);
    return numeric;
  }

  function prepare(table) {
    [...table.tHead.rows[0].cells].forEach((head, column, heads) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = [...table.tBodies[0].rows].every((row) => !Number.isNaN(number(text(row, column))));
        const descending = head.ariaSort === null ? first : head.ariaSort === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.ariaSort = descending ? "descending" : "ascending";
        sort(table, column, descending);
      });
    });
  }

  document.querySelectorAll(".sortable table").forEach((table) => table.tHead && prepare(table));
})();
