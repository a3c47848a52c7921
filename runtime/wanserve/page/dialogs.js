// What is said aloud, in a polite region, and dialogs, which take it along: what is outside an open one is not read out.

import { byId } from "./dom.js";

let clearing = 0;

/** Says a sentence to screen readers. Sentences that come together are read together. */
export function say(sentence) {
  const region = byId("said");
  const line = document.createElement("p");
  line.textContent = sentence;
  region.append(line);
  clearTimeout(clearing);
  clearing = setTimeout(() => region.replaceChildren(), 5000);
}

/** Asks before something is deleted; returns whether it is to be. */
export function confirmed(title, words) {
  const dialog = byId("delete-dialog");
  byId("delete-title").textContent = title;
  byId("delete-words").textContent = words;
  dialog.returnValue = "";
  openDialog(dialog);
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "delete"), { once: true });
  });
}

/** Opens a dialog above the page; Escape closes it, and the focus goes back by itself. */
export function openDialog(dialog) {
  if (dialog.open) return;
  dialog.showModal();
  dialog.append(byId("said"));
  const takeBack = () => (document.querySelector("dialog[open]") ?? document.body).append(byId("said"));
  dialog.addEventListener("close", takeBack, { once: true });
}
