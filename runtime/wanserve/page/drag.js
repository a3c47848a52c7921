// Dragging rows of the queue to another place with the mouse; the buttons of a row do the same.

/** Lets the waiting rows of a list be dragged by their grip; calls `move(id, next)` with the row that it goes before. */
export function dragRows(list, move) {
  let dragged = null;
  let next = null;

  const clear = () => {
    for (const row of list.querySelectorAll(".drop-before, .drop-after")) row.classList.remove("drop-before", "drop-after");
  };
  const others = () => [...list.querySelectorAll("[data-status=queued]:not([hidden])")].filter((row) => row !== dragged);

  list.addEventListener("dragstart", (event) => {
    dragged = event.target.closest?.(".grip")?.closest("[data-video]") ?? null;
    if (!dragged) return;
    event.dataTransfer.effectAllowed = "move";
    event.dataTransfer.setData("text/plain", "");
    event.dataTransfer.setDragImage(dragged, 16, 16);
    dragged.classList.add("dragged");
  });

  list.addEventListener("dragover", (event) => {
    if (!dragged) return;
    event.preventDefault();
    clear();
    const rows = others();
    next = rows.find((row) => event.clientY < row.getBoundingClientRect().top + row.offsetHeight / 2) ?? null;
    if (next) next.classList.add("drop-before");
    else rows.at(-1)?.classList.add("drop-after");
  });

  list.addEventListener("drop", (event) => {
    if (!dragged) return;
    event.preventDefault();
    move(dragged.dataset.video, (next ?? following(others().at(-1)))?.dataset.video ?? null);
  });

  list.addEventListener("dragend", () => {
    clear();
    dragged?.classList.remove("dragged");
    dragged = null;
    next = null;
  });
}

/** The row after the last visible one, where the list is folded. */
const following = (row) => row?.nextElementSibling ?? null;
