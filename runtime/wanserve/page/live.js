// The dialog of a live video: it plays while it is made, its prompt is changed on the way, and it is stopped.

import { cancelVideo, steerVideo } from "./api.js";
import { openDialog, say } from "./dialogs.js";
import { byId, hasMouse, make, setText } from "./dom.js";
import { Player } from "./player.js";
import { find, isActive, isSeen, learn, now, onVideo } from "./videos.js";
import { aspect, short, state, took } from "./words.js";

const EACH = 500; // milliseconds between two looks at the figures
const LOOKS = 8; // that the frames a second are of
const SLOW = 0.85; // of the frames a second that it should play
const HELP = "Enter sends it. It is followed from the next part of the video on.";
const STATES = {
  waiting: (video) => (["live", null].includes(video.phase) ? "Waiting for the first frame" : state(video)),
  playing: () => (watched.isSlow ? "Live, but made slower than it plays" : "Live"),
  paused: () => "Paused. It goes on, and plays from its newest frame",
  ended: ({ live }) => ENDS[live?.stopped] ?? "It has ended",
  lost: () => "The connection is lost",
  unplayable: () => "This browser cannot play a video while it is made. It will be among the videos at its end.",
};
const ENDS = {
  client: "It was stopped",
  limit: "It has ended: it is as long as this server makes them",
  no_reader: "It has ended, since nobody watched it",
};

/** What is watched: its id, player and element, and what was seen of it; or null. */
let watched = null;

/** Readies the dialog; `open` is called with the id of a video that has ended, to see it whole. */
export function startLive(open) {
  const dialog = byId("live");
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.querySelector("[data-action=close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", leave);
  byId("steering").addEventListener("submit", (event) => {
    event.preventDefault();
    act(steer);
  });
  byId("next-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    act(steer);
  });
  byId("live-stop").addEventListener("click", () => act(stop));
  byId("live-again").addEventListener("click", () => {
    showState("waiting");
    watched.player.run();
  });
  byId("live-whole").addEventListener("click", () => {
    const { id } = watched;
    dialog.close();
    open(id);
  });
  onVideo((video, before) => {
    if (watched && (video ?? before).id === watched.id) video ? showVideo(video) : dialog.close();
  });
}

/** Goes on watching what was watched when the page was left: without a reader it would end. */
export function resumeLive() {
  const video = find(history.state?.live);
  if (!watched && video && isActive(video)) watch(video.id);
}

/** Opens the dialog on a live video; `asked` is when it was asked for here, of `performance.now()`, or null. */
export function watch(id, asked = null) {
  history.replaceState({ live: id }, "");
  const element = make("video", { controls: true, playsinline: true, "aria-label": "The live video" });
  element.muted = true;
  byId("live-stage").replaceChildren(element);
  byId("live-stage").style.setProperty("--aspect", aspect(find(id).size));
  const player = new Player(element, id, showState);
  watched = { id, element, player, state: "waiting", first: null, next: null, looks: [] };
  watched.timer = setInterval(look, EACH);
  if (asked !== null)
    element.addEventListener("loadeddata", () => (watched.first = (performance.now() - asked) / 1000), { once: true });
  byId("next-prompt").value = "";
  setText(byId("live-rate"), "–");
  showError("");
  showState("waiting");
  look();
  openDialog(byId("live"));
  if (hasMouse()) byId("next-prompt").focus();
  player.run();
}

function leave() {
  history.replaceState(null, "");
  clearInterval(watched.timer);
  watched.player.close();
  watched = null;
  byId("live-stage").replaceChildren();
}

/** Shows a state of the player, which says why in `words` if it knows. */
function showState(state, words = null) {
  Object.assign(watched, { state, words });
  showVideo(find(watched.id));
  say(byId("live-title").textContent);
}

/** Shows what is known of the video: how it goes, and whether it can still be steered. */
function showVideo(video) {
  const { state, words } = watched;
  const title = byId("live-title");
  setText(title, words ?? STATES[state](video));
  title.dataset.ready = String(state === "playing");
  const hadFocus = byId("steering").contains(document.activeElement);
  byId("steering").hidden = !isActive(video);
  if (hadFocus && !isActive(video)) title.focus();
  byId("live-again").hidden = state !== "lost" || !isActive(video);
  byId("live-whole").hidden = !isSeen(video);
  if (video.status === "failed") showError(video.error?.message ?? "Something went wrong.");
  showPrompt(video);
}

/** Shows the prompt of the frames that are played, and the next one until it is followed. */
function showPrompt(video) {
  const { element, next } = watched;
  const prompts = video.live?.prompts ?? [];
  const frame = Math.floor(element.currentTime * video.fps);
  const shown = prompts.findLast(({ first }) => first <= frame)?.prompt ?? video.prompt;
  if (shown === next) watched.next = null;
  setText(byId("live-prompt"), shown);
  setText(byId("next-help"), watched.next ? `Next: ${short(watched.next, 80)}` : HELP);
}

/** Looks at what plays, and shows the figures of the last few seconds. */
function look() {
  const { id, element, player, state, looks } = watched;
  const first = watched.first ?? find(id).live.first_seconds;
  showVideo(find(id));
  setText(byId("live-first"), first ? `after ${took(first)}` : "–");
  setText(byId("live-behind"), element.readyState ? `${player.behind.toFixed(1)} s` : "–");
  if (state !== "playing") return looks.splice(0);
  const { totalVideoFrames: frames, droppedVideoFrames: dropped } = element.getVideoPlaybackQuality();
  looks.push({ frames: frames - dropped, moment: performance.now() });
  if (looks.length > LOOKS + 1) looks.shift();
  const [oldest, newest] = [looks[0], looks.at(-1)];
  const rate = (newest.frames - oldest.frames) / ((newest.moment - oldest.moment) / 1000);
  watched.isSlow = looks.length > LOOKS && rate < SLOW * find(id).fps;
  setText(byId("live-rate"), looks.length > 2 ? rate.toFixed(1) : "–");
}

/** Sends what is to be shown from the next part on. */
async function steer() {
  const field = byId("next-prompt");
  if (!field.value.trim()) throw new Error("Describe what the video should show next.");
  const { id } = watched;
  const [asked, prompt] = [now(), field.value.trim()];
  learn(await steerVideo(id, prompt), asked);
  if (watched?.id !== id) return;
  watched.next = prompt;
  field.value = "";
  field.focus();
  showPrompt(find(id));
  say("The prompt is changed.");
}

async function stop() {
  const asked = now();
  learn(await cancelVideo(watched.id), asked);
}

/** Does one thing at a time, and says what went wrong. */
async function act(action) {
  const buttons = byId("steering").querySelectorAll("button");
  if (buttons[0].getAttribute("aria-disabled") === "true") return;
  showError("");
  for (const button of buttons) button.setAttribute("aria-disabled", "true");
  try {
    await action();
  } catch (error) {
    showError(error.message);
  } finally {
    for (const button of buttons) button.removeAttribute("aria-disabled");
  }
}

function showError(message) {
  byId("live-error").textContent = message;
  byId("live-error").hidden = !message;
  byId("next-prompt").setAttribute("aria-invalid", String(Boolean(message)));
}
