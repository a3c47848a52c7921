// Small pictures that stand for a job: its input files, or the outline of its shape.

import { mediaPath, previewPath } from "./api.js";
import { icon, make } from "./dom.js";
import { aspect, promptWords } from "./words.js";

const MOST = 2;

/** The first input files of a job, and how many more there are. */
export function mediaPictures(video) {
  const shown = video.media.slice(0, MOST).map((item) => picture(video, item));
  const more = video.media.length - shown.length;
  return more > 0 ? [...shown, make("span", { class: "picture-more", text: `+${more}` })] : shown;
}

function picture(video, item) {
  const source = mediaPath(video.id, item);
  if (item.kind === "video") {
    return make("video", { class: "picture", src: source, preload: "metadata", muted: true, "aria-hidden": "true" });
  }
  const image = make("img", { class: "picture", src: source, alt: "", loading: "lazy" });
  image.addEventListener("error", () => image.replaceWith(make("span", { class: "picture" }, icon("image"))));
  return image;
}

/** Shows the newest preview of a job that runs. It stays until the next one has come whole. */
export function preview(node, video) {
  const source = previewPath(video.id, video.preview);
  if (node.dataset.shows === source) return;
  node.dataset.shows = source;
  const image = make("img", { class: "picture preview", alt: `Preview: ${promptWords(video, 40)}` });
  image.addEventListener("load", () => node.dataset.shows.startsWith(previewPath(video.id, "")) && node.replaceChildren(image));
  image.src = source;
}

/** The outline of the video that is to be made. */
export function contentMark(video) {
  const glyph = make("span", { class: "glyph", "aria-hidden": "true" });
  const ratio = aspect(video.size);
  glyph.style.width = `${ratio >= 1 ? 28 : 28 * ratio}px`;
  glyph.style.height = `${ratio >= 1 ? 28 / ratio : 28}px`;
  return glyph;
}
