// The viewer: a dialog in which a video plays, with its facts and what can be done next.

import { contentPath, deleteVideo, getFile, getVideo } from "./api.js";
import { filesOf, useImage, useSettings } from "./change.js";
import { confirmed, openDialog, say } from "./dialogs.js";
import { byId, make, wait } from "./dom.js";
import { showFacts } from "./facts.js";
import { modelsWith } from "./form.js";
import { focusAfter, indexOf } from "./gallery.js";
import { watch } from "./live.js";
import { postOnce } from "./send.js";
import { find, forget, isLive, isSeen, learn, now, onVideo } from "./videos.js";
import { aspect, whenFull } from "./words.js";

let shown = null;
let take = 0;
/** The input files of the last "again", kept so that a second attempt sends the very same. */
let attempt = null;

export function startViewer() {
  const dialog = byId("viewer");
  dialog.addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (event.target === dialog || button?.dataset.action === "close") dialog.close();
    else if (button && ACTIONS[button.dataset.action]) run(button);
  });
  dialog.addEventListener("close", () => {
    shown = null;
    byId("stage").replaceChildren();
  });
  onVideo((video, before) => {
    if (video === null && before.id === shown?.id) dialog.close();
  });
}

/** Opens the viewer on a video. */
export async function openViewer(id) {
  shown = find(id) ?? (await getVideo(id));
  take = 0;
  const prefix = { failed: "Failed, ", cancelled: "Cancelled, " }[shown.status] ?? "";
  byId("viewer-title").textContent = prefix + whenFull(shown.created_at);
  byId("viewer-prompt").textContent = shown.prompt || "No prompt";
  showError((isSeen(shown) && shown.error?.message) || "");
  showWarnings(shown.warnings ?? []);
  showFacts(byId("facts"), shown);
  showTakes();
  showStage();
  openDialog(byId("viewer"));
  document.querySelector(".viewer-side").scrollTo(0, 0);
  const prompt = byId("viewer-prompt");
  prompt.tabIndex = prompt.scrollHeight > prompt.clientHeight ? 0 : -1;
}

function showStage() {
  const done = isSeen(shown);
  byId("stage").replaceChildren(done ? player() : note());
  byId("stage").style.setProperty("--aspect", done ? aspect(shown.size) : 2);
  showActions(done);
}

function note() {
  const reason = shown.status === "failed" ? (shown.error?.message ?? "Something went wrong.") : "This video was cancelled.";
  return make("p", { class: "stage-note", text: reason });
}

/** The video with its controls; it starts by itself where motion is wanted. */
function player() {
  return make("video", {
    src: contentPath(shown.id, take),
    poster: contentPath(shown.id, take, "thumbnail"),
    controls: true,
    loop: true,
    playsinline: true,
    autoplay: !matchMedia("(prefers-reduced-motion: reduce)").matches,
    "aria-label": "The video",
  });
}

/** Several videos of one job: a thumbnail for each. */
function showTakes() {
  const count = isSeen(shown) ? shown.num_videos : 1;
  const buttons = Array.from({ length: count > 1 ? count : 0 }, (_, index) => {
    const picture = make("img", { src: contentPath(shown.id, index, "thumbnail"), alt: "" });
    const button = make("button", { type: "button", class: "take", "aria-label": `Video ${index + 1} of ${count}` }, picture);
    button.addEventListener("click", () => {
      take = index;
      mark();
      showStage();
    });
    return button;
  });
  const mark = () => buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === take)));
  mark();
  byId("takes").replaceChildren(...buttons);
  byId("takes").hidden = count < 2;
}

function showActions(done) {
  const button = (action, text, look = "") =>
    make("button", { type: "button", class: `button ${look}`, "data-action": action, text });
  const download = make("a", {
    class: "button primary",
    "data-action": "download",
    href: contentPath(shown.id, take),
    download: `${shown.id}${take ? `-${take + 1}` : ""}.${shown.format}`,
    text: "Download",
  });
  byId("viewer-actions").replaceChildren(
    ...(done ? [download] : []),
    button("settings", "Use these settings", "primary"),
    button("again", done ? "Again with this seed" : "Try again"),
    ...(done && modelsWith("image").length ? [button("last-frame", "Use last frame as first image")] : []),
    button("delete", "Delete", "quiet danger-text"),
  );
}

function showWarnings(warnings) {
  byId("viewer-warnings").replaceChildren(...warnings.map((text) => make("li", { text })));
  byId("viewer-warnings").hidden = warnings.length === 0;
}

function showError(message) {
  byId("viewer-error").textContent = message;
  byId("viewer-error").hidden = !message;
  if (message) byId("viewer-error").focus();
}

const ACTIONS = {
  async settings(video) {
    await useSettings(video, () => byId("viewer").close());
  },
  async "last-frame"(video) {
    const file = await getFile(contentPath(video.id, take, "last_frame"), `last-frame-${video.id}.png`);
    useImage(file, () => byId("viewer").close());
  },
  async again(video, button) {
    const files = attempt?.id === video.id ? attempt.files : Object.fromEntries(await filesOf(video));
    attempt = { id: video.id, files };
    const inputs = Object.keys(files);
    const given = Object.entries(video.options).filter(([name]) => !inputs.includes(name));
    const [asked, moment] = [now(), performance.now()];
    const live = isLive(video) ? { live: true, num_frames: video.live.frames } : {};
    const made = await postOnce({ ...Object.fromEntries(given), ...live, model: video.model, seed: video.seed }, files);
    learn(made, asked);
    attempt = null;
    say("Added to the queue.");
    if (isLive(made)) {
      byId("viewer").close();
      return watch(made.id, moment);
    }
    const text = button.textContent;
    button.textContent = "Added to the queue";
    await wait(2500);
    button.textContent = text;
  },
  async delete() {
    if (await confirmed("Delete this video?", "It is removed from the server. This cannot be undone.")) await remove();
  },
};

/** Does what a button says, once at a time. */
async function run(button) {
  if (button.getAttribute("aria-disabled") === "true") return;
  showError("");
  button.setAttribute("aria-disabled", "true");
  try {
    await ACTIONS[button.dataset.action](shown, button);
  } catch (error) {
    showError(error.message);
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

async function remove() {
  const { id } = shown;
  const index = indexOf(id);
  try {
    await deleteVideo(id);
    byId("viewer").close();
    forget(id);
    say("Deleted.");
    focusAfter(index);
  } catch (error) {
    showError(error.message);
  }
}
