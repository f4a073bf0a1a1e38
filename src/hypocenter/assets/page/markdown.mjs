// Markdown as elements. A text of a model never becomes HTML: it only fills elements made here.
//
// Each step looks at a character a bounded number of times, since an answer may be long, and read
// again with each piece of it. A block that stays the same is not made again.

import { Component, h } from './preact.mjs';

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+ *(:?-+:? *)?$/;

// The blocks of a text, each with its source: {kind, source, lines, language}.
export function blocksOf(text) {
  const lines = text.split('\n');
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [kind, end, language] = blockAt(lines, at);
    const taken = lines.slice(at, end);
    blocks.push({ kind, lines: taken, language, source: `${kind} ${taken.join('\n')}` });
    at = end;
  }
  return blocks;
}

// [kind, the line behind it, language] of the block that begins at a line.
function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return ['code', endOfFence(lines, at, fence[1]), fence[2]];
  if (HEADING.test(line)) return ['heading', at + 1];
  if (RULE.test(line)) return ['rule', at + 1];
  if (line.startsWith('>')) return ['quote', endWhile(lines, at, (one) => one.startsWith('>'))];
  if (ITEM.test(line)) return ['list', endOfList(lines, at)];
  if (line.includes('|') && TABLE_RULE.test(lines[at + 1] ?? '')) {
    return ['table', endWhile(lines, at, (one) => one.includes('|'))];
  }
  return ['text', endWhile(lines, at, (one, n) => one.trim() && (n === at || !opens(one)))];
}

function opens(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith('>');
}

function endWhile(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end], end)) end += 1;
  return Math.max(end, at + 1);
}

// A fence that is not closed goes to the end: the answer is still coming.
function endOfFence(lines, at, mark) {
  for (let end = at + 1; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.startsWith(mark) && !line.slice(mark.length).replaceAll(mark[0], '')) return end + 1;
  }
  return lines.length;
}

// A list of the other kind, numbered or not, is another list.
function endOfList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const next = line.trim() ? line : lines[end + 1] ?? '';
    const item = ITEM.exec(next);
    const isBeside = item && item[1].length <= indent.length + 1;
    if (isBeside && /\d/.test(item[2]) !== /\d/.test(mark)) break;
    if (!item && !(next.startsWith('  ') && next.trim())) {
      if (!line.trim() || opens(line)) break;
    }
    end += 1;
  }
  return end;
}

class Block extends Component {
  shouldComponentUpdate(next) {
    return next.block.source !== this.props.block.source;
  }

  render({ block, depth }) {
    return VIEWS[block.kind](block, depth);
  }
}

// The elements of a text.
export function markdown(text, depth = 0) {
  if (depth > MAX_DEPTH) return text;
  return blocksOf(text).map((block, n) => h(Block, { key: n, block, depth }));
}

const VIEWS = {
  text: ({ lines }) => h('p', null, inline(lines.join('\n'))),
  rule: () => h('hr'),
  heading({ lines }) {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The page has one heading above these.
    return h(`h${Math.min(marks.length + 2, 6)}`, null, inline(text));
  },
  quote({ lines }, depth) {
    const inside = lines.map((line) => line.replace(/^> ?/, '')).join('\n');
    return h('blockquote', null, markdown(inside, depth + 1));
  },
  code({ lines, language }) {
    const last = lines.length > 1 && FENCE.test(lines.at(-1)) ? -1 : undefined;
    const text = lines.slice(1, last).join('\n');
    return h('figure', { class: 'code' },
      h('figcaption', null, h('span', null, language || 'text'), h(CopyButton, { text })),
      h('pre', { tabIndex: 0 }, h('code', null, text)));
  },
  list({ lines }, depth) {
    const [, indent, mark] = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length <= indent.length + 1) items.push([line.slice(item[0].length)]);
      else items.at(-1).push(line.replace(/^ {1,4}/, ''));
    }
    const isOrdered = /\d/.test(mark);
    return h(isOrdered ? 'ol' : 'ul', isOrdered ? { start: parseInt(mark, 10) } : null,
      items.map((item, n) => h('li', { key: n },
        item.length === 1 ? inline(item[0]) : markdown(item.join('\n'), depth + 1))));
  },
  table({ lines }) {
    const [head, , ...rows] = lines.map(cells);
    return h('div', { class: 'wide', tabIndex: 0 }, h('table', null,
      h('thead', null, h('tr', null, head.map((cell) => h('th', null, inline(cell))))),
      h('tbody', null, rows.map((row) =>
        h('tr', null, row.map((cell) => h('td', null, inline(cell))))))));
  },
};

function cells(line) {
  return line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
}

// Marks around a part of a line, the longer ones first, and the element that each makes.
const MARKS = [['**', 'strong'], ['__', 'strong'], ['~~', 'del'], ['*', 'em'], ['_', 'em']];

// The elements of a text without blocks.
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const made = [];
  const missing = new Set(); // marks that do not come again
  let plain = 0;
  let at = 0;
  const put = (element, end) => {
    if (plain < at) made.push(text.slice(plain, at));
    made.push(element);
    plain = at = end;
  };
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) missing.add(mark);
    return found;
  };
  while (at < text.length) {
    const found = SPANS[text[at]]?.(text, at, find, depth);
    if (found) put(...found);
    else at += 1;
  }
  if (plain < text.length) made.push(text.slice(plain));
  return made;
}

// By the character that begins it: [element, where it ends], or nothing.
const SPANS = {
  '\\': (text, at) => /[\\`*_~[\]#|>-]/.test(text[at + 1] ?? '') && [text[at + 1], at + 2],
  '`'(text, at, find) {
    let size = 1;
    while (text[at + size] === '`') size += 1;
    const mark = '`'.repeat(Math.min(size, 8));
    const end = find(mark, at + size);
    return end > 0 && [h('code', null, text.slice(at + size, end)), end + mark.length];
  },
  '['(text, at, find, depth) {
    const end = find('](', at);
    const close = end > 0 ? find(')', end) : -1;
    if (close < 0 || close - at > 2000) return null;
    const link = linkTo(text.slice(end + 2, close).split(' ')[0]);
    return link && [h('a', link, inline(text.slice(at + 1, end), depth + 1)), close + 1];
  },
  h(text, at) {
    if (!/^https?:\/\//.test(text.slice(at, at + 8)) || /\w/.test(text[at - 1] ?? '')) return null;
    const [url] = /^[^\s<>"'`)\]]{1,2000}/.exec(text.slice(at, at + 2000));
    const link = linkTo(url.replace(/[.,;:!?]+$/, ''));
    return link && [h('a', link, link.title), at + link.title.length];
  },
  '*': emphasis,
  _: emphasis,
  '~': emphasis,
};

function emphasis(text, at, find, depth) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (!/\S/.test(text[from] ?? '')) return null;
    if (mark[0] === '_' && /\w/.test(text[at - 1] ?? '')) return null;
    const end = find(mark, from + 1);
    if (end < 0 || /\s/.test(text[end - 1])) return null;
    return [h(tag, null, inline(text.slice(from, end), depth + 1)), end + mark.length];
  }
  return null;
}

// What makes a link to another page; nothing for what a script or a file may be behind.
function linkTo(url) {
  if (!/^https?:\/\/./i.test(url)) return null;
  return { href: url, title: url, target: '_blank', rel: 'noopener noreferrer nofollow' };
}

export class CopyButton extends Component {
  render({ text, label = 'Copy' }, { copied }) {
    if (!navigator.clipboard) return null; // a page that came by http from another machine
    const copy = async () => {
      await navigator.clipboard.writeText(text);
      this.setState({ copied: true });
      setTimeout(() => this.setState({ copied: false }), 2000);
    };
    return h('button', { type: 'button', class: 'quiet', onClick: copy },
      copied ? 'Copied' : label);
  }
}
