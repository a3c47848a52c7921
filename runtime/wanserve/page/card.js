// One card of the gallery: the thumbnail, which plays on hover or focus, the prompt, and how it went.

import { contentPath } from "./api.js";
import { icon, make, setText } from "./dom.js";
import { isSeen } from "./videos.js";
import { aspect, lengthWords, promptWords, when } from "./words.js";

const HOVER_DELAY = 150;
const FRAME = 16 / 9;

/** Makes the card of a finished, failed or cancelled video. */
export function makeCard(video) {
  const frame = make("div", { class: "frame" });
  const button = make(
    "button",
    { type: "button", class: "card" },
    frame,
    make("span", { class: "card-prompt", dir: "auto" }),
    make("span", { class: "card-error" }),
    make("span", { class: "card-facts" }),
  );
  playOnHover(button, frame, video.id);
  return make("li", { "data-video": video.id }, button);
}

export function fillCard(card, video) {
  const done = isSeen(video);
  if (card.dataset.status !== video.status) {
    card.dataset.status = video.status;
    card.querySelector(".frame").replaceChildren(done ? thumbnail(video) : unfinished(video));
  }
  setText(card.querySelector(".card-prompt"), promptWords(video, 200));
  setText(card.querySelector(".card-error"), video.status === "failed" ? (video.error?.message ?? "Something went wrong.") : "");
  const count = video.num_videos > 1 ? `${video.num_videos} videos` : null;
  const facts = done ? [lengthWords(video.seconds), count] : [];
  setText(card.querySelector(".card-facts"), [...facts, when(video.created_at)].filter(Boolean).join(" · "));
}

function thumbnail(video) {
  const near = Math.abs(aspect(video.size) / FRAME - 1) < 0.2;
  const source = contentPath(video.id, 0, "thumbnail");
  const image = make("img", { src: source, alt: "", loading: "lazy", class: near ? "fill" : null });
  image.addEventListener("error", () => image.replaceWith(make("span", { class: "frame-note", text: "No picture" })));
  return image;
}

function unfinished(video) {
  const failed = video.status === "failed";
  const text = make("span", { text: failed ? "Failed" : "Cancelled" });
  return make("span", { class: "frame-note" }, failed ? icon("warning") : null, text);
}

/** Plays the video while the mouse or the keyboard is on its card; not for touch, and not where motion is unwanted. */
function playOnHover(button, frame, id) {
  let timer = 0;
  const start = () => {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    clearTimeout(timer);
    timer = setTimeout(() => play(frame, id), HOVER_DELAY);
  };
  const stop = () => {
    clearTimeout(timer);
    frame.querySelector("video")?.remove();
  };
  button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && start());
  button.addEventListener("pointerleave", stop);
  button.addEventListener("focus", () => button.matches(":focus-visible") && start());
  button.addEventListener("blur", stop);
}

function play(frame, id) {
  const image = frame.querySelector("img");
  if (!image || frame.querySelector("video")) return;
  const still = { "aria-hidden": "true", tabindex: -1 };
  const video = make("video", { class: image.className, src: contentPath(id), loop: true, playsinline: true, ...still });
  video.muted = true;
  video.addEventListener("playing", () => video.classList.add("playing"));
  frame.append(video);
  video.play().catch(() => video.remove());
}
