"use strict";
// The tree on its canvas: only what is in sight is drawn, and of that, from far away, only what a pixel can show.

const CARD = { width: 208, height: 46, across: 238, down: 60 }; // of an item, and from one to the next

const READABLE = 0.5; // the least scale at which cards have their words

// Text with whatever is not seen, or turns other text around, spelled out.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|[\u{e0000}-\u{e0fff}]/gu;
const spelled = (text) => text.replace(HIDDEN, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
const oneLine = (text) => spelled(text.replace(/\n/g, "⏎").replace(/\t/g, "→"));
const short = (value) =>
  typeof value !== "number"
    ? String(value)
    : Number.isInteger(value)
      ? value.toLocaleString("en")
      : String(Number(value.toPrecision(4)));
const counted = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

class Drawing {
  constructor(canvas, map, theme) {
    this.canvas = canvas;
    this.map = map;
    this.theme = theme;
    this.scale = 1;
    this.x = 0; // of the canvas's corner, in the tree's units
    this.y = 0;
    this.layout = null;
    this.state = null; // what app.js keeps: session, chosen, marked, hovered, matches, onPath, colours, fresh
    this._asked = false;
    this._widths = new Map();
    this._mapPicture = null;
    this.frames = 0;
    this._context = canvas.getContext("2d", { alpha: false });
    this._resize();
    new ResizeObserver(() => this._resize()).observe(canvas);
  }

  _resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.max(1, Math.round(this.width * ratio));
    this.canvas.height = Math.max(1, Math.round(this.height * ratio));
    this.ratio = ratio;
    this._mapPicture = null;
    this.ask();
  }

  show(layout) {
    this.layout = layout;
    this._mapPicture = null;
    this.ask();
  }

  recoloured() {
    this._mapPicture = null;
    this.ask();
  }

  ask() {
    if (this._asked) return;
    this._asked = true;
    requestAnimationFrame(() => {
      this._asked = false;
      this.draw();
    });
  }

  // --- where ---------------------------------------------------------------------------------------------------------
  bounds() {
    const { numColumns, numRows } = this.layout;
    return { width: (numColumns - 1) * CARD.across + CARD.width, height: (numRows - 1) * CARD.down + CARD.height };
  }

  fit() {
    const { width, height } = this.bounds();
    this.scale = Math.max(this.least(), Math.min(1, (this.width - 64) / width, (this.height - 64) / height));
    this.x = (width - this.width / this.scale) / 2;
    this.y = (height - this.height / this.scale) / 2;
    this.ask();
  }

  // The scale at which all of it is in sight, or less.
  least() {
    const { width, height } = this.bounds();
    return Math.max(0.0005, Math.min(0.2, (0.8 * this.width) / width, (0.8 * this.height) / height));
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const scale = Math.min(2.5, Math.max(this.least(), this.scale * factor));
    this.x += x / this.scale - x / scale;
    this.y += y / this.scale - y / scale;
    this.scale = scale;
    this._keepNear();
    this.ask();
  }

  pan(dx, dy) {
    this.x += dx / this.scale;
    this.y += dy / this.scale;
    this._keepNear();
    this.ask();
  }

  // Some of the tree stays in sight.
  _keepNear() {
    const { width, height } = this.bounds();
    const seen = [this.width / this.scale, this.height / this.scale];
    this.x = Math.max(-0.85 * seen[0], Math.min(width - 0.15 * seen[0], this.x));
    this.y = Math.max(-0.85 * seen[1], Math.min(height - 0.15 * seen[1], this.y));
  }

  centre(item, scale = this.scale) {
    this.scale = scale;
    this.x = this.layout.columns[item] * CARD.across + CARD.width / 2 - this.width / scale / 2;
    this.y = this.layout.rows[item] * CARD.down + CARD.height / 2 - this.height / scale / 2;
    this.ask();
  }

  // Move as little as shows an item.
  reveal(item) {
    const margin = 24 / this.scale;
    const left = this.layout.columns[item] * CARD.across - margin;
    const top = this.layout.rows[item] * CARD.down - margin;
    const right = left + CARD.width + 2 * margin;
    const bottom = top + CARD.height + 2 * margin;
    this.x = Math.min(left, Math.max(this.x, right - this.width / this.scale));
    this.y = Math.min(top, Math.max(this.y, bottom - this.height / this.scale));
    this.ask();
  }

  // Where an item's corner is on the canvas.
  place(item) {
    const { columns, rows } = this.layout;
    return [(columns[item] * CARD.across - this.x) * this.scale, (rows[item] * CARD.down - this.y) * this.scale];
  }

  // The item under a point of the canvas, and whether the point is on its handle; item -1 for none.
  under(px, py) {
    const x = px / this.scale + this.x;
    const y = py / this.scale + this.y;
    const slack = Math.max(0, 3 / this.scale - 4);
    const row = Math.floor((y + slack) / CARD.down);
    const column = Math.floor((x + slack) / CARD.across);
    if (this.layout === null) return { item: -1, handle: false };
    const item = this.layout.at(row, column);
    if (item < 0) return { item, handle: false };
    const inX = x - column * CARD.across;
    const inY = y - row * CARD.down;
    const onHandle = Math.hypot(inX - CARD.width - 10, inY - CARD.height / 2) < 10 && this.scale > 0.35;
    if (onHandle && this.state.session.numChildren[this.layout.lasts[item]] > 0) return { item, handle: true };
    return { item: inX <= CARD.width + slack && inY <= CARD.height + slack ? item : -1, handle: false };
  }

  // --- drawing -------------------------------------------------------------------------------------------------------
  draw() {
    const { _context: context, theme, layout } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = theme.ground;
    context.fillRect(0, 0, this.width, this.height);
    this.frames++;
    if (layout === null || layout.count === 0) return;
    const seen = this._inSight();
    if (this.scale > 0.3) this._drawDots(context);
    this._drawLines(context, seen);
    this._drawPaths(context);
    if (this.scale < 0.3) this._drawSpecks(context, seen);
    else this._drawCards(context, seen);
    this._drawMap();
  }

  _drawDots(context) {
    const step = CARD.down * this.scale * (this.scale < 0.6 ? 2 : 1);
    context.fillStyle = this.theme.dots;
    const x = -((this.x * this.scale) % step);
    const y = -((this.y * this.scale) % step);
    for (let dx = x; dx < this.width; dx += step) for (let dy = y; dy < this.height; dy += step) context.fillRect(dx, dy, 1, 1);
  }

  _inSight() {
    const { numColumns, numRows } = this.layout;
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    return {
      left: within(Math.floor((this.x - CARD.width) / CARD.across), numColumns),
      right: within(Math.floor((this.x + this.width / this.scale) / CARD.across) + 1, numColumns),
      top: within(Math.floor((this.y - CARD.height) / CARD.down), numRows),
      bottom: within(Math.floor((this.y + this.height / this.scale) / CARD.down) + 1, numRows),
      rowStep: Math.max(1, Math.floor(1 / (CARD.down * this.scale))), // rows that fall on one pixel
      columnStep: Math.max(1, Math.floor(1 / (CARD.across * this.scale))),
    };
  }

  // Calls `each(item)` for what is in sight, one for each pixel at most.
  _each(seen, each) {
    const { layout } = this;
    for (let row = seen.top; row <= seen.bottom; row += seen.rowStep) {
      const end = layout.rowStarts[row + 1];
      let place = layout.seek(row, seen.left);
      while (place < end) {
        const item = layout.order[place];
        const column = layout.columns[item];
        if (column > seen.right) break;
        each(item, column, row);
        place = seen.columnStep === 1 ? place + 1 : layout.seek(row, column + seen.columnStep);
      }
    }
  }

  _drawLines(context, seen) {
    const { layout, scale } = this;
    const thin = scale < 0.3;
    const middle = CARD.height / 2;
    const gap = (CARD.across - CARD.width) / 2;
    context.strokeStyle = this.theme.line;
    context.lineWidth = thin ? Math.max(0.6, scale * 4) : 1.5;
    context.beginPath();
    const bend = thin ? 0 : Math.min(10, 14 * scale);
    this._each(seen, (item, column, row) => {
      const parent = layout.above[item];
      if (parent < 0) return;
      const x = (column * CARD.across - this.x) * scale;
      const y = (row * CARD.down + middle - this.y) * scale;
      if (layout.rows[parent] === row) {
        context.moveTo(x - (CARD.across - CARD.width) * scale, y);
        context.lineTo(x, y);
      } else {
        const trunk = x - gap * scale;
        if (bend > 0) {
          context.moveTo(trunk, y - bend);
          context.quadraticCurveTo(trunk, y, trunk + bend, y);
        } else context.moveTo(trunk, y);
        context.lineTo(x, y);
      }
    });
    const first = Math.max(0, seen.left - 1);
    for (let column = first; column <= seen.right; column += seen.columnStep) {
      const trunks = layout.trunks[column];
      let low = 0;
      let high = trunks.length;
      while (low < high) {
        const at = (low + high) >> 1;
        if (trunks[at][1] < seen.top) low = at + 1;
        else high = at;
      }
      const x = (column * CARD.across + CARD.width + gap - this.x) * scale;
      let lowest = -Infinity;
      for (let at = low; at < trunks.length && trunks[at][0] <= seen.bottom; at++) {
        const [from, to] = trunks[at];
        const start = (from * CARD.down + middle - this.y) * scale;
        const end = (to * CARD.down + middle - this.y) * scale - bend;
        if (thin && end < lowest + 1) continue;
        lowest = end;
        context.moveTo(x, Math.max(start, -10));
        context.lineTo(x, Math.min(end, this.height + 10));
      }
    }
    context.stroke();
  }

  // The way from the root to the chosen node, and where two that are compared part.
  _drawPaths(context) {
    const { layout, scale, state } = this;
    const middle = CARD.height / 2;
    const gap = (CARD.across - CARD.width) / 2;
    for (const { from, until, colour } of state.paths) {
      context.strokeStyle = colour;
      context.lineWidth = Math.max(1.6, 3 * scale);
      context.beginPath();
      let item = layout.itemOf[from];
      const last = until < 0 ? -1 : layout.itemOf[until];
      while (item >= 0 && item !== last && layout.above[item] >= 0) {
        const parent = layout.above[item];
        const [x, y] = this.place(item);
        const [px, py] = this.place(parent);
        const trunk = x - gap * scale;
        context.moveTo(x, y + middle * scale);
        if (y !== py) {
          context.lineTo(trunk, y + middle * scale);
          context.lineTo(trunk, py + middle * scale);
        }
        context.lineTo(px, py + middle * scale);
        item = parent;
      }
      context.stroke();
    }
  }

  _drawSpecks(context, seen) {
    const { layout, state, scale } = this;
    const { colourOf, palette, matches } = state;
    const width = Math.max(1, CARD.width * scale);
    const height = Math.max(1, CARD.height * scale);
    let last = -1;
    context.globalAlpha = 1;
    this._each(seen, (item, column, row) => {
      const node = layout.nodes[item];
      const colour = matches !== null && !this._matches(item) ? palette.length - 1 : colourOf[node];
      if (colour !== last) context.fillStyle = palette[(last = colour)];
      context.fillRect((column * CARD.across - this.x) * scale, (row * CARD.down - this.y) * scale, width, height);
    });
    const special = (item, colour) => {
      if (item < 0) return;
      const [x, y] = this.place(item);
      context.strokeStyle = colour;
      context.lineWidth = 2;
      context.strokeRect(x - 2, y - 2, Math.max(6, width + 4), Math.max(6, height + 4));
    };
    if (state.hovered >= 0) special(state.hovered, this.theme.text);
    if (state.chosen >= 0) special(layout.itemOf[state.chosen], this.theme.accent);
    if (state.marked >= 0) special(layout.itemOf[state.marked], this.theme.other);
    if (state.session.heads.length > 40) return;
    for (const [at] of state.session.headsAt) this._drawHead(context, at, (across, down) => [across + 4, down / 2]);
  }

  // The names of a node's heads, as a badge whose left middle is where `place(width, height)` says, from the corner of its card.
  _drawHead(context, at, place) {
    const item = this.layout.itemOf[at];
    if (item < 0) return;
    const [left, top] = this.place(item);
    const [dx, dy] = place(Math.max(1, CARD.width * this.scale), Math.max(1, CARD.height * this.scale));
    const [x, y] = [left + dx, top + dy];
    if (x < -200 || y < -20 || x > this.width + 20 || y > this.height + 20) return;
    context.font = `600 10.5px ${this.theme.font}`;
    context.textBaseline = "middle";
    const name = this._cut(context, oneLine(this.state.session.headsAt.get(at).join(" ")), 140);
    context.fillStyle = this.theme.headGround;
    this._rounded(context, x, y - 8, this._width(context, name) + 12, 16, 8);
    context.fill();
    context.fillStyle = this.theme.head;
    context.fillText(name, x + 6, y + 0.5);
  }

  _matches(item) {
    const { matches } = this.state;
    const first = this.layout.nodes[item];
    if (!this.layout.isFold(item)) return matches.has(first);
    for (let at = first; ; at = this.state.session.firstChild[at]) {
      if (matches.has(at)) return true;
      if (at === this.layout.lasts[item]) return false;
    }
  }

  _drawCards(context, seen) {
    this._each(seen, (item, column, row) => this._drawCard(context, item, column, row));
    if (this.scale >= READABLE) return;
    this._each(seen, (item) => {
      const node = this.layout.nodes[item];
      if (this.state.session.headsAt.has(node)) this._drawHead(context, node, (width, height) => [width - 14, -5]);
    });
  }

  _drawCard(context, item, column, row) {
    const { layout, scale, state, theme } = this;
    const { session } = state;
    const node = layout.nodes[item];
    const fold = layout.isFold(item);
    const [x, y] = [(column * CARD.across - this.x) * scale, (row * CARD.down - this.y) * scale];
    const width = CARD.width * scale;
    const height = CARD.height * scale;
    const colour = state.palette[state.colourOf[node]];
    const radius = Math.min(9, 9 * scale);
    const chosen = state.chosen >= 0 && layout.itemOf[state.chosen] === item;
    const marked = state.marked >= 0 && layout.itemOf[state.marked] === item;
    if (state.matches !== null && !this._matches(item)) {
      context.fillStyle = theme.ground; // lines are not seen through it
      this._rounded(context, x, y, width, height, radius);
      context.fill();
      context.globalAlpha = 0.28;
    }
    if (fold) {
      for (const shift of [6, 3]) {
        context.fillStyle = theme.stack;
        context.strokeStyle = theme.border;
        context.lineWidth = 1;
        this._rounded(context, x + shift * scale, y + shift * scale, width, height, radius);
        context.fill();
        context.stroke();
      }
    }
    context.fillStyle = chosen ? theme.chosen : theme.card;
    this._rounded(context, x, y, width, height, radius);
    context.fill();
    if (!chosen) {
      const whole = context.globalAlpha;
      context.globalAlpha = whole * state.tint;
      context.fillStyle = colour;
      context.fill();
      context.globalAlpha = whole;
    }
    const error = session.errors.has(node);
    context.strokeStyle = error
      ? theme.bad
      : chosen
        ? theme.accent
        : marked
          ? theme.other
          : item === state.hovered
            ? theme.strong
            : theme.border;
    context.lineWidth = chosen || marked ? 2 : 1;
    if (fold) context.setLineDash([4, 3]);
    context.stroke();
    context.setLineDash([]);
    const fresh = state.fresh.get(node);
    if (fresh !== undefined) {
      const age = (performance.now() - fresh) / 2500;
      if (age < 1) {
        context.strokeStyle = theme.live;
        context.globalAlpha = 1 - age;
        context.lineWidth = 3;
        this._rounded(context, x - 3, y - 3, width + 6, height + 6, radius + 3);
        context.stroke();
        context.globalAlpha = 1;
        this.ask();
      } else state.fresh.delete(node);
    }
    context.fillStyle = colour;
    const bar = Math.max(3, 5 * scale);
    this._rounded(context, x + 5 * scale, y + 7 * scale, bar, height - 14 * scale, bar / 2);
    context.fill();
    const hidden = session.below[layout.lasts[item]];
    const children = session.numChildren[layout.lasts[item]];
    if (children > 0 && (state.collapsed.has(node) || item === state.hovered || chosen))
      this._drawHandle(context, node, hidden, x + width, y + height / 2);
    if (scale >= READABLE) this._drawWords(context, item, x, y, fold, error);
    else {
      context.font = `600 10px ${theme.font}`;
      context.textBaseline = "middle";
      context.fillStyle = error ? theme.bad : theme.text;
      const value = state.values?.[node];
      const name = fold ? "⋯" : oneLine(value === undefined ? (session.roles[node] ?? "root") : short(value));
      context.fillText(this._cut(context, name, width - 18 * scale - 4), x + 13 * scale + 3, y + height / 2 + 0.5);
    }
    context.globalAlpha = 1;
  }

  _drawHandle(context, node, hidden, x, y) {
    const { scale, theme, state } = this;
    const collapsed = state.collapsed.has(node);
    const text = collapsed ? `+${hidden.toLocaleString("en")}` : "−";
    context.font = `600 ${Math.max(9, 11 * scale)}px ${theme.font}`;
    context.textBaseline = "middle";
    const size = Math.max(16 * scale, this._width(context, text) + 9 * scale);
    context.fillStyle = collapsed ? theme.accent : theme.card;
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.2;
    this._rounded(context, x + 2 * scale, y - 8 * scale, size, 16 * scale, 8 * scale);
    context.fill();
    context.stroke();
    context.fillStyle = collapsed ? theme.onAccent : theme.accent;
    context.fillText(text, x + 2 * scale + (size - this._width(context, text)) / 2, y + 0.5);
  }

  _drawWords(context, item, x, y, fold, error) {
    const { layout, scale, state, theme } = this;
    const { session } = state;
    const node = layout.nodes[item];
    const left = x + 17 * scale;
    let room = (CARD.width - 26) * scale;
    context.textBaseline = "alphabetic";
    const small = 11 * scale;
    const large = 12.5 * scale;
    const first = y + 19 * scale;
    const second = y + 36 * scale;
    if (fold) {
      let turns = 1;
      let tokens = session.sizes[node];
      for (let at = node; at !== layout.lasts[item]; turns++) tokens += session.sizes[(at = session.firstChild[at])];
      context.fillStyle = theme.text;
      context.font = `600 ${large}px ${theme.font}`;
      context.fillText(`⋯ ${counted(turns, "turn")}`, left, first);
      context.fillStyle = theme.dim;
      context.font = `${small}px ${theme.font}`;
      context.fillText(`${counted(tokens, "token")}, click to unfold`, left, second);
      return;
    }
    // On the right of the first line: how many tokens.
    context.font = `${small}px ${theme.font}`;
    const size = session.sizes[node].toLocaleString("en");
    const sizeWidth = this._width(context, size);
    context.fillStyle = theme.dim;
    context.fillText(size, x + (CARD.width - 9) * scale - sizeWidth, first);
    let right = x + (CARD.width - 15) * scale - sizeWidth;
    for (const kind of session.media.get(node) ?? []) {
      right -= 13 * scale;
      this._drawIcon(context, kind, right, y + 8.5 * scale, 11 * scale);
      right -= 3 * scale;
    }
    if (session.pins.has(node)) {
      context.fillStyle = theme.head;
      right -= 9 * scale;
      context.beginPath();
      context.arc(right + 4 * scale, y + 14.5 * scale, 3.5 * scale, 0, 7);
      context.fill();
      right -= 4 * scale;
    }
    // On the left: the role, heads, and how its generation ended if not by itself.
    context.font = `600 ${large}px ${theme.font}`;
    context.fillStyle = error ? theme.bad : theme.text;
    const role = error ? "cannot be read" : (session.roles[node] ?? "root");
    const heads = session.headsAt.get(node);
    room = right - left;
    const name = this._cut(context, oneLine(role), heads === undefined ? room : Math.min(room, 92 * scale));
    context.fillText(name, left, first);
    let at = left + this._width(context, name) + 6 * scale;
    context.font = `600 ${10 * scale}px ${theme.font}`;
    if (heads !== undefined && right - at > 26 * scale) {
      const shown = this._cut(context, oneLine(heads.join(" ")), right - at - 12 * scale);
      const width = this._width(context, shown) + 10 * scale;
      context.fillStyle = theme.headGround;
      this._rounded(context, at, y + 7.5 * scale, width, 15 * scale, 7.5 * scale);
      context.fill();
      context.fillStyle = theme.head;
      context.fillText(shown, at + 5 * scale, y + 18.3 * scale);
      at += width + 5 * scale;
    }
    const reason = session.finishReasons[node];
    if (reason !== null && reason !== undefined && reason !== "stop" && right - at > 24 * scale) {
      context.fillStyle = theme.warning;
      context.fillText(this._cut(context, oneLine(reason), right - at), at, first);
    }
    context.fillStyle = theme.dim;
    const label = error ? session.errors.get(node) : session.labels[node] || session.ids[node];
    context.font = `${small}px ${/^[\d …]*$/.test(label) ? theme.mono : theme.font}`;
    context.fillText(this._cut(context, oneLine(label), (CARD.width - 26) * scale), left, second);
  }

  _drawIcon(context, kind, x, y, size) {
    context.strokeStyle = this.theme.media;
    context.lineWidth = Math.max(1, size / 9);
    context.beginPath();
    if (kind === "image") {
      context.rect(x, y + size * 0.08, size, size * 0.84);
      context.moveTo(x, y + size * 0.75);
      context.lineTo(x + size * 0.35, y + size * 0.42);
      context.lineTo(x + size * 0.6, y + size * 0.68);
      context.lineTo(x + size * 0.75, y + size * 0.55);
      context.lineTo(x + size, y + size * 0.78);
    } else if (kind === "video") {
      context.rect(x, y + size * 0.08, size, size * 0.84);
      context.moveTo(x + size * 0.38, y + size * 0.28);
      context.lineTo(x + size * 0.72, y + size * 0.5);
      context.lineTo(x + size * 0.38, y + size * 0.72);
      context.closePath();
    } else {
      for (const [at, height] of [
        [0.1, 0.3],
        [0.35, 0.8],
        [0.6, 0.5],
        [0.85, 0.25],
      ]) {
        context.moveTo(x + size * at, y + size * (0.5 - height / 2));
        context.lineTo(x + size * at, y + size * (0.5 + height / 2));
      }
    }
    context.stroke();
  }

  _rounded(context, x, y, width, height, radius) {
    context.beginPath();
    context.roundRect(x, y, width, height, radius);
  }

  _width(context, text) {
    const key = `${context.font}\n${text}`;
    let width = this._widths.get(key);
    if (width === undefined) {
      if (this._widths.size > 20000) this._widths.clear();
      width = context.measureText(text).width;
      this._widths.set(key, width);
    }
    return width;
  }

  // As much of a text as there is room for.
  _cut(context, text, room) {
    if (room <= 0) return "";
    if (this._width(context, text) <= room) return text;
    let low = 0;
    let high = Math.min(text.length, 100);
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this._width(context, text.slice(0, middle) + "…") <= room) low = middle;
      else high = middle - 1;
    }
    return text.slice(0, low) + "…";
  }

  // --- the map -------------------------------------------------------------------------------------------------------
  _drawMap() {
    const { map, layout, theme } = this;
    const { width, height } = this.bounds();
    const all = width * this.scale <= this.width && height * this.scale <= this.height;
    map.hidden = all;
    if (all) return;
    const size = [map.clientWidth, map.clientHeight];
    const ratio = this.ratio;
    const context = map.getContext("2d");
    if (map.width !== Math.round(size[0] * ratio)) {
      map.width = Math.round(size[0] * ratio);
      map.height = Math.round(size[1] * ratio);
      this._mapPicture = null;
    }
    this._mapScale = [Math.min(0.2, (size[0] - 8) / width), Math.min(0.2, (size[1] - 8) / height)];
    this._mapCorner = [(size[0] - width * this._mapScale[0]) / 2, (size[1] - height * this._mapScale[1]) / 2];
    const [left, top] = this._mapCorner;
    if (this._mapPicture === null) {
      this._mapPicture = document.createElement("canvas");
      this._mapPicture.width = map.width;
      this._mapPicture.height = map.height;
      const picture = this._mapPicture.getContext("2d");
      picture.scale(ratio, ratio);
      const [sx, sy] = this._mapScale;
      const [w, h] = [Math.max(1, CARD.width * sx), Math.max(1, CARD.height * sy)];
      let last = -1;
      const seen = new Uint8Array(Math.ceil(size[0] + 1) * Math.ceil(size[1] + 1));
      for (let item = 0; item < layout.count; item++) {
        const x = left + layout.columns[item] * CARD.across * sx;
        const y = top + layout.rows[item] * CARD.down * sy;
        const pixel = Math.floor(y) * Math.ceil(size[0] + 1) + Math.floor(x);
        if (w <= 1 && h <= 1 && seen[pixel]) continue;
        seen[pixel] = 1;
        const colour = this.state.colourOf[layout.nodes[item]];
        if (colour !== last) picture.fillStyle = this.state.palette[(last = colour)];
        picture.fillRect(x, y, w, h);
      }
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, map.width, map.height);
    context.globalAlpha = 0.75;
    context.drawImage(this._mapPicture, 0, 0);
    context.globalAlpha = 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [sx, sy] = this._mapScale;
    const [x, y] = [left + this.x * sx, top + this.y * sy];
    const [w, h] = [Math.max(4, (this.width / this.scale) * sx), Math.max(4, (this.height / this.scale) * sy)];
    context.fillStyle = theme.glass;
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.5;
    context.fillRect(x, y, w, h);
    context.strokeRect(x, y, w, h);
  }

  // Have a place of the map in the middle.
  goToMap(px, py) {
    const [sx, sy] = this._mapScale;
    const [left, top] = this._mapCorner;
    this.x = (px - left) / sx - this.width / this.scale / 2;
    this.y = (py - top) / sy - this.height / this.scale / 2;
    this._keepNear();
    this.ask();
  }
}
