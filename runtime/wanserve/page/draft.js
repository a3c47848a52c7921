// What the browser keeps over reloads, above all what was typed. Files are not kept.

/** The kept value, or null. */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(`wanrun.${name}`));
  } catch {
    return null;
  }
}

/** Keeps a value; null removes it. A browser that keeps nothing, or is full, is no error. */
export function save(name, value) {
  try {
    if (value === null) localStorage.removeItem(`wanrun.${name}`);
    else localStorage.setItem(`wanrun.${name}`, JSON.stringify(value));
  } catch {
    // The draft then lasts as long as the page.
  }
}
