// Filling the composer from a job: to change one that waits, or to use its settings. What was typed before comes back.

import { getFile, mediaPath } from "./api.js";
import { byId } from "./dom.js";
import { load, save } from "./draft.js";
import { clearErrors } from "./errors.js";
import { currentModel, fill, goToForm, keepWith, modelsWith, settingsOf, typed } from "./form.js";
import { mediaState, put, restoreMedia } from "./media.js";
import { find, onVideo } from "./videos.js";
import { short } from "./words.js";

/** The job whose change is being written, or null; `started` once it no longer waits. */
let change = null;
/** What the composer held before settings were put in, with what it held before that as `earlier`; or null. */
let before = null;

export const changing = () => change;

/** Readies the ways out, and goes on with a change that was open when the page was left. */
export function startChanges() {
  byId("composer").querySelector("[data-action=leave-change]").addEventListener("click", () => leave());
  onVideo((video, old) => {
    const id = video?.id ?? old?.id;
    if (change?.id === id && video?.status !== "queued") hasStarted();
  });
}

/** Goes on with a change that was open when the page was left. */
export async function resumeChange() {
  const kept = load("change");
  if (change || !kept) return;
  const video = find(kept.id);
  if (video?.status === "queued") return beginChange(video, kept.typed);
  save("change", null);
  remember();
  fill(kept.typed);
}

/** The input files of a job, by input. */
export async function filesOf(video) {
  const files = await Promise.all(video.media.map((item) => getFile(mediaPath(video.id, item), item.name)));
  const byInput = new Map();
  video.media.forEach(({ option }, index) => byInput.set(option, [...(byInput.get(option) ?? []), files[index]]));
  return byInput;
}

/** Loads a waiting job into the composer, which then saves changes. */
export async function beginChange(video, values = null) {
  const files = await filesOf(video);
  if (change) leave();
  before = { typed: typed(), media: mediaState(), earlier: before };
  change = { id: video.id, options: video.options, media: video.media, model: video.model, started: false };
  keepWith((now) => save("change", { id: video.id, typed: now }));
  putIn(values ?? settingsOf(video), files, false);
  show(`You are changing “${short(video.prompt, 40)}”.`, "Leave it as it was");
  byId("queue").querySelector(`[data-video="${CSS.escape(video.id)}"]`)?.classList.add("changing");
  if (find(video.id)?.status !== "queued") hasStarted();
  goToForm();
}

/** Fills the composer with a video's settings and files; `ready` is called before the focus goes there. */
export async function useSettings(video, ready) {
  const files = await filesOf(video);
  ready();
  remember();
  putIn(settingsOf(video), files, true);
  goToForm();
}

/** Makes an image the first one, with a model that takes one; everything else stays. */
export function useImage(file, ready) {
  ready();
  remember();
  const hasInput = modelsWith("image").includes(currentModel());
  if (!hasInput) fill({ ...typed(), model: modelsWith("image")[0].id });
  put("image", [file]);
  goToForm();
}

/** Notes what the composer holds, if it is anything, and offers the way back to it. */
function remember() {
  if (change) leave();
  const media = mediaState();
  const holds = typed().prompt.trim() || [...media.values()].some(({ files }) => files.length);
  if (holds) before = { typed: typed(), media, earlier: before };
  showKept();
}

const showKept = () => show(before ? "What you had written is kept." : "", "Put it back");

function putIn(values, files, changed) {
  clearErrors();
  restoreMedia(new Map());
  fill(values);
  for (const [name, list] of files) put(name, list, changed);
}

function hasStarted() {
  change.started = true;
  const words = "This video has started, so it can no longer be changed. You can make a new one with these settings.";
  show(words, "Put back what you had");
}

/** Leaves the change, or the settings, and puts back what was there before. */
export function leave() {
  document.querySelector(".changing")?.classList.remove("changing");
  save("change", null);
  keepWith((now) => save("draft", now));
  if (before) {
    restoreMedia(before.media);
    fill(before.typed);
    clearErrors();
  }
  change = null;
  before = before?.earlier ?? null;
  showKept();
}

/** Shows a note with the way out under the title; without words there is none. */
function show(words, wayOut) {
  byId("composer-title").textContent = change && !change.started ? "Change a video" : "Make a video";
  byId("submit").textContent = change && !change.started ? "Save changes" : "Make video";
  byId("change-words").textContent = words;
  byId("change-note").hidden = !words;
  byId("change-note").querySelector("button").textContent = wayOut;
}
