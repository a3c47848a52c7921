// Makes the headings of tables buttons that sort the rows: once up, again down. Without it a table is as it was made.
"use strict";

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const read = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key === undefined ? cell.textContent.trim() : Number(cell.dataset.key);
  };
  const compare = (one, other, sign) => {
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1; // what has no number is last
    return sign * (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => compare(read(a, column), read(b, column), down ? -1 : 1));
      body.append(...rows);
    });
  });
}
