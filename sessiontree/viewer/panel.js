"use strict";
// What is known of one node, beside the tree.

const Panel = (() => {
  const TEXT = 20000; // characters that are shown before one asks for the rest
  const PATH = 400000; // tokens of a path that a chart has at most

  const show = (value) =>
    value === null || value === undefined ? "none" : typeof value === "object" && "$int" in value ? value.$int : String(value);
  const hasKeys = (value) => Object.keys(value).length > 0;

  function badges(session, at) {
    return [
      (session.headsAt.get(at) ?? []).map((name) => h("b.badge.head", { title: "head" }, spelled(name))),
      session.pins.has(at) ? h("b.badge.pin", "pinned") : null,
      session.generated[at] ? h("b.badge.generated", "generated") : null,
    ];
  }

  function title(app, at, tools) {
    const { session } = app.state;
    const name = session.roles[at] ?? "root";
    return h(
      "header.node",
      h("i.dot", { style: { background: app.state.palette[app.state.colourOf[at]] } }),
      h("h2", spelled(name)),
      h("code", session.ids[at]),
      badges(session, at),
      h("span.spring"),
      tools,
    );
  }

  function nodeButton(app, at) {
    const { session } = app.state;
    const button = h(
      "button.node",
      { type: "button" },
      h("i.dot", { style: { background: app.state.palette[app.state.colourOf[at]] } }),
      session.ids[at],
    );
    button.addEventListener("click", () => app.choose(at, { centre: true }));
    return button;
  }

  // The panel of a node. `known`: what its chunk says, null where this file does not hold that.
  function node(app, at, known, above) {
    const { session } = app.state;
    const mark = h(
      "button",
      { type: "button", title: "Compare another node with this one (M)" },
      app.state.marked === at ? "Unmark" : "Compare …",
    );
    mark.addEventListener("click", () => app.mark(at));
    const error = session.errors.get(at) ?? known?.facts.error;
    const top = [title(app, at, mark)];
    if (error !== undefined) return [...top, h("p.problem", spelled(error))];
    if (known === null) {
      return [
        ...top,
        place(app, at),
        h(
          "p.note",
          "This file leaves out what is told of this node, so as not to be larger. ",
          h("code", "sessiontree serve"),
          " shows it, and ",
          h("code", "view --max-mb"),
          " makes a larger file.",
        ),
      ];
    }
    const positions = Runs.positions(session, known);
    const tokens = tokenTable(session, known, positions);
    return [
      ...top,
      place(app, at, known.facts),
      textSection(session, known),
      positionSection(app, at, known, positions, above, tokens),
      session.sizes[at] > 0 ? section("Tokens", h("small", counted(session.sizes[at], "token")), tokens) : null,
      mediaSection(session, at, known.facts),
      hasKeys(known.facts.metadata)
        ? section("Metadata", null, h("pre.json", spelled(JSON.stringify(known.facts.metadata, null, 2))))
        : null,
      annotationSection(known.facts.annotations),
    ];
  }

  function range(session, at) {
    return `[${session.starts[at].toLocaleString("en")}, ${session.stop(at).toLocaleString("en")})`;
  }

  function place(app, at, known) {
    const { session } = app.state;
    const parent = session.parents[at];
    const children = session.children(at);
    return facts([
      ["id", known ? copying(known.id, h("code", known.id)) : session.ids[at]],
      ["tokens", `${range(session, at)}, ${session.sizes[at].toLocaleString("en")} of its own`],
      ["depth", session.depths[at].toLocaleString("en")],
      ["parent", parent < 0 ? null : nodeButton(app, parent)],
      [
        "children",
        children.length === 0
          ? null
          : h(
              "span.many",
              children.slice(0, 12).map((each) => nodeButton(app, each)),
              children.length > 12 ? ` and ${(children.length - 12).toLocaleString("en")} more` : "",
            ),
      ],
      ["below", session.below[at] > children.length ? counted(session.below[at], "node") : null],
      ["order", `${at.toLocaleString("en")} of ${(session.count - 1).toLocaleString("en")} committed`],
      ["finish reason", known?.finish_reason ? spelled(known.finish_reason) : null],
      ["tail", known?.tail_policy === "drop_last" ? "the last sampled token was dropped" : null],
      ["key", known && known.key !== null ? spelled(known.key) : null],
      ...(known?.links ?? []).map((link) => [link.kind.replace("_", " "), linked(app, link)]),
    ]);
  }

  function linked(app, link) {
    const { session } = app.state;
    const at = session.ids.indexOf(link.node.slice(0, 8));
    return h(
      "span",
      at < 0 ? h("code", link.node.slice(0, 8)) : nodeButton(app, at),
      ` ${counted(link.reused_tokens, "token")} shared`,
    );
  }

  function textSection(session, { facts: known, at }) {
    if (known.text === undefined) {
      return session.sizes[at] === 0
        ? null
        : section("Text", null, h("p.note", "Name a tokenizer to see text: ", h("code", "--tokenizer qwen"), "."));
    }
    if (known.text === "") return null;
    const text = h("pre.text", { dir: "auto" }, spelled(known.text.slice(0, TEXT)));
    const more =
      known.text.length > TEXT ? h("button", { type: "button" }, `All ${known.text.length.toLocaleString("en")} characters`) : null;
    more?.addEventListener("click", () => (text.replaceChildren(spelled(known.text)), more.remove()));
    return section("Text", h("small", counted(known.text.length, "character")), text, more);
  }

  function mediaSpans(session, { facts: known }) {
    return known.media.flatMap((item) => item.spans.map(([start, stop]) => ({ start, stop, name: item.modality })));
  }

  function chartPart(session, known, positions) {
    return { start: session.starts[known.at], size: session.sizes[known.at], ...positions, media: mediaSpans(session, known) };
  }

  function positionSection(app, at, known, positions, above, tokens) {
    const { session } = app.state;
    const { axes } = session.facts;
    const [next, delta] = known.facts.as_decoded;
    const [replayedNext, replayedDelta] = known.facts.as_replayed;
    const box = h("div");
    const own = () => {
      if (session.sizes[at] === 0) return h("p.note", "No tokens of its own.");
      return positionChart([chartPart(session, known, positions)], axes, app.theme, (index) =>
        tokens.go(index - session.starts[at]),
      );
    };
    box.replaceChildren(own());
    const whole = h("button", { type: "button", ariaPressed: "false" }, "Whole path");
    whole.addEventListener("click", async (event) => {
      event.preventDefault();
      const pressed = whole.getAttribute("aria-pressed") !== "true";
      whole.setAttribute("aria-pressed", String(pressed));
      whole.textContent = pressed ? "This node" : "Whole path";
      if (!pressed) return box.replaceChildren(own());
      const parts = [];
      let size = 0;
      let each = at;
      for (; each >= 0 && size <= PATH; each = session.parents[each]) {
        const node = await session.node(each);
        if (node === null || node.facts.error !== undefined) break;
        size += session.sizes[each];
        if (session.sizes[each] > 0) parts.push(chartPart(session, node, Runs.positions(session, node)));
      }
      if (parts.length === 0) return;
      const chart = positionChart(parts.reverse(), axes, app.theme);
      box.replaceChildren(chart, each >= 0 ? h("p.note", `From token ${parts[0].start.toLocaleString("en")} on.`) : "");
    });
    const notes = [];
    if (above !== null && session.sizes[at] > 0 && above.facts.error === undefined) {
      const [parentNext, parentDelta] = above.facts.as_decoded;
      const expected = session.generated[at] ? session.starts[at] + parentDelta : parentNext;
      const first = positions.decoded.map((axis) => axis[0]);
      if (first.some((value) => value !== expected)) {
        notes.push(
          h(
            "p.amber",
            `Begins at ${axes.map((name, axis) => `${name} ${first[axis]}`).join(", ")}, where text after its parent stands at ${expected}.`,
          ),
        );
      }
    }
    if (replayedNext !== next || replayedDelta !== delta || positions.replayed !== null) {
      notes.push(h("p.amber", `A replay of the whole history differs: next ${replayedNext}, delta ${replayedDelta}.`));
    }
    return section(
      axes.length === 1 ? "Positions" : "M-RoPE positions",
      h("small", `next ${next.toLocaleString("en")}, delta ${delta.toLocaleString("en")}`, session.parents[at] > 0 ? whole : null),
      box,
      notes,
    );
  }

  function tokenTable(session, { facts: known, chunk, at }, positions) {
    const ids = chunk.array(known.token_ids);
    const start = session.starts[at];
    const { axes } = session.facts;
    const media = mediaSpans(session, { facts: known });
    const said = known.annotations.filter((each) => each.values !== undefined);
    const rows = said.map((each) => {
      const byToken = new Map();
      each.tokens.forEach(([from], part) => chunk.array(each.values[part]).forEach((value, i) => byToken.set(from + i, value)));
      return byToken;
    });
    const heads = [
      ["index", "n"],
      ["id", "n id"],
      ...(session.words ? [["text", "piece"]] : []),
      ...axes.map((name) => [name, "n"]),
      ...said.map((each) => [each.name, "n wide"]),
    ];
    const number = (value) =>
      typeof value === "bigint" || Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(7)));
    const table = longTable(heads, ids.length, (row) => {
      const inMedia = media.some((each) => each.start <= start + row && start + row < each.stop);
      return [
        [String(start + row), "n dim"],
        [String(ids[row]), inMedia ? "n id media" : "n id"],
        ...(session.words ? [[spelled(JSON.stringify(chunk.pieces[ids[row]] ?? "").slice(1, -1)), "piece"]] : []),
        ...axes.map((_, axis) => {
          const value = positions.decoded[axis][row];
          const other = positions.replayed?.[axis][row] ?? value;
          return other === value ? [number(value), `n axis${axis % 4}`] : [`${number(value)} ≠ ${number(other)}`, "n amber"];
        }),
        ...rows.map((byToken) => [byToken.has(start + row) ? number(byToken.get(start + row)) : "", "n wide"]),
      ];
    });
    const widths = [
      48,
      54,
      ...(session.words ? [76] : []),
      ...axes.map((name) => (name.length > 1 ? 60 : 46)),
      ...said.map(() => 78),
    ];
    table.style.setProperty(
      "--columns",
      widths.map((width, at) => (heads[at][1] === "piece" ? `minmax(${width}px, 1fr)` : `${width}px`)).join(" "),
    );
    return table;
  }

  function mediaSection(session, at, known) {
    if (known.media.length === 0) return null;
    return section(
      "Media",
      h("small", counted(known.media.length, "item")),
      known.media.map((item) => mediaItem(session, item)),
    );
  }

  function mediaItem(session, item) {
    const frame = h("div.thumb", item.features ? "…" : h("span", "no features kept"));
    if (item.features) {
      session.picture(item.content).then(
        (found) =>
          frame.replaceChildren(
            found === null
              ? h("span", "features kept")
              : h("img", { src: found.url, alt: `${item.modality}, from ${found.what}`, title: `made of ${found.what}` }),
          ),
        (error) => frame.replaceChildren(h("span", spelled(error.message))),
      );
    }
    const spans =
      item.spans
        .slice(0, 6)
        .map(([start, stop]) => `[${start}, ${stop})`)
        .join(" ") + (item.spans.length > 6 ? ` and ${item.spans.length - 6} more` : "");
    return h(
      "div.item",
      frame,
      facts([
        ["kind", item.modality],
        ["identity", copying(item.identity, h("code", `${item.identity.slice(0, 16)}…`))],
        ["tokens", spans],
        ["grid t h w", item.grid_thw?.join(" × ")],
        ["seconds a grid", item.second_per_grid_ts],
        ["audio length", item.audio_feature_length],
        ["sizes", item.target_sizes.map((size) => size.map(show).join(" × ")).join(", ")],
        ["before", item.placeholders_before ? counted(item.placeholders_before, "placeholder") : null],
        ["unfinished", item.unfinished ? "the rest comes in a later node" : null],
        ["extra", hasKeys(item.extra) ? h("pre.json", spelled(JSON.stringify(item.extra, null, 1))) : null],
      ]),
    );
  }

  function annotationSection(annotations) {
    if (annotations.length === 0) return null;
    const ranges = (tokens) =>
      tokens
        .slice(0, 6)
        .map(([start, stop]) => `[${start}, ${stop})`)
        .join(" ") + (tokens.length > 6 ? " …" : "");
    const value = (each) => {
      if (each.kind === "scalar") return spelled(typeof each.value === "string" ? each.value : JSON.stringify(each.value));
      if (each.kind === "spans")
        return h(
          "span",
          each.spans
            .slice(0, 20)
            .map(([start, stop, what]) => h("span.span", h("code", `[${start}, ${stop})`), ` ${spelled(show(what))}`)),
        );
      const shape = each.kind === "ragged" ? "lists of" : each.row_shape.length > 0 ? `(${each.row_shape.join(", ")}) of` : "";
      return `${shape} ${each.dtype ?? "nothing"} for ${ranges(each.tokens)}`;
    };
    return section(
      "Annotations",
      h("small", String(annotations.length)),
      facts(annotations.map((each) => [spelled(each.name), value(each)])),
    );
  }

  // The panel where no node is chosen: what the session is.
  function overview(app) {
    const { session } = app.state;
    const known = session.facts;
    const heads = session.heads.slice(0, 200).map(([name, at]) => {
      const row = h(
        "button.row",
        { type: "button" },
        h("b.badge.head", spelled(name)),
        h("code", session.ids[at] ?? "lost"),
        h("span.dim", spelled(oneLine(session.labels[at] ?? "")).slice(0, 60)),
      );
      row.addEventListener("click", () => app.choose(at, { centre: true }));
      return row;
    });
    const roles = new Map();
    let tokens = 0;
    let generated = 0;
    for (let at = 1; at < session.count; at++) {
      if (session.parents[at] < 0) continue;
      const role = session.roles[at] ?? "none";
      roles.set(role, (roles.get(role) ?? 0) + 1);
      tokens += session.sizes[at];
      if (session.generated[at]) generated += session.sizes[at];
    }
    const problems = [
      session.lost > 0 ? `${counted(session.lost, "node")} not shown: what they stand under is missing.` : null,
      session.errors.size > 0 ? `${counted(session.errors.size, "node")} cannot be read.` : null,
      session.unreadAnnotations > 0 ? `Annotations of ${counted(session.unreadAnnotations, "node")} cannot be read.` : null,
    ].filter((each) => each !== null);
    return [
      h("header.node", h("h2", spelled(known.id))),
      problems.map((each) => h("p.problem", each)),
      facts([
        ["scheme", h("code", spelled(known.scheme))],
        ["nodes", (session.below[0] ?? 0).toLocaleString("en")],
        [
          "leaves",
          Array.from(session.numChildren)
            .filter((many, at) => many === 0 && (at === 0 || session.parents[at] >= 0))
            .length.toLocaleString("en"),
        ],
        ["tokens", `${tokens.toLocaleString("en")}, ${generated.toLocaleString("en")} of them generated`],
        ["deepest", session.depths.reduce((most, depth) => Math.max(most, depth), 0).toLocaleString("en")],
        ["model", known.model_fingerprint ? spelled(known.model_fingerprint) : null],
        ...Object.entries(known.namespace).map(([name, value]) => [name.replace("_", " "), value === null ? null : spelled(value)]),
        ["most tokens", known.max_tokens?.toLocaleString("en")],
        [
          "roles",
          h(
            "span.many",
            [...roles].slice(0, 30).map(([role, many]) => h("span.count", spelled(role), " ", h("b", many.toLocaleString("en")))),
          ),
        ],
      ]),
      heads.length > 0 ? section("Heads", h("small", String(session.heads.length)), h("div.list", heads)) : null,
      hasKeys(known.scheme_params)
        ? section("Scheme", null, h("pre.json", spelled(JSON.stringify(known.scheme_params, null, 2))))
        : null,
      h("p.note", "Choose a node to see all that is known of it. ", h("kbd", "?"), " lists the keys."),
    ];
  }

  return { node, overview, nodeButton, range, chartPart };
})();
