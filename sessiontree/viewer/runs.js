"use strict";
// Positions of a turn from its runs: the very table that the library gives, one array for each axis.

const Runs = (() => {
  function table(facts, numAxes, dtype, chunk, count) {
    const axes = Array.from({ length: numAxes }, () => new Float64Array(count));
    const number = dtype.startsWith("float") ? Math.fround : Math.trunc;
    let at = 0;
    for (const run of facts) {
      const length = run[1];
      WRITE[run[0]](run, axes, at, chunk);
      at += length;
    }
    for (const axis of axes) for (let i = 0; i < count; i++) axis[i] = number(axis[i]);
    return axes;
  }

  const WRITE = {
    text([, length, base], axes, at) {
      for (const axis of axes) for (let i = 0; i < length; i++) axis[at + i] = base + i;
    },
    float([, length, base, skip], axes, at) {
      for (const axis of axes) for (let i = 0; i < length; i++) axis[at + i] = Math.fround(Math.fround(skip + i) + base);
    },
    grid([, length, base, time, step, height, width, skip], [t, h, w], at) {
      const size = height * width;
      for (let i = 0; i < length; i++) {
        const k = skip + i;
        t[at + i] = time + Math.floor(k / size) * step;
        h[at + i] = base + Math.floor((k % size) / width);
        w[at + i] = base + (k % width);
      }
    },
    frames([, length, base, times, height, width, skip], [t, h, w], at, chunk) {
      const size = height * width;
      const offsets = chunk.array(times);
      const add = offsets instanceof Float32Array ? (one, two) => Math.fround(one + two) : (one, two) => one + two;
      for (let i = 0; i < length; i++) {
        const k = skip + i;
        t[at + i] = add(Number(offsets[Math.floor(k / size)]), base);
        h[at + i] = add(Math.floor((k % size) / width), base);
        w[at + i] = add(k % width, base);
      }
    },
    absolute([, length, base, width, image, skip], axes, at) {
      const before = axes.length - 3;
      for (let i = 0; i < length; i++) {
        for (let axis = 0; axis < before; axis++) axes[axis][at + i] = base + i;
        axes[before][at + i] = (skip + i) % width;
        axes[before + 1][at + i] = Math.floor((skip + i) / width);
        axes[before + 2][at + i] = image;
      }
    },
    table([, length, number], axes, at, chunk) {
      const values = chunk.array(number);
      axes.forEach((axis, row) => {
        for (let i = 0; i < length; i++) axis[at + i] = Number(values[row * length + i]);
      });
    },
  };

  // Of a node: {decoded, replayed}, the latter null where it is the same.
  function positions(session, node) {
    const { facts, chunk, at } = node;
    const { axes, dtype } = session.facts;
    const of = (runs) => table(runs, axes.length, dtype, chunk, session.sizes[at]);
    return { decoded: of(facts.runs), replayed: facts.replayed_runs === undefined ? null : of(facts.replayed_runs) };
  }

  return { positions };
})();
