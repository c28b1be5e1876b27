"use strict";
// What nodes can be coloured by, and the value that each then has.

const Colours = (() => {
  function blended(stops, part) {
    const place = part * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    const [one, two] = [stops[low], stops[low + 1]].map((hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16)));
    return `rgb(${one.map((value, channel) => Math.round(value + (two[channel] - value) * (place - low))).join(",")})`;
  }

  function choices(session) {
    const heads = session.heads.length > 0 ? [["head", "head"]] : [];
    const columns = session.columns.map((column, number) => [`column ${number}`, `${column.group}: ${spelled(column.name)}`]);
    return [
      ["role", "role"],
      ...heads,
      ["time", "time (commit order)"],
      ["finish", "finish reason"],
      ["origin", "given or generated"],
      ["tokens", "tokens"],
      ["depth", "depth"],
      ...columns,
    ];
  }

  // For each node a value, undefined where it has none; whether values are numbers.
  function valuesFor(session, by) {
    const all = (of) => Array.from({ length: session.count }, (_, node) => of(node));
    if (by === "time") return all((node) => node);
    if (by === "tokens") return all((node) => session.sizes[node]);
    if (by === "depth") return all((node) => session.depths[node]);
    if (by === "finish") return all((node) => session.finishReasons[node] ?? undefined);
    if (by === "origin") return all((node) => (node === 0 ? undefined : session.generated[node] ? "generated" : "given"));
    if (by === "head") return headsOf(session);
    if (by.startsWith("column ")) {
      const column = session.columns[Number(by.slice(7))];
      const values = new Array(session.count).fill(undefined);
      column.ordinals.forEach((node, i) => (values[node] = column.values[i]));
      return values;
    }
    return all((node) => session.roles[node] ?? undefined);
  }

  // Of each node the head whose path it is on, where that is one alone.
  function headsOf(session) {
    const below = new Int32Array(session.count);
    const sum = new Float64Array(session.count);
    session.heads.forEach(([, node], number) => {
      if (node >= session.count) return;
      below[node]++;
      sum[node] += number;
    });
    for (let node = session.count - 1; node > 0; node--) {
      const parent = session.parents[node];
      if (parent < 0) continue;
      below[parent] += below[node];
      sum[parent] += sum[node];
    }
    return Array.from(below, (many, node) => (many === 0 ? undefined : many === 1 ? session.heads[sum[node]][0] : "several heads"));
  }

  return { blended, choices, valuesFor };
})();
