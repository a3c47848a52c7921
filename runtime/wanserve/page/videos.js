// What is known of the server's videos: the newest object of each, whoever brought it, and who wants to hear of it.

const known = new Map();
const forgotten = new Map();
const listeners = new Set();
let moment = 0;

/** The present moment, to be noted before a request whose answer is learnt afterwards. */
export const now = () => moment;

/** Calls a listener with each change: the video, or null once deleted, and what was known of it before. */
export const onVideo = (listener) => listeners.add(listener);

/** Learns a video, unless something newer came since the moment that it was asked for. */
export function learn(video, asked = moment) {
  const entry = known.get(video.id);
  if ((entry?.moment ?? 0) > asked || (forgotten.get(video.id) ?? 0) > asked) return;
  moment += 1;
  known.set(video.id, { video, moment });
  for (const listener of listeners) listener(video, entry?.video ?? null);
}

/** Learns the places of waiting videos, of those that have another one now. */
export function placed(places) {
  for (const { id, position, remaining_seconds } of places) {
    const video = find(id);
    if (video?.status === "queued" && video.position !== position) learn({ ...video, position, remaining_seconds });
  }
}

/** Forgets a video that is no longer there. */
export function forget(id) {
  const before = known.get(id)?.video;
  moment += 1;
  forgotten.set(id, moment);
  if (!known.delete(id)) return;
  for (const listener of listeners) listener(null, before);
}

/** Whether nothing newer is known of a video than at a moment. */
export const untouched = (id, asked) => (known.get(id)?.moment ?? 0) <= asked;

export const find = (id) => known.get(id)?.video ?? null;
export const all = () => [...known.values()].map((entry) => entry.video);
export const isActive = (video) => video.status === "queued" || video.status === "in_progress";
/** Whether it plays while it is made. */
export const isLive = (video) => Boolean(video.live);
/** Whether there is something to see at its end: all of it, or what there is of a live one. */
export const isSeen = (video) => video.status === "completed" || (!isActive(video) && video.live?.made > 0);
