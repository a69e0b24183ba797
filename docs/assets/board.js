// Filters of the leaderboard, and a list to sort by where a phone shows no header. Without scripts the page shows everything.
"use strict";
(() => {
  const form = document.querySelector("form.filters");
  if (!form) return;
  const boards = [...document.querySelectorAll(".question")];
  const chosen = form.elements;
  const buttons = (label) => boards.flatMap((board) =>
    [...board.querySelectorAll("th button")].filter((button) => button.textContent === label));

  function filter() {
    let shown = 0;
    for (const board of boards) {
      const { dataset, norm } = board.dataset;
      let rows = 0;
      for (const row of board.querySelectorAll("tbody tr")) {
        row.hidden = ["attention", "sound"].some((word) => chosen[word].checked && row.dataset[word] !== "yes");
        rows += !row.hidden;
      }
      board.hidden = !rows || ["dataset", "norm"].some((word) => chosen[word].value && chosen[word].value !== { dataset, norm }[word]);
      shown += board.hidden ? 0 : rows;
    }
    form.querySelector("output").textContent = `${shown} rows`;
  }

  const labels = new Set(boards.flatMap((board) => [...board.querySelectorAll("th")].map((head) => head.textContent)));
  chosen.sort.append(...[...labels].map((label) => new Option(label)));
  chosen.sort.addEventListener("change", () => buttons(chosen.sort.value).forEach((button) => button.click()));
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
})();
