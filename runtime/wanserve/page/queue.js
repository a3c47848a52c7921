// The queue: jobs that run and wait, with their progress, their order and what can be done to them.

import { cancelVideo, listVideos, moveVideo } from "./api.js";
import { beginChange } from "./change.js";
import { say } from "./dialogs.js";
import { arrange, byId, setText, together } from "./dom.js";
import { dragRows } from "./drag.js";
import { watch } from "./live.js";
import { fillRow, makeRow, showTrouble } from "./row.js";
import { all, find, forget, isActive, learn, now, onVideo, untouched } from "./videos.js";
import { place, promptWords } from "./words.js";

const FOLDED = 6;
const rows = new Map();
let unfolded = false;
let loaded = false;

/** Readies the list; it follows what is learnt of videos. */
export function startQueue() {
  onVideo(together(show));
  byId("queue").addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    const row = event.target.closest("[data-video]");
    if (button && row && button.getAttribute("aria-disabled") !== "true") act(button.dataset.action, row.dataset.video);
  });
  byId("queue-all").addEventListener("click", () => {
    unfolded = !unfolded;
    show();
  });
  dragRows(byId("queue"), moveBefore);
}

/** Asks for all jobs that run or wait; those that are known and no longer do are forgotten. */
export async function loadQueue() {
  const asked = now();
  const seen = new Set();
  let page = { has_more: true };
  const query = { status: "queued,in_progress", limit: 100, order: "asc" };
  while (page.has_more) {
    page = await listVideos(page.last_id ? { ...query, after: page.last_id } : query);
    for (const video of page.data) {
      seen.add(video.id);
      learn(video, asked);
    }
  }
  for (const video of all()) if (isActive(video) && !seen.has(video.id) && untouched(video.id, asked)) forget(video.id);
  loaded = true;
  show();
}

const waiting = () =>
  all()
    .filter((video) => video.status === "queued")
    .sort((one, other) => (one.position ?? Infinity) - (other.position ?? Infinity) || one.created_at - other.created_at);
const running = () => all().filter((video) => video.status === "in_progress");

function show() {
  const line = waiting();
  const videos = [...running(), ...line];
  const focused = document.activeElement?.closest("#queue [data-video]");
  const isGone = focused && !videos.some(({ id }) => id === focused.dataset.video);
  const lostIndex = isGone ? [...rows.keys()].indexOf(focused.dataset.video) : -1;
  const action = document.activeElement?.dataset.action;
  const ordered = new Map(videos.map((video) => [video.id, rows.get(video.id) ?? makeRow(video)]));
  rows.clear();
  for (const [id, row] of ordered) rows.set(id, row);
  videos.forEach((video, index) => {
    const row = rows.get(video.id);
    fillRow(row, video, line.length);
    row.hidden = !unfolded && index >= FOLDED && videos.length > FOLDED + 1;
  });
  arrange(byId("queue"), [...rows.values()]);
  if (lostIndex >= 0) focusNear(videos, lostIndex);
  else if (focused && !focused.contains(document.activeElement)) focused.querySelector(`[data-action=${action}]`)?.focus();
  showAround(videos, line);
}

/** After a focused row went away, the focus goes to its neighbour. */
function focusNear(videos, index) {
  const next = videos[Math.min(index, videos.length - 1)];
  (next ? rows.get(next.id).querySelector("[data-action=cancel]") : byId("queue-title")).focus();
}

function showAround(videos, line) {
  byId("queue-empty").hidden = !loaded || videos.length > 0;
  setText(byId("queue-count"), line.length ? `${line.length} waiting` : "");
  const button = byId("queue-all");
  button.hidden = videos.length <= FOLDED + 1;
  setText(button, unfolded ? "Show fewer" : `Show all ${videos.length}`);
  const job = running()[0];
  const share = job?.phase === "steps" ? `${Math.round(job.progress)} % – ` : "";
  document.title = job ? `${share || "Working – "}wanrun` : "wanrun";
}

async function act(action, id) {
  const index = waiting().findIndex((video) => video.id === id);
  if (action === "up") await move(id, index - 1);
  if (action === "down") await move(id, index + 1);
  if (action === "change") await tell(id, () => beginChange(find(id)));
  if (action === "watch") watch(id);
  if (action === "cancel") {
    const asked = now();
    await tell(id, async () => learn(await cancelVideo(id), asked));
  }
}

/** Moves a job before another one; null is the end of the line. */
function moveBefore(id, next) {
  const rest = waiting().filter((video) => video.id !== id);
  const index = rest.findIndex((video) => video.id === next);
  move(id, index < 0 ? rest.length : index);
}

/** Moves a waiting job to an index in the line: at once on the page, then on the server. */
async function move(id, index) {
  const line = waiting();
  const from = line.findIndex((video) => video.id === id);
  if (from < 0 || index < 0 || index >= line.length || index === from) return;
  line.splice(index, 0, ...line.splice(from, 1));
  line.forEach((video, each) => learn({ ...video, position: each + 1 }));
  if (index >= FOLDED - 1) unfolded = true;
  show();
  say(`${promptWords(find(id), 40)}: ${place(index + 1)}`);
  const went = await tell(id, () => moveVideo(id, index + 1));
  if (!went) loadQueue().catch(() => {});
}

/** Does something to a job, and says at its row what went wrong; returns whether it went well. */
async function tell(id, action) {
  try {
    await action();
    return true;
  } catch (error) {
    const row = rows.get(id);
    if (row) showTrouble(row, error.message);
    say(error.message);
    return false;
  }
}
