// Facts of videos in plain words: states, shapes, places in line, times.

const ORDINALS = ["First", "Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Ninth", "Tenth"];
const PHASES = {
  queued: "Waiting",
  build: "Building this size",
  loading: "Loading the model",
  media: "Reading the files",
  text: "Reading the prompt",
  decode: "Decoding",
  encode: "Writing the file",
  live: "Live",
  cancelling: "Cancelling",
};
const LABELS = {
  num_steps: "Steps",
  guidance_scale: "Guidance",
  guidance_scale_2: "Guidance, second expert",
  guidance_start: "Guidance from (share of the steps)",
  guidance_end: "Guidance until (share of the steps)",
  flow_shift: "Flow shift",
  fps: "Frames per second",
  num_videos: "Number of videos",
  num_frames: "Frames",
  schedule: "Preset",
  lora: "LoRAs",
  timesteps: "Timesteps",
  negative_prompt: "Negative prompt",
};

/** A name of an option as a label. */
export function label(name) {
  const words = name.replaceAll("_", " ");
  return LABELS[name] ?? words.charAt(0).toUpperCase() + words.slice(1);
}

/** A text of the server's, with the labels of the options that it names. */
export const plain = (text) => text.replace(/`(\w+)`/g, (_, name) => label(name)).replace(/\b[a-z]+(_[a-z0-9]+)+\b/g, labelled);
const labelled = (name) => LABELS[name] ?? name;

export function place(position) {
  if (position <= ORDINALS.length) return `${ORDINALS[position - 1]} in line`;
  const teen = position % 100 >= 11 && position % 100 <= 13;
  const ending = teen ? "th" : (["th", "st", "nd", "rd"][position % 10] ?? "th");
  return `${position}${ending} in line`;
}

/** What a job is doing. */
export function state(video) {
  if (video.status === "queued") return video.position ? place(video.position) : "Waiting";
  if (video.status === "in_progress") {
    const clips = video.options.clips ?? 1;
    const clip = Math.min(Math.floor((video.step * clips) / video.steps) + 1, clips);
    const part = clips > 1 && video.step ? `Clip ${clip} of ${clips}: ` : "";
    if (video.phase === "steps") return video.step ? `${part}Step ${video.step} of ${video.steps}` : "Starting the steps";
    return PHASES[video.phase] ?? "Starting";
  }
  return { completed: "Finished", failed: "Failed", cancelled: "Cancelled" }[video.status] ?? video.status;
}

/** Time that is left, or null. */
export function left(seconds) {
  if (seconds === null || seconds === undefined) return null;
  if (seconds < 8) return "a few seconds left";
  if (seconds < 55) return `about ${Math.round(seconds / 5) * 5} seconds left`;
  if (seconds < 90) return "about a minute left";
  if (seconds < 3570) return `about ${Math.round(seconds / 60)} minutes left`;
  const minutes = Math.round(seconds / 300) * 5;
  return `about ${Math.floor(minutes / 60)} h ${minutes % 60} min left`;
}

/** Time that something took. */
export function took(seconds) {
  if (seconds < 10) return `${+seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** A chosen LoRA with its strength, or with those of two experts. */
export function loraWords({ name, strength, high, low }) {
  const each = [high === undefined ? null : `high ${high}`, low === undefined ? null : `low ${low}`].filter(Boolean);
  return `${name} ${each.length ? each.join(" ") : (strength ?? 1)}`;
}

export const sizeWords = (size) => size.replace(/[xX*]/, " × ");
export const lengthWords = (seconds) => `${Number(seconds).toFixed(1)} s`;
export const shapeWords = ({ size, seconds }) => `${sizeWords(size)}, ${lengthWords(seconds)}`;

/** Width divided by height. */
export function aspect(size) {
  const [width, height] = size.split(/[xX*]/).map(Number);
  return width / height;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "long" });
const FULL = new Intl.DateTimeFormat("en-GB", { dateStyle: "long", timeStyle: "short" });

/** When something was, for a card: the time today, the day before that. */
export function when(seconds) {
  const date = new Date(seconds * 1000);
  return date.toDateString() === new Date().toDateString() ? CLOCK.format(date) : DAY.format(date);
}

export const whenFull = (seconds) => FULL.format(new Date(seconds * 1000));

/** The beginning of a text, for names and lists. */
export function short(text, length = 60) {
  const line = text.slice(0, length * 2).replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length).trimEnd()}…` : line;
}

/** What stands for a prompt; an empty one has words too. */
export const promptWords = (video, length = 300) => short(video.prompt ?? "", length) || "No prompt";
