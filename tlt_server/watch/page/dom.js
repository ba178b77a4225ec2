// Elements. What servers and clients say is inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; children are nodes, or text. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Likewise of SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(node, name, value);
  node.append(...children);
  return node;
}

/** An attribute; null takes it away. Untouched where it stays, as screen readers would say it again. */
export function set(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** The text of a node; untouched where it stays. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

const kept = new WeakMap();

/** Makes the children of `parent` those of `items`, in their order. One that stays keeps its node, and so the focus.
 * make(item) gives {node, update(item)}. */
export function keyed(parent, items, keyOf, make) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, part] of before) {
    if (now.has(key)) continue;
    part.node.remove();
    before.delete(key);
  }
  let place = parent.firstChild;
  for (const [key, item] of now) {
    if (!before.has(key)) before.set(key, make(item));
    const part = before.get(key);
    part.update(item);
    if (part.node === place) place = place.nextSibling;
    else parent.insertBefore(part.node, place);
  }
  kept.set(parent, before);
}
