// The facts of a video as a definition list: its shape, its settings, and how long it took.

import { make } from "./dom.js";
import { label, lengthWords, loraWords, sizeWords, took } from "./words.js";

const SHOWN_ELSEWHERE = [
  "prompt",
  "negative_prompt",
  "model",
  "size",
  "num_frames",
  "num_steps",
  "seed",
  "fps",
  "num_videos",
  "schedule",
  "lora",
];
const STAGES = { loading: "loading", media: "files", text: "prompt", decode: "decoding", encode: "writing" };

/** Fills a definition list with a video's facts. */
export function showFacts(list, video) {
  list.replaceChildren(
    ...factsOf(video)
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: String(value), dir: "auto" }))),
  );
}

function factsOf(video) {
  const { options } = video;
  const media = video.media.map(({ option }) => option);
  const further = Object.entries(options).filter(([name]) => !SHOWN_ELSEWHERE.includes(name) && !media.includes(name));
  return [
    ["Took", time(video)],
    ["Seed", video.seed],
    ["Size", sizeWords(video.size)],
    ["Length", `${lengthWords(video.seconds)}, ${video.num_frames} frames at ${+Number(video.fps).toFixed(2)} fps`],
    ["Steps", video.steps ?? options.num_steps],
    ["Preset", options.schedule],
    ["LoRAs", (options.lora ?? []).map(loraWords).join(", ")],
    ...further.map(([name, value]) => [label(name), Array.isArray(value) ? value.join(", ") : value]),
    ["Negative prompt", options.negative_prompt],
    ["Prompts", prompts(video)],
    ...video.media.map(({ option, name }) => [label(option), name]),
    ["Model", video.model],
    ["Id", video.id],
  ];
}

/** The prompts of a live video, each with the second from which it was followed. */
function prompts({ live, fps }) {
  const each = live?.prompts ?? [];
  return each.length > 1 ? each.map(({ first, prompt }) => `${lengthWords(first / fps)}: ${prompt}`).join("\n") : null;
}

function time({ started_at: started, completed_at: completed, stage_durations: durations }) {
  if (!started || !completed) return null;
  const stages = Object.entries(durations ?? {}).map(([name, seconds]) => `${STAGES[name] ?? name} ${took(seconds)}`);
  const whole = took(completed - started);
  return stages.length ? `${whole}\n${stages.join(", ")}` : whole;
}
