// The gallery: what is finished, failed or cancelled, newest first, page by page, with the search.

import { deleteVideo, listVideos } from "./api.js";
import { fillCard, makeCard } from "./card.js";
import { confirmed, say } from "./dialogs.js";
import { arrange, byId, debounce, together } from "./dom.js";
import { all, find, forget, isActive, learn, now, onVideo, untouched } from "./videos.js";

const LIMIT = 24;
const STATUS = "completed,failed,cancelled";
let shown = [];
let cards = new Map();
let hasMore = false;
let loaded = false;
let words = "";
let loading = null;

/** Readies the list and the search; `open` is called with the id of a card that is opened. */
export function startGallery(open) {
  onVideo(follow);
  byId("gallery").addEventListener("click", (event) => {
    const card = event.target.closest("[data-video]");
    if (card) open(card.dataset.video);
  });
  byId("search").addEventListener("input", debounce(search, 300));
  byId("clear-search").addEventListener("click", () => {
    byId("search").value = "";
    byId("search").focus();
    search();
  });
  byId("clear-cancelled").addEventListener("click", clearCancelled);
  document.querySelector("[data-action=more]").addEventListener("click", showMore);
}

async function search() {
  const next = byId("search").value.trim();
  if (next === words) return;
  words = next;
  await loadGallery({ whole: false });
  if (loaded && words) say(shown.length ? `${shown.length}${hasMore ? " or more" : ""} found` : "Nothing found");
}

/** Loads what is shown anew; `whole` as many pages as were open, else the first. */
export async function loadGallery({ whole = true } = {}) {
  loading?.abort();
  loading = new AbortController();
  const { signal } = loading;
  const wanted = whole ? Math.max(shown.length, 1) : 1;
  const asked = now();
  try {
    const list = [];
    let page = { has_more: true };
    while (page.has_more && list.length < wanted) {
      page = await loadPage(page.last_id, signal);
      list.push(...newest(page));
    }
    shown = list;
    hasMore = page.has_more;
    loaded = true;
    addNews(asked);
    show();
  } catch (error) {
    if (error.name !== "AbortError") showTrouble(error);
  }
}

async function loadPage(after, signal) {
  const asked = now();
  const query = { limit: LIMIT, order: "desc", status: STATUS };
  if (after) query.after = after;
  const page = await listVideos({ ...query, ...searched() }, signal);
  for (const video of page.data) learn(video, asked);
  return page;
}

const searched = () => (words ? { q: words } : {});

/** A page's videos as they are known by now. */
const newest = (page) => page.data.map(({ id }) => find(id)).filter((video) => video && !isActive(video));

/** Adds what finished while the pages were on their way. */
function addNews(asked) {
  const known = new Set(shown.map(({ id }) => id));
  const news = all().filter((video) => !isActive(video) && !known.has(video.id) && !untouched(video.id, asked));
  for (const video of news) if (matches(video)) insert(video);
}

async function showMore() {
  const count = shown.length;
  try {
    const page = await loadPage(shown.at(-1)?.id, loading?.signal);
    const known = new Set(shown.map(({ id }) => id));
    shown.push(...newest(page).filter(({ id }) => !known.has(id)));
    hasMore = page.has_more;
    show();
    cards.get(shown[count]?.id)?.querySelector("button").focus();
  } catch (error) {
    if (error.name !== "AbortError") showTrouble(error);
  }
}

/** Deletes what was cancelled, of those with the words that are searched for. */
async function clearCancelled() {
  const warning = "Their prompts and settings are removed from the server. This cannot be undone.";
  if (!(await confirmed("Delete all cancelled videos?", warning))) return;
  const button = byId("clear-cancelled");
  button.disabled = true;
  try {
    const query = { limit: 100, status: "cancelled", ...searched() };
    for (let page = await listVideos(query); page.data.length; page = await listVideos(query)) {
      for (const { id } of page.data) {
        await deleteVideo(id);
        forget(id);
      }
    }
    say("Deleted.");
    byId("gallery-title").focus();
  } catch (error) {
    showTrouble(error);
  } finally {
    button.disabled = false;
  }
}

/** Follows a change: a finished job comes in at its place, a deleted one goes. */
function follow(video, before) {
  const id = video?.id ?? before.id;
  const index = shown.findIndex((each) => each.id === id);
  if (!loaded || (index < 0 && (!video || isActive(video)))) return;
  if (index >= 0 && video && !isActive(video)) shown[index] = video;
  else if (index >= 0) shown.splice(index, 1);
  else if (isActiveNow(before) && matches(video)) insert(video);
  else return;
  showSoon();
}

const isActiveNow = (before) => before === null || isActive(before);
const matches = (video) =>
  words.toLowerCase().split(/\s+/).every((word) => video.prompt.toLowerCase().includes(word));

/** Inserts by time; what is older than all that is loaded comes with its page. */
function insert(video) {
  const index = shown.findIndex((each) => each.created_at <= video.created_at);
  if (index >= 0) shown.splice(index, 0, video);
  else if (!hasMore) shown.push(video);
}

function show() {
  const next = new Map();
  for (const video of shown) {
    const card = cards.get(video.id) ?? makeCard(video);
    fillCard(card, video);
    next.set(video.id, card);
  }
  cards = next;
  arrange(byId("gallery"), [...cards.values()]);
  document.querySelector("[data-action=more]").hidden = !hasMore;
  byId("gallery-error").hidden = true;
  byId("clear-cancelled").hidden = !shown.some(({ status }) => status === "cancelled");
  showEmpty();
}

const showSoon = together(show);

function showEmpty() {
  byId("gallery-empty").hidden = !loaded || shown.length > 0;
  byId("clear-search").hidden = !words;
  byId("gallery-empty-title").textContent = words ? "No prompt has these words." : "Your videos will be here.";
  byId("gallery-empty-next").textContent = words
    ? `You searched for “${words}”. Try fewer words.`
    : "Describe one in the composer, then choose Make video. It appears here when it is finished.";
}

function showTrouble(error) {
  byId("gallery-error").textContent = error.message;
  byId("gallery-error").hidden = error.status === 401;
}

/** Puts the focus where a deleted card was. */
export function focusAfter(index) {
  const video = shown[Math.min(index, shown.length - 1)];
  (video ? cards.get(video.id).querySelector("button") : byId("gallery-title")).focus();
}

export const indexOf = (id) => shown.findIndex((video) => video.id === id);
