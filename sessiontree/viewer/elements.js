"use strict";
// Elements, made of text alone: nothing that a session holds is ever read as markup.

// h("p.note", {title: "…"}, "text", element): a tag with classes, properties, listeners (`onclick`), children.
function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length > 0) element.className = classes.join(" ");
  const [given] = rest;
  const hasProperties = given !== null && typeof given === "object" && !(given instanceof Node) && !Array.isArray(given);
  for (const [name, value] of Object.entries(hasProperties ? given : {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  fill(element, hasProperties ? rest.slice(1) : rest);
  return element;
}

// Have an element hold these and nothing else; lists are taken apart, and what is null or false is left out.
function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

// A line of facts: a list of [name, value]; a value is text or an element; null leaves it out.
function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl.facts",
    rows.map(([name, value]) => [h("dt", name), h("dd", value)]),
  );
}

function section(title, extra, ...children) {
  return h("details.section", { open: true }, h("summary", h("span", title), h("span.spring"), extra), children);
}

function copying(text, shown) {
  const button = h("button.copy", { type: "button", title: "Copy" }, shown ?? text);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.classList.add("done");
      setTimeout(() => button.classList.remove("done"), 900);
    } catch {
      getSelection().selectAllChildren(button); // to be copied by hand
    }
  });
  return button;
}

// A table of many rows of which those in sight are there. `cells(row)`: [[text, class], ...].
function longTable(heads, count, cells, rowHeight = 20) {
  const body = h("div.rows");
  const head = h(
    "div.row.head",
    heads.map(([name, kind]) => h("span", { className: kind ?? "" }, name)),
  );
  const box = h("div.table", { tabIndex: 0 }, head, body);
  body.style.height = `${count * rowHeight}px`;
  let shown = "";
  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / rowHeight) - 8);
    const last = Math.min(count, Math.ceil((box.scrollTop + (box.clientHeight || 400)) / rowHeight) + 8);
    if (`${first} ${last}` === shown) return;
    shown = `${first} ${last}`;
    const rows = [];
    for (let row = first; row < last; row++) {
      const line = h(
        "div.row",
        cells(row).map(([text, kind]) => h("span", { className: kind ?? "", title: text }, text)),
      );
      line.style.top = `${row * rowHeight}px`;
      line.dataset.row = row;
      if (row === box.emphasised) line.classList.add("here");
      rows.push(line);
    }
    body.replaceChildren(...rows);
  }
  box.addEventListener("scroll", draw, { passive: true });
  box.go = (row) => {
    box.emphasised = row;
    shown = "";
    box.scrollTop = Math.max(0, row * rowHeight - box.clientHeight / 2);
    draw();
  };
  requestAnimationFrame(draw);
  draw();
  return box;
}
