// The connection: the stream of events with its back-off, and the bar that says it is lost.

import { listVideos } from "./api.js";
import { say } from "./dialogs.js";
import { byId } from "./dom.js";
import { forget, learn, placed } from "./videos.js";

const FIRST_DELAY = 300;
const LAST_DELAY = 20000;
let stream = null;
let delay = FIRST_DELAY;
let retry = 0;
let barTimer = 0;
let refresh = () => {};

/** Connects, and calls `again` whenever what is shown may be old: at first, and after each gap. */
export function connect(again) {
  refresh = again;
  addEventListener("online", hurry);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && hurry());
  open();
}

/** Says that a request found no server. */
export function lost() {
  if (stream?.readyState === EventSource.OPEN) return;
  showBar();
}

function open() {
  stream = new EventSource("/v1/events");
  stream.addEventListener("open", opened);
  stream.addEventListener("error", broke);
  stream.addEventListener("video", (event) => learn(JSON.parse(event.data)));
  stream.addEventListener("queue", (event) => placed(JSON.parse(event.data).waiting));
  stream.addEventListener("deleted", (event) => forget(JSON.parse(event.data).id));
}

function opened() {
  delay = FIRST_DELAY;
  hideBar();
  refresh();
}

function broke() {
  stream.close();
  if (delay > FIRST_DELAY * 4) showBar();
  schedule();
}

function schedule() {
  clearTimeout(retry);
  retry = setTimeout(probe, delay * (0.8 + 0.4 * Math.random()));
  delay = Math.min(delay * 1.7, LAST_DELAY);
}

/** Asks for something small first: a stream cannot tell a missing key from a missing server. */
async function probe() {
  retry = 0;
  try {
    await listVideos({ limit: 1 });
    open();
  } catch (error) {
    if (error.status === 401) return hideBar();
    showBar();
    schedule();
  }
}

function hurry() {
  if (!retry) return;
  clearTimeout(retry);
  delay = FIRST_DELAY;
  probe();
}

function showBar() {
  if (barTimer || !byId("connection").hidden) return;
  barTimer = setTimeout(() => {
    byId("connection").hidden = false;
    say("The connection is lost. Reconnecting.");
  }, 500);
}

function hideBar() {
  clearTimeout(barTimer);
  barTimer = 0;
  if (byId("connection").hidden) return;
  byId("connection").hidden = true;
  say("Connected again.");
}
