"use strict";
// Two nodes: what their paths share, where they part, and how each goes on. What is compared is what the library's `diff` compares:
// token ids, media and positions as decoded.

const Compare = (() => {
  const TURNS = 40; // of either side that are shown

  // What stands at each token of a node, for comparing: id, media, positions.
  function tokensOf(session, known) {
    const ids = known.chunk.array(known.facts.token_ids);
    const media = new Array(ids.length).fill(null);
    const start = session.starts[known.at];
    for (const item of known.facts.media) {
      let placeholder = item.placeholders_before;
      for (const [from, to] of item.spans)
        for (let at = from; at < to; at++) media[at - start] = `${item.content} ${placeholder++}`;
    }
    return { ids, media, axes: Runs.positions(session, known).decoded };
  }

  // Tokens along a path below `ancestor`, one node after another, as they are asked for.
  async function* along(session, nodes) {
    for (const at of nodes) {
      const known = await session.node(at);
      if (known === null || known.facts.error !== undefined) throw new Error("this file leaves out tokens that are to be compared");
      const tokens = tokensOf(session, known);
      for (let i = 0; i < tokens.ids.length; i++)
        yield { id: tokens.ids[i], media: tokens.media[i], axes: tokens.axes.map((axis) => axis[i]) };
    }
  }

  // {ancestor, shared, kind}: the deepest node on both paths, how many tokens are alike, and what differs first.
  async function parting(session, one, two) {
    const ancestor = session.commonAncestor(one, two);
    const rest = (at) => session.path(at).slice(session.depths[ancestor] + 1);
    const left = along(session, rest(one));
    const right = along(session, rest(two));
    let shared = session.stop(ancestor);
    for (;;) {
      const [a, b] = [(await left.next()).value, (await right.next()).value];
      if (a === undefined || b === undefined) return { ancestor, shared, kind: a === b ? "same" : "end" };
      if (a.media !== b.media) return { ancestor, shared, kind: "media" };
      if (a.id !== b.id) return { ancestor, shared, kind: "token" };
      if (a.axes.some((value, axis) => value !== b.axes[axis])) return { ancestor, shared, kind: "position" };
      shared++;
    }
  }

  const KINDS = {
    same: () => "Nothing differs.",
    end: () => "One goes on where the other ends.",
    token: (at) => `At token ${at} there stand different tokens.`,
    media: (at) => `At token ${at} there stand different media.`,
    position: (at) => `At token ${at} the same token stands at different positions.`,
  };

  async function panel(app, one, two) {
    const { session } = app.state;
    const found = await parting(session, one, two);
    const swap = h("button", { type: "button" }, "Swap");
    swap.addEventListener("click", () => app.compare(two, one));
    const close = h("button", { type: "button", title: "Esc" }, "Close");
    close.addEventListener("click", () => app.mark(-1));
    const whole = Math.max(session.stop(one), session.stop(two), 1);
    const bar = (at, kind) =>
      h(
        "div.bar",
        h("i.shared", { style: { width: `${(100 * found.shared) / whole}%` } }),
        h(`i.${kind}`, { style: { width: `${(100 * (session.stop(at) - found.shared)) / whole}%` } }),
      );
    return [
      h("header.node", h("h2", "Compare"), h("span.spring"), swap, close),
      h(
        "div.sides",
        h("div", h("b.badge.a", "A"), Panel.nodeButton(app, one), bar(one, "a")),
        h("div", h("b.badge.b", "B"), Panel.nodeButton(app, two), bar(two, "b")),
      ),
      facts([
        ["both have", `${counted(found.shared, "token")}`],
        [
          "last on both",
          h(
            "span",
            Panel.nodeButton(app, found.ancestor),
            ` at depth ${session.depths[found.ancestor]}, ends at token ${session.stop(found.ancestor)}`,
          ),
        ],
        ["then", KINDS[found.kind](found.shared.toLocaleString("en"))],
        ["A goes on with", goesOn(session, one, found)],
        ["B goes on with", goesOn(session, two, found)],
      ]),
      h("div.sides.turns", await side(app, one, found, "a"), await side(app, two, found, "b")),
    ];
  }

  function goesOn(session, at, found) {
    return `${counted(session.stop(at) - found.shared, "token")} in ${counted(session.depths[at] - session.depths[found.ancestor], "turn")}`;
  }

  async function side(app, at, found, kind) {
    const { session } = app.state;
    const turns = session.path(at).slice(session.depths[found.ancestor] + 1);
    const shown = [];
    for (const each of turns.slice(0, TURNS)) {
      const known = await session.node(each);
      if (known !== null && known.facts.error === undefined) shown.push(turn(app, known, found, kind));
    }
    if (turns.length > TURNS) shown.push(h("p.note", `${counted(turns.length - TURNS, "turn")} more`));
    if (turns.length === 0) shown.push(h("p.note", "ends there"));
    return h("div", shown);
  }

  function turn(app, known, found, kind) {
    const { session } = app.state;
    const { at, facts: node, chunk } = known;
    const start = session.starts[at];
    const ids = chunk.array(node.token_ids);
    const shared = Math.max(0, Math.min(ids.length, found.shared - start));
    const spell = (from, to) => {
      const some = ids.subarray(from, Math.min(to, from + 400));
      const text = session.words ? Array.from(some, (id) => chunk.pieces[id] ?? `<${id}>`).join("") : Array.from(some).join(" ");
      return spelled(text) + (to > from + 400 ? " …" : "");
    };
    const parts = Runs.positions(session, known);
    const [first, ...others] = parts.decoded;
    const bent = others.some((axis) => axis.some((value, i) => value !== first[i])) || found.kind === "position"; // else a straight line
    const chart =
      ids.length > 1 && bent ? positionChart([Panel.chartPart(session, known, parts)], session.facts.axes, app.theme) : null;
    return h(
      "article",
      h(
        "header",
        Panel.nodeButton(app, at),
        h("b", spelled(session.roles[at] ?? "root")),
        h("small", `[${start}, ${session.stop(at)})`),
      ),
      h(
        `pre.${session.words ? "text" : "ids"}`,
        { dir: "auto" },
        shared > 0 ? h("span.same", spell(Math.max(0, shared - 60), shared)) : null,
        h(`span.differs.${kind}`, spell(shared, ids.length)),
      ),
      chart,
    );
  }

  return { panel, parting };
})();
