"use strict";
// The page: what is chosen, how it is coloured, searched and moved in; and, where it is live, what comes in while one looks.

const App = (() => {
  const $ = (id) => document.getElementById(id);
  const CATEGORIES = 12; // colours of things that have no order; what is rarer shares one
  const STEPS = 32; // colours of numbers
  const POLL = 1000; // milliseconds between questions, or ten times what the last answer took
  const FOLD_FROM = 40; // nodes: a smaller session is shown as it is

  const state = {
    session: null,
    chosen: -1,
    marked: -1,
    hovered: -1, // an item
    matches: null, // a set of nodes, null where nothing is searched for
    paths: [],
    colourOf: new Uint8Array(0),
    palette: [],
    collapsed: new Set(),
    opened: new Set(),
    folds: true,
    fresh: new Map(),
    values: null, // by node, of the annotation or metadata that it is coloured by
    tint: 0.07, // how much of its colour a card has all over
    fitted: true, // nobody has moved it since it was fitted
    follows: false,
  };
  const theme = {};
  const app = { state, theme };
  let drawing;
  let layout;
  let shown = 0; // of panels asked for, the last
  let searched = 0;
  let order = []; // matches in order
  let at = -1; // the one that is shown

  // --- colours -------------------------------------------------------------------------------------------------------
  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of [
      "ground",
      "dots",
      "line",
      "card",
      "chosen",
      "stack",
      "border",
      "strong",
      "text",
      "dim",
      "accent",
      "onAccent",
      "other",
      "bad",
      "warning",
      "head",
      "headGround",
      "media",
      "live",
      "glass",
      "shade",
      "grid",
      "font",
      "mono",
    ]) {
      theme[name] = style.getPropertyValue(`--${name}`).trim();
    }
    theme.axes = [0, 1, 2, 3].map((axis) => style.getPropertyValue(`--axis${axis}`).trim());
    theme.categories = Array.from({ length: CATEGORIES }, (_, number) => style.getPropertyValue(`--c${number}`).trim());
    theme.ramp = [0, 1, 2, 3, 4].map((number) => style.getPropertyValue(`--ramp${number}`).trim());
  }

  function colour() {
    const { session } = state;
    const by = $("colour").value;
    const values = Colours.valuesFor(session, by);
    const numbers = values.filter((value) => value !== undefined);
    const numeric = numbers.length > 0 && numbers.every((value) => typeof value === "number");
    const reached = (node) => node === 0 || session.parents[node] >= 0;
    const legend = $("legend");
    state.colourOf = new Uint8Array(session.count);
    state.values = by.startsWith("column ") ? values : null;
    state.tint = numeric ? 0.32 : by === "role" ? 0.07 : 0.16;
    if (numeric) {
      let [least, most] = [Infinity, -Infinity];
      for (const value of numbers) {
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
      state.palette = [...Array.from({ length: STEPS }, (_, step) => Colours.blended(theme.ramp, step / (STEPS - 1))), theme.line];
      values.forEach((value, node) => {
        state.colourOf[node] =
          value === undefined ? STEPS : most === least ? STEPS - 1 : Math.round(((value - least) / (most - least)) * (STEPS - 1));
      });
      legend.replaceChildren(
        h("span", short(least)),
        h("i.ramp", { style: { background: `linear-gradient(90deg, ${theme.ramp.join(", ")})` } }),
        h("span", short(most)),
      );
    } else {
      const counts = new Map();
      values.forEach((value, node) => value !== undefined && reached(node) && counts.set(value, (counts.get(value) ?? 0) + 1));
      const ranked = [...counts].sort((one, two) => two[1] - one[1]);
      const fixed = by === "role" ? ["user", "assistant", "system", "tool"] : [];
      const numberOf = new Map();
      fixed.forEach((name, number) => numberOf.set(name, number));
      let next = fixed.length;
      for (const [value] of ranked) if (!numberOf.has(value)) numberOf.set(value, Math.min(CATEGORIES - 1, next++));
      state.palette = [...theme.categories, theme.line];
      values.forEach((value, node) => (state.colourOf[node] = value === undefined ? CATEGORIES : numberOf.get(value)));
      legend.replaceChildren(
        ...ranked
          .slice(0, CATEGORIES + 2)
          .map(([value, many]) =>
            h(
              "span",
              h("i", { style: { background: theme.categories[numberOf.get(value)] } }),
              spelled(String(value)).slice(0, 40),
              " ",
              h("small", many.toLocaleString("en")),
            ),
          ),
        ranked.length > CATEGORIES + 2 ? h("span", `and ${(ranked.length - CATEGORIES - 2).toLocaleString("en")} more`) : "",
      );
    }
    drawing.recoloured();
  }

  function offerColours() {
    const select = $("colour");
    const before = select.value || "role";
    select.replaceChildren(...Colours.choices(state.session).map(([value, name]) => h("option", { value }, name.slice(0, 60))));
    select.value = before;
    if (select.value === "") select.value = "role";
  }

  // --- layout --------------------------------------------------------------------------------------------------------
  function arrange(anchor = -1) {
    const { session } = state;
    const before = anchor >= 0 && layout !== undefined && layout.itemOf[anchor] >= 0 ? drawing.place(layout.itemOf[anchor]) : null;
    const keep = (node) => session.headsAt.has(node) || session.pins.has(node) || session.errors.has(node);
    layout = new Layout(session, {
      folds: state.folds && session.count > FOLD_FROM,
      keep,
      opened: state.opened,
      collapsed: state.collapsed,
    });
    app.layout = layout;
    state.hovered = -1;
    drawing.show(layout);
    if (before !== null && layout.itemOf[anchor] >= 0) {
      const after = drawing.place(layout.itemOf[anchor]);
      drawing.pan(after[0] - before[0], after[1] - before[1]);
    }
  }

  // Have a node in the layout: nothing above it is collapsed; `unfold`: it is not folded either.
  function uncover(node, unfold) {
    let changed = false;
    for (let each = state.session.parents[node]; each >= 0; each = state.session.parents[each])
      changed = state.collapsed.delete(each) || changed;
    if (changed) arrange();
    const item = layout.itemOf[node];
    if (unfold && item >= 0 && layout.isFold(item)) {
      state.opened.add(layout.nodes[item]);
      arrange(layout.nodes[item]);
    }
  }

  // The first view: all of it if that can be read, else its beginning.
  function first() {
    drawing.fit();
    if (drawing.scale < READABLE) {
      const { height } = drawing.bounds();
      drawing.scale = 0.62;
      drawing.x = -28 / drawing.scale;
      drawing.y = -28 / drawing.scale;
      if (height * drawing.scale < drawing.height) drawing.y = (height - drawing.height / drawing.scale) / 2;
    }
    state.fitted = true;
    drawing.ask();
  }

  // --- choosing ------------------------------------------------------------------------------------------------------
  async function choose(node, { centre = false, unfold = true } = {}) {
    const { session } = state;
    if (node >= session.count) return;
    state.chosen = node;
    if (node >= 0) {
      uncover(node, unfold);
      const item = layout.itemOf[node];
      if (item >= 0) {
        if (centre) drawing.centre(item, Math.max(drawing.scale, 0.7));
        else drawing.reveal(item);
      }
    }
    await refreshPanel();
    if (node >= 0)
      $("said").textContent =
        `${session.roles[node] ?? "root"}, ${counted(session.sizes[node], "token")}, ${spelled(session.labels[node])}`;
  }

  function drawnPaths() {
    const { chosen, marked, session } = state;
    if (chosen >= 0 && marked >= 0 && chosen !== marked) {
      const ancestor = session.commonAncestor(marked, chosen);
      return [
        { from: ancestor, until: -1, colour: theme.strong },
        { from: marked, until: ancestor, colour: theme.other },
        { from: chosen, until: ancestor, colour: theme.accent },
      ];
    }
    return chosen >= 0 ? [{ from: chosen, until: -1, colour: theme.accent }] : [];
  }

  async function refreshPanel() {
    const mine = ++shown;
    const { session, chosen, marked } = state;
    state.paths = drawnPaths();
    drawing.ask();
    const panel = $("panel");
    let made;
    try {
      if (chosen < 0) made = Panel.overview(app);
      else if (marked >= 0 && marked !== chosen) made = await Compare.panel(app, marked, chosen);
      else {
        const parent = session.parents[chosen];
        const [known, above] = await Promise.all([session.node(chosen), parent < 0 ? null : session.node(parent)]);
        made = Panel.node(app, chosen, known, above);
      }
    } catch (error) {
      made = [h("p.problem", spelled(error.message))];
    }
    if (mine !== shown) return;
    fill(panel, made);
    if (marked >= 0 && marked === chosen)
      panel.prepend(h("p.amber", "Choose another node to compare it with this one. Esc ends it."));
    panel.scrollTop = 0;
  }

  async function mark(node) {
    state.marked = state.marked === node ? -1 : node;
    await refreshPanel();
  }

  async function compare(one, two) {
    state.marked = one;
    await choose(two);
  }

  function collapse(node) {
    const item = layout.itemOf[node];
    if (item < 0) return;
    if (layout.isFold(item)) {
      state.opened.add(layout.nodes[item]);
      arrange(layout.nodes[item]);
      return;
    }
    if (state.session.numChildren[node] === 0) return;
    if (!state.collapsed.delete(node)) state.collapsed.add(node);
    if (state.chosen >= 0 && state.collapsed.has(node)) {
      for (let each = state.session.parents[state.chosen]; each >= 0; each = state.session.parents[each])
        if (each === node) state.chosen = node;
      refreshPanel();
    }
    arrange(node);
  }

  function fold() {
    state.folds = !state.folds;
    state.opened.clear();
    $("fold").setAttribute("aria-pressed", String(state.folds));
    arrange(state.chosen >= 0 ? state.chosen : 0);
  }

  // --- searching -----------------------------------------------------------------------------------------------------
  async function search(query) {
    const mine = ++searched;
    const { session } = state;
    const { filters, phrase } = Search.parsed(query);
    at = -1;
    order = [];
    if (filters.length === 0 && phrase === "") {
      state.matches = null;
      $("found").textContent = "";
      drawing.ask();
      return;
    }
    const found = new Set();
    const passes = (node) => filters.every(([test, value]) => test(session, node, value));
    const plainly = (node) =>
      phrase === "" ||
      session.labels[node].toLowerCase().includes(phrase) ||
      session.ids[node].startsWith(phrase) ||
      (session.roles[node] ?? "root").toLowerCase() === phrase ||
      Search.inHeads(session, node, phrase);
    const candidates = [];
    for (let node = 0; node < session.count; node++) {
      if ((node > 0 && session.parents[node] < 0) || !passes(node)) continue;
      if (plainly(node)) found.add(node);
      else candidates.push(node);
    }
    state.matches = found;
    const tell = (done) => {
      order = [...found].sort((one, two) => one - two);
      $("found").textContent = `${at >= 0 ? `${at + 1} of ` : ""}${order.length.toLocaleString("en")}${done ? "" : " …"}`;
      drawing.ask();
    };
    tell(candidates.length === 0);
    // The rest is in the chunks: text, keys, metadata.
    let number = -1;
    let chunk = null;
    for (const node of candidates) {
      const its = Math.floor(node / session.chunkSize);
      if (its !== number) {
        chunk = await session.chunk(its).catch(() => null);
        if (mine !== searched) return;
        if (number >= 0) tell(false);
        number = its;
      }
      const known = chunk?.nodes[node - chunk.first];
      if (known !== undefined && known.error === undefined && Search.searchable(known).includes(phrase)) found.add(node);
    }
    tell(true);
  }

  async function step(by) {
    if (order.length === 0) return;
    at = at < 0 ? (by > 0 ? 0 : order.length - 1) : (at + by + order.length) % order.length;
    $("found").textContent = `${at + 1} of ${order.length.toLocaleString("en")}`;
    await choose(order[at], { centre: true });
  }

  // --- keys ----------------------------------------------------------------------------------------------------------
  const HELP = [
    ["← →", "to the parent, to the child that goes straight on"],
    ["↑ ↓", "to what stands above, below"],
    ["Space", "collapse or show what is below; unfold a chain"],
    ["F", "fold long chains, or not"],
    ["0  +  −", "show all, closer, farther; the wheel too"],
    ["1", "as large as it is meant to be read"],
    ["Home", "to the root"],
    ["H", "to the next head"],
    ["M", "compare: mark this node, then choose another"],
    ["/", "search; Enter, Shift+Enter or N, P: next, previous"],
    ["C", "colour by the next thing"],
    ["Esc", "end comparing, searching, choosing"],
  ];

  const FILTERS =
    "role:tool  finish:length  head:main  media:image  is:generated is:given is:leaf is:fork is:pinned  tokens:>100  depth:<5  id:4f3a";

  function help() {
    const dialog = $("keys");
    if (dialog.open) return dialog.close();
    fill(
      dialog,
      h("h2", "Keys"),
      h(
        "dl.facts",
        HELP.map(([keys, what]) => [
          h(
            "dt",
            keys.split("  ").map((each) => h("kbd", each)),
          ),
          h("dd", what),
        ]),
      ),
      h("h2", "Search"),
      h("p", "Words are looked for in text, ids, heads, keys and metadata. Beside them, or alone:"),
      h(
        "p",
        FILTERS.split(/\s+/).map((each) => [h("code", each), " "]),
      ),
      h("form", { method: "dialog" }, h("button", { type: "submit", autofocus: true }, "Close")),
    );
    dialog.querySelector("form").addEventListener("submit", (event) => (event.preventDefault(), dialog.close()));
    dialog.showModal();
  }

  function moved(item) {
    if (item >= 0) choose(layout.nodes[item], { unfold: false });
  }

  let headShown = -1;
  const KEY = {
    ArrowLeft: () => (state.chosen < 0 ? moved(0) : moved(layout.above[layout.itemOf[state.chosen]])),
    ArrowRight: () => {
      if (state.chosen < 0) return moved(0);
      const last = layout.lasts[layout.itemOf[state.chosen]];
      const child = Layout.heaviest(state.session, last);
      if (child >= 0) {
        if (state.collapsed.has(last)) collapse(last);
        moved(layout.itemOf[child]);
      }
    },
    ArrowUp: () => (state.chosen < 0 ? moved(0) : moved(layout.beside(layout.itemOf[state.chosen], -1))),
    ArrowDown: () => (state.chosen < 0 ? moved(0) : moved(layout.beside(layout.itemOf[state.chosen], 1))),
    " ": () => state.chosen >= 0 && collapse(state.chosen),
    Enter: () => state.chosen >= 0 && choose(state.chosen),
    f: fold,
    0: () => (drawing.fit(), (state.fitted = true)),
    1: () => drawing.zoom(1 / drawing.scale),
    "+": () => drawing.zoom(1.3),
    "=": () => drawing.zoom(1.3),
    "-": () => drawing.zoom(1 / 1.3),
    Home: () => choose(0, { centre: true }),
    h: () => {
      const { heads } = state.session;
      if (heads.length > 0) choose(heads[(headShown = (headShown + 1) % heads.length)][1], { centre: true });
    },
    m: () => state.chosen >= 0 && mark(state.chosen),
    n: () => step(1),
    p: () => step(-1),
    c: () => {
      const select = $("colour");
      select.selectedIndex = (select.selectedIndex + 1) % select.length;
      colour();
      refreshPanel();
    },
    "/": () => $("search").select(),
    "?": help,
    Escape: () => {
      if (state.marked >= 0) mark(-1);
      else if (state.matches !== null) {
        $("search").value = "";
        search("");
      } else if (state.chosen >= 0) choose(-1);
    },
  };

  function keyed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const typing = event.target.closest?.("input, select, textarea");
    if (typing !== null && event.key !== "Escape") return;
    if (event.target.closest?.("#panel") && /^(Arrow|Enter| |Home)/.test(event.key)) return;
    if (event.target.closest?.("button, summary") && /^(Enter| )$/.test(event.key)) return;
    const action = KEY[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action === undefined || state.session === null) return;
    event.preventDefault();
    action();
    if (typing !== null) event.target.blur();
  }

  // --- pointer -------------------------------------------------------------------------------------------------------
  function listen() {
    const canvas = $("tree");
    let dragged = null;
    const pointers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      dragged = { x: event.offsetX, y: event.offsetY, far: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) return hover(event);
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      if (pointers.size === 2) {
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
        const factor =
          Math.hypot(event.offsetX - other[0], event.offsetY - other[1]) /
          Math.max(1, Math.hypot(before[0] - other[0], before[1] - other[1]));
        drawing.zoom(factor, (event.offsetX + other[0]) / 2, (event.offsetY + other[1]) / 2);
        dragged.far = true;
        return;
      }
      if (!dragged.far && Math.hypot(event.offsetX - dragged.x, event.offsetY - dragged.y) < 4) return;
      dragged.far = true;
      state.fitted = false;
      canvas.classList.add("moving");
      drawing.pan(before[0] - event.offsetX, before[1] - event.offsetY);
    });
    const released = (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("moving");
    };
    canvas.addEventListener("pointercancel", released);
    canvas.addEventListener("pointerup", (event) => {
      released(event);
      if (dragged === null || dragged.far) return;
      const { item, handle } = drawing.under(event.offsetX, event.offsetY);
      if (item < 0) return choose(-1);
      const node = layout.nodes[item];
      if (handle) return collapse(layout.lasts[item]);
      if (layout.isFold(item)) return collapse(node);
      if (event.shiftKey && state.chosen >= 0 && state.chosen !== node)
        return compare(state.marked >= 0 ? state.marked : state.chosen, node);
      choose(node);
    });
    canvas.addEventListener("dblclick", (event) => {
      const { item } = drawing.under(event.offsetX, event.offsetY);
      if (item >= 0) drawing.centre(item, 1);
    });
    canvas.addEventListener("pointerleave", () => {
      $("hover").hidden = true;
      if (state.hovered >= 0) drawing.ask();
      state.hovered = -1;
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        state.fitted = false;
        const unit = event.deltaMode === 1 ? 16 : 1;
        if (event.shiftKey) drawing.pan((event.deltaX || event.deltaY) * unit, 0);
        else drawing.zoom(Math.exp((-event.deltaY * unit) / (event.ctrlKey ? 120 : 420)), event.offsetX, event.offsetY);
        $("hover").hidden = true;
      },
      { passive: false },
    );
    const map = $("map");
    const go = (event) => {
      state.fitted = false;
      drawing.goToMap(event.offsetX, event.offsetY);
    };
    map.addEventListener("pointerdown", (event) => {
      map.setPointerCapture(event.pointerId);
      go(event);
    });
    map.addEventListener("pointermove", (event) => event.buttons > 0 && go(event));

    document.addEventListener("keydown", keyed);
    $("search").addEventListener("input", (event) => search(event.target.value));
    $("search").addEventListener("keydown", (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1));
    $("colour").addEventListener("change", () => (colour(), refreshPanel()));
    $("fold").addEventListener("click", fold);
    $("fit").addEventListener("click", () => (drawing.fit(), (state.fitted = true)));
    $("help").addEventListener("click", help);
    $("live").addEventListener("click", () => {
      state.follows = !state.follows;
      $("live").classList.toggle("follows", state.follows);
    });
    $("sessions").addEventListener("change", (event) => open(event.target.value));
    const grip = $("grip");
    grip.addEventListener("pointerdown", (event) => grip.setPointerCapture(event.pointerId));
    grip.addEventListener("pointermove", (event) => {
      if (event.buttons > 0)
        document.documentElement.style.setProperty(
          "--panel",
          `${Math.max(260, Math.min(innerWidth - 320, innerWidth - event.clientX))}px`,
        );
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      readTheme();
      colour();
      refreshPanel();
    });
  }

  function hover(event) {
    const { item, handle } = drawing.under(event.offsetX, event.offsetY);
    $("tree").style.cursor = item >= 0 ? "pointer" : "";
    const box = $("hover");
    if (item !== state.hovered) {
      state.hovered = item;
      drawing.ask();
      if (item >= 0) {
        const { session } = state;
        const node = layout.nodes[item];
        const fold = layout.isFold(item);
        const heads = session.headsAt.get(node) ?? [];
        const by = $("colour").selectedOptions[0];
        const value = state.values?.[node];
        fill(
          box,
          h("b", spelled(session.roles[node] ?? "root")),
          h("code", session.ids[node]),
          heads.map((name) => h("b.badge.head", spelled(name))).slice(0, 5),
          h(
            "p.dim",
            fold
              ? `folded: ${counted(session.depths[layout.lasts[item]] - session.depths[node] + 1, "turn")}`
              : `${Panel.range(session, node)}, depth ${session.depths[node].toLocaleString("en")}, ${counted(session.below[node], "node")} below`,
          ),
          value === undefined ? null : h("p.dim", `${by.textContent} ${spelled(String(value))}`),
          session.errors.has(node) ? h("p.problem", spelled(session.errors.get(node))) : h("p", spelled(session.labels[node])),
        );
      }
    }
    box.hidden = item < 0 || handle;
    if (!box.hidden) {
      const x = Math.min(event.offsetX + 16, drawing.width - box.offsetWidth - 8);
      const y = event.offsetY + 20 + box.offsetHeight > drawing.height ? event.offsetY - box.offsetHeight - 12 : event.offsetY + 20;
      box.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
    }
  }

  // --- beginning, and what comes in ----------------------------------------------------------------------------------
  function headline() {
    const { session } = state;
    const name = spelled(session.facts.title ?? session.facts.id);
    document.title = `${name} – sessiontree`;
    $("session").textContent = name;
    $("session").title = spelled(session.facts.id);
    $("counts").textContent =
      `${counted(session.below[0] ?? 0, "node")} · ${counted(session.heads.length, "head")} · ${spelled(session.facts.scheme)}`;
  }

  function problem(text) {
    const box = $("problem");
    box.hidden = text === null;
    box.textContent = text === null ? "" : spelled(text);
  }

  async function open(id) {
    const session = new Data.Session(id);
    await session.refresh();
    Object.assign(state, { session, chosen: -1, marked: -1, hovered: -1, matches: null, paths: [], fitted: true });
    state.collapsed.clear();
    state.opened.clear();
    state.fresh.clear();
    $("search").value = "";
    $("found").textContent = "";
    headline();
    offerColours();
    drawing.state = state;
    arrange();
    colour();
    first();
    await refreshPanel();
  }

  async function takeIn() {
    const { session } = state;
    const before = session.count;
    const chosen = state.chosen >= 0 ? session.ids[state.chosen] : null;
    const marked = state.marked >= 0 ? session.ids[state.marked] : null;
    const said = session.said;
    const anew = await session.refresh();
    if (anew === null || session !== state.session) return;
    if (anew) {
      const now = (id) => (id === null ? -1 : session.ids.indexOf(id));
      state.chosen = now(chosen);
      state.marked = now(marked);
      state.collapsed.clear();
      state.opened.clear();
    } else {
      for (let node = before; node < session.count; node++) state.fresh.set(node, performance.now());
    }
    headline();
    offerColours();
    const anchor = state.chosen >= 0 ? state.chosen : layout.count > 0 ? anchorInSight() : -1;
    arrange(anchor < session.count ? anchor : -1);
    colour();
    if (state.follows && session.count > before) {
      await choose(session.count - 1);
    } else {
      if (state.fitted) first();
      if (state.chosen < 0 || said !== session.said || anew) await refreshPanel();
    }
    if (state.matches !== null) search($("search").value);
  }

  function anchorInSight() {
    let [best, distance] = [0, Infinity];
    for (let item = 0; item < layout.count; item++) {
      const [x, y] = drawing.place(item);
      const far = Math.hypot(x - drawing.width / 2, y - drawing.height / 2);
      if (far < distance) [best, distance] = [layout.nodes[item], far];
    }
    return best;
  }

  async function listSessions(pick) {
    const found = await Data.sessions();
    const select = $("sessions");
    const before = select.value;
    const ids = found.map(({ id }) => id);
    if (ids.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
      select.replaceChildren(...ids.map((id) => h("option", { value: id }, spelled(id))));
      select.value = ids.includes(before) ? before : (found.find((each) => each.first)?.id ?? ids[ids.length - 1] ?? "");
    }
    select.hidden = ids.length < 2;
    $("session").hidden = !select.hidden;
    if (pick && select.value !== "") await open(select.value);
    return ids;
  }

  async function poll() {
    const begun = performance.now();
    const light = $("live");
    try {
      const ids = await listSessions(state.session === null);
      if (state.session !== null && ids.includes(state.session.id)) await takeIn();
      light.className = state.follows ? "follows" : "";
      light.replaceChildren(h("i"), "live");
      light.title = "Follows the store. Click to go along with each new node.";
      problem(
        state.session === null
          ? "There are no sessions yet."
          : ids.includes(state.session.id)
            ? null
            : "This session was dropped. What is shown is what was known of it.",
      );
    } catch (error) {
      light.className = "lost";
      light.replaceChildren(h("i"), "no answer");
      problem(error instanceof TypeError ? null : error.message);
    }
    setTimeout(poll, Math.max(POLL, 10 * (performance.now() - begun)));
  }

  async function begin() {
    readTheme();
    drawing = new Drawing($("tree"), $("map"), theme);
    Object.assign(app, { drawing, open, choose, mark, compare, search, step, collapse, fold, colour });
    if (Data.live) {
      $("live").hidden = false;
      await poll();
    } else await open(null);
    listen();
    app.ready = true;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    app.openedAt = performance.now(); // milliseconds since the page began to load, its first picture drawn
  }

  begin().catch((error) => problem(`This page cannot be shown: ${error.message}`));
  window.viewer = app; // for the console, and for tests
  return app;
})();
