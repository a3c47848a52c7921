// A player of live video by Media Source Extensions: plays what the server streams, near its newest frame, and keeps little.

import { getLive, getVideo } from "./api.js";
import { wait } from "./dom.js";
import { find, isActive } from "./videos.js";

const KEPT = 10; // seconds before the newest frame that stay, however long somebody pauses
const FAR = 4; // seconds behind the newest frame from which it jumps
const LEAD = 1; // seconds behind the newest frame where it lands, and to which it hurries
const HURRY = 1.1;
const AGAIN = 700; // milliseconds before it connects once more

/** Safari on telephones has the managed one alone. */
const Source = window.ManagedMediaSource ?? window.MediaSource;

/** Plays a live video in a video element; `tell` hears each state: waiting, playing, paused, ended, lost, unplayable. */
export class Player {
  #element;
  #id;
  #tell;
  #state = "waiting";
  #ending = new AbortController();
  #source = null;
  #buffer = null;

  constructor(element, id, tell) {
    this.#element = element;
    this.#id = id;
    this.#tell = tell;
    element.disableRemotePlayback = true; // as the managed one wants it
    const { signal } = this.#ending;
    // Firefox would gather seconds before it plays by itself.
    element.addEventListener("loadeddata", () => element.play().catch(() => {}), { once: true, signal });
    element.addEventListener("playing", () => this.#say("playing"), { signal });
    element.addEventListener("pause", () => element.ended || this.#say("paused"), { signal });
    element.addEventListener("play", () => this.#stayNear(), { signal });
    element.addEventListener("ended", () => this.#say("ended"), { signal });
  }

  /** Streams until the end. A connection that breaks is made once more each time that something came. */
  async run() {
    if (!Source) return this.#say("unplayable");
    let tries = 2;
    while (tries > 0) {
      const error = await this.#stream(() => (tries = 2)).catch((thrown) => thrown);
      const isOver = await this.#isOver();
      if (this.#ending.signal.aborted) return;
      if (isOver) return this.#finish();
      if (error?.name === "NotSupportedError") return this.#say("unplayable");
      if (error?.status >= 400 && error.status < 500) return this.#say("lost", error.message);
      tries -= 1;
      if (tries) await wait(AGAIN);
    }
    this.#say("lost");
  }

  /** Ends it, and lets go of what is held. */
  close() {
    this.#ending.abort();
    this.#element.removeAttribute("src");
    this.#element.load();
  }

  /** Seconds between what is shown and the newest frame. */
  get behind() {
    const { buffered, currentTime } = this.#element;
    return buffered.length ? Math.max(0, buffered.end(buffered.length - 1) - currentTime) : 0;
  }

  async #stream(came) {
    const response = await getLive(this.#id, this.#ending.signal);
    await this.#open(response.headers.get("Content-Type"));
    const reader = response.body.getReader();
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        await this.#append(part.value);
        came();
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  /** Makes what is appended to, or readies it for another beginning of the stream. */
  async #open(type) {
    if (this.#buffer) return this.#buffer.abort();
    if (!Source.isTypeSupported(type)) throw new DOMException(type, "NotSupportedError");
    this.#source = new Source();
    const address = URL.createObjectURL(this.#source);
    this.#element.src = address;
    await heard(this.#source, "sourceopen");
    URL.revokeObjectURL(address);
    this.#buffer = this.#source.addSourceBuffer(type);
  }

  async #append(bytes) {
    try {
      this.#buffer.appendBuffer(bytes);
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      await this.#trim(LEAD);
      this.#buffer.appendBuffer(bytes);
    }
    await heard(this.#buffer, "updateend");
    this.#stayNear();
    await this.#trim(KEPT);
  }

  /** Goes on from where there is something, not far behind the newest frame. */
  #stayNear() {
    const { buffered, currentTime } = this.#element;
    if (!buffered.length || this.#source.readyState !== "open") return;
    const start = buffered.start(buffered.length - 1);
    const isFar = this.behind > FAR && !this.#element.paused;
    const isStuck = currentTime < start && this.#element.readyState < HTMLMediaElement.HAVE_FUTURE_DATA;
    if (isFar || isStuck) this.#element.currentTime = Math.max(start, buffered.end(buffered.length - 1) - LEAD);
    if (this.behind < LEAD) this.#element.playbackRate = 1;
    else if (this.behind > 2 * LEAD) this.#element.playbackRate = HURRY;
  }

  /** Removes what is older than some seconds before the newest frame. */
  async #trim(seconds) {
    const { buffered } = this.#buffer;
    const until = buffered.length ? buffered.end(buffered.length - 1) - seconds : 0;
    if (!buffered.length || until - buffered.start(0) < 1) return;
    this.#buffer.remove(0, until);
    await heard(this.#buffer, "updateend");
  }

  async #isOver() {
    try {
      const known = find(this.#id);
      return !isActive(known && !isActive(known) ? known : await getVideo(this.#id));
    } catch {
      return false;
    }
  }

  #finish() {
    if (this.#source?.readyState === "open") this.#source.endOfStream();
    if (this.#element.paused) this.#say("ended");
  }

  #say(state, words = null) {
    if (this.#state === state || this.#state === "ended") return;
    this.#state = state;
    this.#tell(state, words);
  }
}

const heard = (target, name) => new Promise((done) => target.addEventListener(name, done, { once: true }));
