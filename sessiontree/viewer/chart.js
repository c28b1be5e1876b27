"use strict";
// A chart of positions over token indexes: a line for each axis, media shaded, what a replay would give dashed where it differs.

// `parts`: [{start, size, decoded, replayed, media: [{start, stop, name}]}] in path order; `axes`: what the axes are called; `theme`.
function positionChart(parts, axes, theme, onPick) {
  const canvas = h("canvas.chart", {
    tabIndex: 0,
    role: "img",
    ariaLabel: `Positions over token indexes, axes ${axes.join(", ")}`,
  });
  const readout = h("output.readout", " ");
  const start = parts[0].start;
  const stop = parts[parts.length - 1].start + parts[parts.length - 1].size;
  const count = stop - start;
  const lines = axes.map((_, axis) => joined(parts, count, (part) => part.decoded[axis]));
  const differs = parts.some((part) => part.replayed !== null);
  const dashed = differs ? axes.map((_, axis) => joined(parts, count, (part) => (part.replayed ?? part.decoded)[axis])) : [];
  let least = Infinity;
  let most = -Infinity;
  for (const line of [...lines, ...dashed]) {
    for (const value of line) {
      if (value < least) least = value;
      if (value > most) most = value;
    }
  }
  const margin = { left: 46, right: 10, top: 10, bottom: 22 };
  let pointed = -1;

  function joined(all, length, of) {
    const values = new Float64Array(length);
    for (const part of all) values.set(of(part), part.start - all[0].start);
    return values;
  }

  function ticks(from, to, some) {
    const rough = Math.max(1, (to - from) / some);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  }

  function geometry() {
    const width = canvas.clientWidth - margin.left - margin.right;
    const height = canvas.clientHeight - margin.top - margin.bottom;
    const x = (index) => margin.left + (count <= 1 ? width / 2 : ((index - start) / (count - 1)) * width);
    const y = (value) => margin.top + (most === least ? height / 2 : (1 - (value - least) / (most - least)) * height);
    return { width, height, x, y };
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { width, height, x, y } = geometry();
    if (width <= 0 || count === 0) return;
    context.font = `10.5px ${theme.font}`;
    for (const part of parts) {
      for (const each of part.media) {
        context.fillStyle = theme.shade;
        const from = x(each.start - 0.5);
        context.fillRect(from, margin.top, Math.max(1.5, x(each.stop - 0.5) - from), height);
      }
    }
    context.strokeStyle = theme.grid;
    context.fillStyle = theme.dim;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(least, most, 5)) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(margin.left, at);
      context.lineTo(margin.left + width, at);
      context.stroke();
      context.fillText(value.toLocaleString("en"), margin.left - 6, at);
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    for (const index of ticks(start, stop - 1, 6)) {
      const text = index.toLocaleString("en");
      const half = context.measureText(text).width / 2;
      context.fillText(
        text,
        Math.min(Math.max(x(index), half), margin.left + width + margin.right - half),
        margin.top + height + 6,
      );
    }
    for (const part of parts.slice(1)) {
      if (parts.length > 60) break;
      context.fillStyle = theme.grid;
      context.fillRect(x(part.start - 0.5), margin.top, 1, height);
    }
    // Axes that stand on each other are told apart by their widths: the last one drawn is the thinnest.
    axes.forEach((_, axis) => {
      context.lineWidth = 1.5 + 1.7 * (axes.length - 1 - axis);
      line(context, dashed[axis], theme.axes[axis % theme.axes.length], x, y, [3, 3]);
      line(context, lines[axis], theme.axes[axis % theme.axes.length], x, y, []);
    });
    if (pointed >= 0) {
      context.strokeStyle = theme.strong;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x(pointed), margin.top);
      context.lineTo(x(pointed), margin.top + height);
      context.stroke();
      axes.forEach((_, axis) => {
        context.fillStyle = theme.axes[axis % theme.axes.length];
        context.beginPath();
        context.arc(x(pointed), y(lines[axis][pointed - start]), 3.2, 0, 7);
        context.fill();
      });
    }
  }

  function line(context, values, colour, x, y, dash) {
    if (values === undefined) return;
    context.strokeStyle = colour;
    context.setLineDash(dash);
    context.beginPath();
    const perPixel = count / Math.max(1, canvas.clientWidth);
    if (perPixel <= 4) {
      for (let i = 0; i < count; i++) {
        if (i === 0) context.moveTo(x(start), y(values[0]));
        else context.lineTo(x(start + i), y(values[i]));
      }
      if (count === 1) context.arc(x(start), y(values[0]), 2, 0, 7);
    } else {
      // Of each pixel the least and the greatest, so that no jump is missed.
      for (let from = 0; from < count; from += perPixel) {
        let [low, high] = [Infinity, -Infinity];
        for (let i = Math.floor(from); i < Math.min(count, from + perPixel); i++) {
          low = Math.min(low, values[i]);
          high = Math.max(high, values[i]);
        }
        const at = x(start + Math.floor(from));
        if (from === 0) context.moveTo(at, y(low));
        context.lineTo(at, y(low));
        context.lineTo(at, y(high));
      }
    }
    context.stroke();
    context.setLineDash([]);
  }

  const number = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(3));

  function point(index) {
    pointed = Math.min(stop - 1, Math.max(start, index));
    draw();
    const at = pointed - start;
    fill(
      readout,
      h("b", `token ${pointed.toLocaleString("en")}`),
      axes.map((name, axis) => [
        h("i", { style: { background: theme.axes[axis % theme.axes.length] } }),
        `${name} ${number(lines[axis][at])}`,
        differs && dashed[axis][at] !== lines[axis][at] ? h("em", ` replayed ${number(dashed[axis][at])}`) : null,
      ]),
    );
  }

  canvas.addEventListener("pointermove", (event) => {
    const { width } = geometry();
    point(start + Math.round(((event.offsetX - margin.left) / width) * (count - 1)));
  });
  canvas.addEventListener("pointerleave", () => {
    pointed = -1;
    legend();
    draw();
  });
  canvas.addEventListener("click", () => pointed >= 0 && onPick?.(pointed));
  canvas.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    point((pointed < 0 ? start : pointed) + (event.key === "ArrowLeft" ? -1 : 1));
    event.stopPropagation();
    event.preventDefault();
  });
  function legend() {
    const names = axes.map((name, axis) => [h("i", { style: { background: theme.axes[axis % theme.axes.length] } }), name]);
    fill(readout, names, differs && h("em", "dashed: as replayed"));
  }
  legend();
  new ResizeObserver(draw).observe(canvas);
  return h("div.charted", canvas, readout);
}
