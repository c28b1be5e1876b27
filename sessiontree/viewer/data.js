"use strict";
// What the page knows: a session's shape, by ordinals, and chunks of its nodes, taken apart when one is looked at.

const Data = (() => {
  const live = document.documentElement.dataset.mode === "live";

  // --- bytes -------------------------------------------------------------------------------------------------------
  async function inflated(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function fromBase64(text) {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  const TYPES = {
    u1: Uint8Array,
    i4: Int32Array,
    u4: Uint32Array,
    f4: Float32Array,
    f8: Float64Array,
    i8: BigInt64Array,
    u8: BigUint64Array,
  };

  // What packing.py made: its JSON, with `array(number)` for the arrays beside it.
  async function unpacked(compressed) {
    const bytes = await inflated(compressed);
    const length = new DataView(bytes.buffer).getUint32(0, true);
    const facts = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    const starts = [];
    let at = 4 + length;
    for (const [kind, count] of facts.arrays) {
      starts.push(at);
      at += count * TYPES[kind].BYTES_PER_ELEMENT;
    }
    const made = new Map();
    facts.array = (number) => {
      if (!made.has(number)) {
        const [kind, count] = facts.arrays[number];
        const size = TYPES[kind].BYTES_PER_ELEMENT;
        const joined = new Uint8Array(count * size);
        for (let plane = 0; plane < size; plane++) {
          const from = starts[number] + plane * count;
          for (let i = 0; i < count; i++) joined[i * size + plane] = bytes[from + i];
        }
        made.set(number, new TYPES[kind](joined.buffer));
      }
      return made.get(number);
    };
    return facts;
  }

  // The bytes of a block of this file, or what the server answers; null where there is none, or nothing new.
  async function fetched(name, query) {
    if (!live) {
      const element = document.getElementById(`block-${name}`);
      return element === null ? null : fromBase64(element.textContent);
    }
    const answer = await fetch(`/${query}`, { cache: "no-store" });
    if (answer.status === 204) return null;
    if (!answer.ok) throw new Error(await answer.text());
    return new Uint8Array(await answer.arrayBuffer());
  }

  // --- a session ---------------------------------------------------------------------------------------------------
  class Session {
    constructor(id) {
      this.id = id; // null: the one of this file
      this.mark = "";
      this.count = 0;
      this.parents = new Int32Array(0);
      this.labels = [];
      this.roles = [];
      this.finishReasons = [];
      this.sizes = [];
      this.generated = [];
      this.ids = [];
      this.media = new Map();
      this.errors = new Map();
      this._chunks = new Map();
      this._pictures = new Map();
      this._loaded = new Map();
    }

    get _query() {
      return `session=${encodeURIComponent(this.id)}`;
    }

    // Take in what is new. Returns null where nothing is, else whether all of it is other nodes than before.
    async refresh() {
      const bytes = await fetched("tree", `tree?${this._query}&known=${encodeURIComponent(this.mark)}`);
      if (bytes === null) return null;
      const facts = await unpacked(bytes);
      const anew = facts.first === 0;
      this._take(facts);
      return anew;
    }

    _take(facts) {
      const first = facts.first;
      const count = first + facts.parents.length;
      if (first === 0) {
        for (const list of [this.labels, this.roles, this.finishReasons, this.sizes, this.generated, this.ids]) list.length = 0;
        this.media.clear();
        this.errors.clear();
      }
      if (first === 0 || facts.said !== this.said) {
        this._chunks.clear();
        this._loaded.clear();
      }
      const parents = new Int32Array(count);
      parents.set(this.parents.subarray(0, first));
      parents.set(facts.parents, first);
      this.parents = parents;
      for (let i = 0; i < facts.parents.length; i++) {
        this.labels.push(facts.labels[i]);
        this.roles.push(facts.names[facts.roles[i]]);
        this.finishReasons.push(facts.names[facts.finish_reasons[i]]);
        this.sizes.push(facts.sizes[i]);
        this.generated.push(facts.generated[i] === "1");
        this.ids.push(facts.ids.slice(8 * i, 8 * i + 8));
      }
      for (const [at, kinds] of facts.media) this.media.set(at, kinds);
      for (const [at, error] of facts.errors) this.errors.set(at, error);
      Object.assign(this, { count, mark: facts.mark, said: facts.said, facts: facts.session, words: facts.words });
      Object.assign(this, { heads: facts.heads, lost: facts.lost, chunkSize: facts.chunk });
      Object.assign(this, { unreadAnnotations: facts.unread_annotations });
      this.pins = new Set(facts.pins);
      this.headsAt = new Map();
      for (const [name, at, uncertain] of facts.heads) {
        if (!this.headsAt.has(at)) this.headsAt.set(at, []);
        this.headsAt.get(at).push(uncertain ? `${name} (uncertain)` : name);
      }
      this.columns = [
        ...facts.annotations.map((column) => ({ ...column, group: "annotation" })),
        ...facts.metadata.map((column) => ({ ...column, group: "metadata" })),
      ];
      this._derive();
    }

    // What follows from parents and sizes: who is whose child, depths, where tokens start, how many stand below.
    _derive() {
      const { count, parents } = this;
      this.depths = new Int32Array(count);
      this.starts = new Float64Array(count);
      this.below = new Int32Array(count);
      this.firstChild = new Int32Array(count).fill(-1);
      this.lastChild = new Int32Array(count).fill(-1);
      this.nextSibling = new Int32Array(count).fill(-1);
      this.numChildren = new Int32Array(count);
      for (let at = 1; at < count; at++) {
        const parent = parents[at];
        if (parent < 0) continue;
        this.depths[at] = this.depths[parent] + 1;
        this.starts[at] = this.starts[parent] + this.sizes[parent];
        if (this.firstChild[parent] < 0) this.firstChild[parent] = at;
        else this.nextSibling[this.lastChild[parent]] = at;
        this.lastChild[parent] = at;
        this.numChildren[parent]++;
      }
      for (let at = count - 1; at > 0; at--) if (parents[at] >= 0) this.below[parents[at]] += this.below[at] + 1;
    }

    stop(at) {
      return this.starts[at] + this.sizes[at];
    }

    children(at) {
      const found = [];
      for (let child = this.firstChild[at]; child >= 0; child = this.nextSibling[child]) found.push(child);
      return found;
    }

    // Ordinals from the root to a node.
    path(at) {
      const found = [];
      for (let each = at; each >= 0; each = this.parents[each]) found.push(each);
      return found.reverse();
    }

    commonAncestor(one, two) {
      while (one !== two) {
        if (one < 0 || two < 0) return -1;
        if (this.depths[one] >= this.depths[two]) one = this.parents[one];
        else two = this.parents[two];
      }
      return one;
    }

    // All that is known of a node, or null where this file does not hold it.
    async node(at) {
      const chunk = await this.chunk(Math.floor(at / this.chunkSize));
      return chunk === null ? null : this.inChunk(chunk, at);
    }

    inChunk(chunk, at) {
      return { at, chunk, facts: chunk.nodes[at - chunk.first] };
    }

    loaded(number) {
      return this._loaded.get(number) ?? null;
    }

    chunk(number) {
      const wanted = Math.min(this.chunkSize, this.count - number * this.chunkSize);
      const known = this._chunks.get(number);
      if (known !== undefined && known.wanted === wanted) return known.promise;
      const promise = fetched(`chunk-${number}`, `chunk?${this._query}&number=${number}`).then(async (bytes) => {
        const chunk = bytes === null ? null : await unpacked(bytes);
        this._loaded.set(number, chunk);
        return chunk;
      });
      const entry = { wanted, promise };
      this._chunks.set(number, entry);
      promise.catch(() => this._chunks.get(number) === entry && this._chunks.delete(number)); // to be asked again
      return promise;
    }

    get numChunks() {
      return Math.ceil(this.count / this.chunkSize);
    }

    // A thumbnail: {url, width, height, what}, or null.
    picture(content) {
      if (!this._pictures.has(content)) {
        const asked = fetched(`picture-${content}`, `picture?${this._query}&name=${content}`).then(async (bytes) => {
          const found = bytes === null ? null : await unpacked(bytes);
          if (found === null || found.png === undefined) return null;
          let binary = "";
          for (const byte of found.array(found.png)) binary += String.fromCharCode(byte);
          return { url: `data:image/png;base64,${btoa(binary)}`, width: found.width, height: found.height, what: found.what };
        });
        this._pictures.set(content, asked);
      }
      return this._pictures.get(content);
    }
  }

  async function sessions() {
    const answer = await fetch("/sessions", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  return { Session, live, sessions };
})();
