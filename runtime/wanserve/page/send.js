// Sending the composer: makes a video or saves a change, and says what came of it.

import { changeVideo, createVideo, formOf, newKey } from "./api.js";
import { changing, leave } from "./change.js";
import { say } from "./dialogs.js";
import { byId, hasMouse } from "./dom.js";
import { clearErrors, showError } from "./errors.js";
import { given, isComplete } from "./form.js";
import { watch } from "./live.js";
import { mediaFiles } from "./media.js";
import { learn, now } from "./videos.js";

/** The key of a request that got no answer, with what was in it: the same is sent with the same key. */
let unanswered = null;
let hintTimer = 0;

export function startSending() {
  const form = byId("composer");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    send();
  });
  showHint();
}

async function send() {
  const button = byId("submit");
  if (button.getAttribute("aria-disabled") === "true") return;
  clearErrors();
  if (!isComplete()) return;
  button.setAttribute("aria-disabled", "true");
  try {
    const change = changing();
    if (change && !change.started) await saveChange(change);
    else await makeNew();
  } catch (error) {
    showError(error.param === "seeds" ? "seed" : (error.param ?? "form"), wordsOf(error));
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

async function makeNew() {
  const values = given();
  const files = mediaFiles();
  const [asked, moment] = [now(), performance.now()];
  const made = await postOnce(values, files);
  const videos = made.data ?? [made];
  for (const video of videos) learn(video, asked);
  if (changing()) leave();
  done(made.data ? `Added ${made.data.length} videos to the queue.` : "Added to the queue.");
  if (values.live) watch(videos[0].id, moment);
}

/** Posts a new video. After an attempt without an answer, the same request has the same key again. */
export async function postOnce(values, files) {
  const list = Object.values(files).flat();
  const same = unanswered && unanswered.values === JSON.stringify(values) && sameFiles(unanswered.list, list);
  const key = same ? unanswered.key : newKey();
  unanswered = { key, values: JSON.stringify(values), list };
  try {
    const video = await createVideo(formOf(values, files), key);
    unanswered = null;
    return video;
  } catch (error) {
    if (![0, 502, 503, 504].includes(error.status)) unanswered = null;
    throw error;
  }
}

const sameFiles = (one, other) => one.length === other.length && one.every((file, index) => file === other[index]);

/** Sends all values, an empty one for each that was given before and is no more, and the files that changed. */
async function saveChange(change) {
  const values = given();
  const files = mediaFiles(true);
  if (values.model === change.model) delete values.model;
  const inputs = new Set(change.media.map(({ option }) => option));
  for (const name of Object.keys(change.options)) {
    if (!(name in values) && !inputs.has(name) && name !== "model") values[name] = "";
  }
  for (const [name, list] of Object.entries(files)) if (!list.length) values[name] = "";
  const asked = now();
  learn(await changeVideo(change.id, formOf(values, files)), asked);
  leave();
  done("The changes are saved.");
}

function wordsOf(error) {
  if (error.status === 0) return `${error.message} What you wrote is kept. Try again in a moment.`;
  if (error.status !== 429) return error.message;
  return `${error.message} ${error.after ? `Try again in ${error.after} seconds.` : "Try again in a moment."}`;
}

function done(words) {
  byId("submit-hint").textContent = words;
  say(words);
  clearTimeout(hintTimer);
  hintTimer = setTimeout(showHint, 4000);
}

function showHint() {
  const keys = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘ + Enter" : "Ctrl + Enter";
  byId("submit-hint").textContent = hasMouse() ? keys : "";
}
