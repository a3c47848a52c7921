// One row of the queue: a job with its pictures, its state in words, its progress and its buttons.

import { contentMark, mediaPictures, preview } from "./pictures.js";
import { icon, make, setText } from "./dom.js";
import { isLive } from "./videos.js";
import { left, promptWords, shapeWords, sizeWords, state } from "./words.js";

/** Makes the row of a job; `fillRow` writes what changes. */
export function makeRow(video) {
  const grip = make("span", { class: "grip", draggable: "true", "aria-hidden": "true", title: "Drag to another place" });
  grip.append(icon("grip"));
  const main = make(
    "div",
    { class: "job-main" },
    make("p", { class: "job-prompt", dir: "auto" }),
    make("p", { class: "job-facts" }, ...["job-state", "job-shape", "job-left"].map((name) => make("span", { class: name }))),
    make("progress", { max: 100, value: 0 }),
    make("p", { class: "error", hidden: true }),
  );
  return make("li", { class: "job", "data-video": video.id }, grip, make("div", { class: "job-pictures" }), main, buttons());
}

function buttons() {
  return make(
    "div",
    { class: "job-actions" },
    make("button", { type: "button", class: "button quiet icon-only", "data-action": "up", title: "Move up" }, icon("up")),
    make("button", { type: "button", class: "button quiet icon-only", "data-action": "down", title: "Move down" }, icon("down")),
    make("button", { type: "button", class: "button quiet small", "data-action": "change", text: "Change" }),
    make("button", { type: "button", class: "button small", "data-action": "watch", text: "Watch" }),
    make("button", { type: "button", class: "button quiet small", "data-action": "cancel", text: "Cancel" }),
  );
}

/** Writes a job into its row. `count` is how many wait. */
export function fillRow(row, video, count) {
  const waits = video.status === "queued";
  const part = (name) => row.querySelector(name);
  row.dataset.status = video.status;
  setText(part(".job-prompt"), promptWords(video));
  setText(part(".job-state"), state(video));
  const shape = isLive(video) && !video.live.made ? sizeWords(video.size) : shapeWords(video);
  setText(part(".job-shape"), shape + (video.num_videos > 1 ? `, ${video.num_videos} videos` : ""));
  setText(part(".job-left"), left(waits ? null : video.remaining_seconds) ?? "");
  fillProgress(part("progress"), video, waits || isLive(video));
  fillPictures(part(".job-pictures"), video);
  const name = promptWords(video, 40);
  const end = !waits && isLive(video) ? "Stop" : "Cancel"; // what is made of a live one stays
  const words = { up: "Move up", down: "Move down", change: "Change", watch: "Watch", cancel: end };
  setText(part("[data-action=cancel]"), end);
  for (const button of row.querySelectorAll("[data-action]")) {
    button.setAttribute("aria-label", `${words[button.dataset.action]}: ${name}`);
    button.hidden = !waits && button.dataset.action !== "cancel";
  }
  part("[data-action=watch]").hidden = waits || !isLive(video);
  disable(part("[data-action=up]"), video.position === 1);
  disable(part("[data-action=down]"), video.position === count);
  disable(part("[data-action=cancel]"), video.phase === "cancelling");
  part(".grip").hidden = !waits;
}

/** A bar without a value is one that cannot say how far it is. */
function fillProgress(bar, video, hidden) {
  bar.hidden = hidden;
  bar.setAttribute("aria-label", `Progress: ${promptWords(video, 40)}`);
  if (video.progress > 0 || video.phase === "steps") bar.value = video.progress;
  else bar.removeAttribute("value");
}

function fillPictures(node, video) {
  if (video.preview !== null) return preview(node, video);
  const signature = JSON.stringify([video.size, video.media]);
  if (node.dataset.shows === signature) return;
  node.dataset.shows = signature;
  node.replaceChildren(...(video.media.length ? mediaPictures(video) : [contentMark(video)]));
}

/** A button that has nothing to do keeps the focus, so it is not disabled outright. */
function disable(button, off) {
  if (off) button.setAttribute("aria-disabled", "true");
  else button.removeAttribute("aria-disabled");
}

/** Says at a row what went wrong with it. */
export function showTrouble(row, message) {
  const node = row.querySelector(".error");
  node.textContent = message;
  node.hidden = false;
  setTimeout(() => (node.hidden = true), 8000);
}
