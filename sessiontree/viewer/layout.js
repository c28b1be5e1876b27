"use strict";
// Where things stand: a column for each step away from the root, rows downwards. Of a node's children the one with the most below
// it goes straight on in its row; the others branch off below, those of the deepest forks first, each as high as there is room. So
// no line crosses another. Nothing recurses: a chain may be 100,000 turns long.

class Layout {
  // `keep(at)`: whether a node of a chain is to be seen; `folds`: whether chains fold at all; `opened`: chains that do not, by their
  // first node; `collapsed`: nodes whose subtrees are not shown.
  constructor(session, { folds, keep, opened, collapsed }) {
    this.session = session;
    const { parents, firstChild, nextSibling, numChildren, count } = session;
    const nodes = []; // of each item its node, or the first one of a folded chain
    const lasts = []; // the last one of it
    const above = []; // the item that it hangs on, -1 for the root
    const columns = [];
    const rows = [];
    this.itemOf = new Int32Array(count).fill(-1); // folded nodes have that of their fold
    const bottom = []; // by column, the first row that is free
    const boring = (at) => at > 0 && numChildren[at] === 1 && !collapsed.has(at) && !keep(at);
    const branches = [[0, -1, 0]]; // node, the item it hangs on, its column
    while (count > 0 && branches.length > 0) {
      const [first, parent, column] = branches.pop();
      const begin = nodes.length;
      let hung = parent;
      let row = 0;
      let at = first;
      let unfolded = -1; // up to this node, nothing folds
      while (at >= 0) {
        let last = at;
        if (folds && unfolded < 0 && boring(at) && boring(parents[at])) {
          let length = 1;
          let end = at;
          while (boring(firstChild[end]) && boring(firstChild[firstChild[end]])) {
            end = firstChild[end];
            length++;
          }
          if (length >= Layout.LEAST_FOLD && !opened.has(at)) last = end;
          else unfolded = end;
        }
        const item = nodes.length;
        nodes.push(at);
        lasts.push(last);
        above.push(hung);
        columns.push(column + item - begin);
        row = Math.max(row, bottom[column + item - begin] ?? 0);
        for (let each = at; ; each = firstChild[each]) {
          this.itemOf[each] = item;
          if (each === last) break;
        }
        if (at === unfolded) unfolded = -1;
        hung = item;
        at = collapsed.has(last) ? -1 : Layout.heaviest(session, last);
      }
      for (let item = begin; item < nodes.length; item++) {
        rows.push(row);
        bottom[columns[item]] = row + 1;
        const node = lasts[item];
        if (numChildren[node] < 2 || collapsed.has(node)) continue;
        const straight = Layout.heaviest(session, node);
        const others = [];
        for (let child = firstChild[node]; child >= 0; child = nextSibling[child]) if (child !== straight) others.push(child);
        for (const child of others.reverse()) branches.push([child, item, columns[item] + 1]);
      }
    }
    this.count = nodes.length;
    this.nodes = Int32Array.from(nodes);
    this.lasts = Int32Array.from(lasts);
    this.above = Int32Array.from(above);
    this.columns = Int32Array.from(columns);
    this.rows = Int32Array.from(rows);
    this.numColumns = bottom.length;
    this.numRows = bottom.reduce((most, row) => Math.max(most, row), 0);
    this._index();
    this._trunks();
  }

  static heaviest(session, at) {
    let found = -1;
    for (let child = session.firstChild[at]; child >= 0; child = session.nextSibling[child]) {
      if (found < 0 || session.below[child] > session.below[found]) found = child; // the first of equals: little moves as more come
    }
    return found;
  }

  isFold(item) {
    return this.nodes[item] !== this.lasts[item];
  }

  // Items by row, and in a row by column.
  _index() {
    const starts = new Int32Array(this.numRows + 1);
    for (const row of this.rows) starts[row + 1]++;
    for (let row = 0; row < this.numRows; row++) starts[row + 1] += starts[row];
    const order = Int32Array.from(this.rows.keys());
    order.sort((one, two) => this.rows[one] - this.rows[two] || this.columns[one] - this.columns[two]);
    this.rowStarts = starts;
    this.order = order;
  }

  // Lines downwards behind a column, from an item's row to that of the last branch off it; those behind one column do not overlap.
  _trunks() {
    const ends = new Int32Array(this.count);
    for (let item = 0; item < this.count; item++) {
      const parent = this.above[item];
      if (parent >= 0 && this.rows[item] > this.rows[parent]) ends[parent] = Math.max(ends[parent], this.rows[item]);
    }
    this.trunks = Array.from({ length: this.numColumns }, () => []);
    for (const item of this.order) if (ends[item] > 0) this.trunks[this.columns[item]].push([this.rows[item], ends[item], item]);
  }

  // The first place in `order`, of a row, whose item has at least this column.
  seek(row, column) {
    let low = this.rowStarts[row];
    let high = this.rowStarts[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.columns[this.order[middle]] < column) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The item at a place, or -1.
  at(row, column) {
    if (row < 0 || row >= this.numRows) return -1;
    const place = this.seek(row, column);
    if (place === this.rowStarts[row + 1]) return -1;
    const item = this.order[place];
    return this.columns[item] === column ? item : -1;
  }

  // The item of the same column or one beside it in the next row that has one, upwards or downwards; -1 without.
  beside(item, step) {
    const column = this.columns[item];
    for (let row = this.rows[item] + step; row >= 0 && row < this.numRows; row += step) {
      const first = this.rowStarts[row];
      const end = this.rowStarts[row + 1];
      if (first === end) continue;
      const place = Math.min(this.seek(row, column), end - 1);
      const found = this.order[place];
      if (Math.abs(this.columns[found] - column) <= 1) return found;
    }
    return -1;
  }
}

Layout.LEAST_FOLD = 4; // nodes: fewer are as soon shown
