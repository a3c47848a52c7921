// Puts the page together: starts each part, and loads everything at first and after each gap in the connection.

import { onTrouble } from "./api.js";
import { resumeChange, startChanges } from "./change.js";
import { connect, lost } from "./connection.js";
import { say } from "./dialogs.js";
import { byId, hasMouse } from "./dom.js";
import { load } from "./draft.js";
import { fill, loadModels, startForm } from "./form.js";
import { loadGallery, startGallery } from "./gallery.js";
import { resumeLive, startLive } from "./live.js";
import { loadQueue, startQueue } from "./queue.js";
import { showReady, startReady } from "./ready.js";
import { startSending } from "./send.js";
import { askForKey, startSession } from "./session.js";
import { onVideo } from "./videos.js";
import { openViewer, startViewer } from "./viewer.js";
import { promptWords } from "./words.js";

const NEWS = {
  in_progress: () => "Started",
  completed: () => "Finished",
  failed: (video) => `Failed, ${video.error?.message ?? "something went wrong"}`,
  cancelled: () => "Cancelled",
};

/** Says what became of a job, once for each change of its state. */
function tellNews(video, before) {
  if (!video || !before || video.status === before.status || !NEWS[video.status]) return;
  say(`${NEWS[video.status](video)}: ${promptWords(video, 60)}`);
}

/** Loads all that is shown. What finds no server is tried again once there is a connection. */
async function loadAll() {
  showReady();
  const tries = await Promise.allSettled([loadModels(), loadQueue(), loadGallery()]);
  if (!tries.every(({ status }) => status === "fulfilled")) return;
  resumeLive();
  await resumeChange().catch(() => {});
}

onTrouble({ key: askForKey, lost });
startSession();
startForm();
startReady();
startChanges();
startSending();
startQueue();
startGallery(openViewer);
startViewer();
startLive(openViewer);
onVideo(tellNews);
fill(load("draft") ?? {});
if (hasMouse()) byId("prompt").focus();
connect(loadAll);
