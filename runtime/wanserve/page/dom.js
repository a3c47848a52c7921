// Small helpers for building and finding nodes; text always goes in as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** Makes an element. A function is a listener, `text` the text, true an empty attribute; null and false are left out. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An inline symbol of index.html; it says nothing to screen readers. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** Sets a text only where it differs, so that a selection or a reader's place in it stays. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Puts nodes in order inside a parent, moving only those that are out of place. */
export function arrange(parent, nodes) {
  for (const old of [...parent.children]) if (!nodes.includes(old)) old.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

/** Calls a function once, a while after the last call. */
export function debounce(action, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}

/** Calls a function once for all calls that come together, also where no frames are drawn. */
export function together(action) {
  let planned = false;
  return () => {
    if (planned) return;
    planned = true;
    setTimeout(() => {
      planned = false;
      action();
    }, 16);
  };
}

export const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** Whether somebody points with a mouse, so that a keyboard is likely and a focus opens no screen keyboard. */
export const hasMouse = () => matchMedia("(hover: hover) and (pointer: fine)").matches;
