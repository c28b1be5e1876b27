"use strict";
// What a search asks for: filters such as role:tool, and a phrase that is looked for in all that nodes say.

const Search = (() => {
  const KINDS = {
    generated: (session, node) => session.generated[node],
    given: (session, node) => node > 0 && !session.generated[node],
    leaf: (session, node) => session.numChildren[node] === 0,
    fork: (session, node) => session.numChildren[node] > 1,
    pinned: (session, node) => session.pins.has(node),
  };

  const KEYS = {
    role: (session, node, value) => (session.roles[node] ?? "").toLowerCase() === value,
    finish: (session, node, value) => (session.finishReasons[node] ?? "").toLowerCase().includes(value),
    id: (session, node, value) => session.ids[node].startsWith(value.slice(0, 8)),
    head: (session, node, value) => (session.headsAt.get(node) ?? []).some((name) => name.toLowerCase().includes(value)),
    media: (session, node, value) => (session.media.get(node) ?? []).includes(value),
    is: (session, node, value) => Object.hasOwn(KINDS, value) && KINDS[value](session, node),
    tokens: (session, node, value) => compared(session.sizes[node], value),
    depth: (session, node, value) => compared(session.depths[node], value),
  };

  function compared(number, value) {
    const [, sign, limit] = /^([<>]?)(\d+)$/.exec(value) ?? [];
    if (limit === undefined) return false;
    return sign === "<" ? number < Number(limit) : sign === ">" ? number > Number(limit) : number === Number(limit);
  }

  function parsed(query) {
    const filters = [];
    const words = [];
    for (const word of query.trim().split(/\s+/)) {
      if (word === "") continue;
      const [, key, value] = /^([a-z]+):(.+)$/i.exec(word) ?? [];
      if (key !== undefined && Object.hasOwn(KEYS, key.toLowerCase())) filters.push([KEYS[key.toLowerCase()], value.toLowerCase()]);
      else words.push(word);
    }
    return { filters, phrase: words.join(" ").toLowerCase() };
  }

  function searchable(known) {
    known.searchable ??= [
      known.id,
      known.key ?? "",
      known.text ?? "",
      JSON.stringify(known.metadata),
      known.media.map((item) => item.identity).join(" "),
    ]
      .join("\n")
      .toLowerCase();
    return known.searchable;
  }

  return { parsed, inHeads: KEYS.head, searchable };
})();
