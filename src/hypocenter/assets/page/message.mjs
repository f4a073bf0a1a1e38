// How one message of a conversation looks: text, thoughts, calls of tools, tokens, figures.

import { Component, createRef, h } from './preact.mjs';
import { CopyButton, markdown } from './markdown.mjs';

const NAMES = { user: 'You', assistant: 'Model', tool: 'Tool', system: 'System' };
// Tokens that are shown at once; each is an element of its own.
const MAX_SHOWN = 4000;

// `on` holds what may be done: edit, again, goOn, turn, answerCall; `isBusy`: an answer comes.
export class Message extends Component {
  root = createRef();

  // A message changes while it is open, and it may be long: the others are left as they are.
  shouldComponentUpdate(next, nextState) {
    const { node, siblings, isBusy, isText } = this.props;
    return nextState !== this.state || next.node !== node || next.isBusy !== isBusy
      || next.isText !== isText || next.siblings.length !== siblings.length
      || node.state === 'open' || node.state !== this.shownState;
  }

  // Who leaves the editor by the keyboard stays at its message.
  componentDidUpdate(props, state) {
    if (state.isEdited && !this.state.isEdited) {
      this.root.current?.querySelector('.actions button')?.focus();
    }
  }

  render({ node, siblings, isBusy, isText, on }, { isEdited, hasTokens }) {
    const isOpen = node.state === 'open';
    this.shownState = node.state;
    const at = siblings.indexOf(node);
    const name = isText ? (node.role === 'user' ? 'Your text' : 'Continued') : NAMES[node.role];
    const branch = siblings.length > 1 ? `, branch ${at + 1} of ${siblings.length}` : '';
    return h('li', { class: `message ${node.role}`, ref: this.root },
      h('article', { 'aria-label': name + branch, 'aria-busy': isOpen },
        h('header', null, h('h2', null, name), this.branches(node, siblings, at, isBusy, on)),
        node.reasoning && h(Thoughts, { text: node.reasoning, isOpen: isOpen && !node.content }),
        isEdited
          ? h(Editor, {
            text: node.content,
            label: `Edit: ${name}`,
            onSave: (text) => {
              this.setState({ isEdited: false });
              on.edit(node, text);
            },
            onLeave: () => this.setState({ isEdited: false }),
          })
          : this.content(node, isText),
        (node.calls ?? []).map((call, n) =>
          h(Call, { key: call.id ?? n, call, node, isBusy, isDone: !isOpen, on })),
        hasTokens && h(Tokens, { tokens: node.tokens ?? [] }),
        isOpen && !node.content && !node.reasoning && h('p', { class: 'waiting' }, 'Waiting …'),
        node.problem && h('p', { class: 'problem' }, node.problem),
        h(Figures, { node }),
        !isOpen && !isEdited && this.actions(node, isBusy, hasTokens, on)));
  }

  branches(node, siblings, at, isBusy, on) {
    if (siblings.length < 2) return null;
    const button = (by, label, sign, isOff) => h('button', {
      type: 'button', class: 'quiet', 'aria-label': label, disabled: isBusy || isOff,
      onClick: () => on.turn(node, by),
    }, sign);
    return h('div', { class: 'branches', role: 'group', 'aria-label': 'Branches' },
      button(-1, 'Previous branch', '‹', at === 0),
      h('span', null, `${at + 1}/${siblings.length}`),
      button(1, 'Next branch', '›', at === siblings.length - 1));
  }

  content(node, isText) {
    if (!node.content) return null;
    const isPlain = isText || node.role !== 'assistant';
    return h('div', { class: isPlain ? 'content plain' : 'content' },
      isPlain ? node.content : markdown(node.content));
  }

  actions(node, isBusy, hasTokens, on) {
    const button = (text, onClick, more) =>
      h('button', { type: 'button', class: 'quiet', disabled: isBusy, onClick, ...more }, text);
    const isAnswer = node.role === 'assistant';
    const mayGoOn = isAnswer && node.body
      && (['broken', 'stopped', 'failed'].includes(node.state) || node.ending === 'length');
    return h('div', { class: 'actions' },
      mayGoOn && button('Go on', () => on.goOn(node)),
      isAnswer && button('Again', () => on.again(node)),
      button('Edit', () => this.setState({ isEdited: true })),
      h(CopyButton, { text: node.content }),
      node.tokens?.length > 0 && button(hasTokens ? 'Hide tokens' : 'Tokens',
        () => this.setState({ hasTokens: !hasTokens }),
        { 'aria-expanded': Boolean(hasTokens), disabled: false }));
  }
}

class Editor extends Component {
  root = createRef();

  componentDidMount() {
    this.root.current.querySelector('textarea').focus();
  }

  render({ text, label, onSave, onLeave }) {
    const area = () => this.root.current.querySelector('textarea');
    const onKeyDown = (event) => {
      if (event.key === 'Escape') onLeave();
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) onSave(area().value);
    };
    return h('div', { class: 'editor', onKeyDown, ref: this.root },
      h('textarea', { 'aria-label': label, rows: 4, defaultValue: text }),
      h('div', { class: 'actions' },
        h('button', { type: 'button', onClick: () => onSave(area().value) }, 'Save as a branch'),
        h('button', { type: 'button', class: 'quiet', onClick: onLeave }, 'Cancel')));
  }
}

// What the model thought: folded, and its length told while it comes.
class Thoughts extends Component {
  render({ text, isOpen }) {
    return h('details', { class: 'fold' },
      h('summary', null, isOpen ? `Thinking … ${text.length} characters` : 'Thoughts'),
      h('div', { class: 'content plain' }, text));
  }
}

// A call of a tool, folded, with a place for what the tool said: this page runs none.
class Call extends Component {
  root = createRef();

  render({ call, node, isBusy, isDone, on }) {
    const id = `result-${node.id}-${call.id}`;
    const give = (event) => {
      event.preventDefault();
      on.answerCall(node, call, this.root.current.querySelector('textarea').value);
    };
    return h('details', { class: 'fold call', ref: this.root },
      h('summary', null, 'Call of ', h('code', null, call.name || '…')),
      h('pre', { tabIndex: 0 }, h('code', null, pretty(call.arguments))),
      isDone && h('form', { onSubmit: give },
        h('label', { htmlFor: id }, 'What the tool said'),
        h('textarea', { id, rows: 2 }),
        h('button', { type: 'submit', disabled: isBusy }, 'Give to the model')));
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Each token with its probability: one stop of the Tab key, arrows go from token to token.
class Tokens extends Component {
  root = createRef();

  render({ tokens }, { at = 0 }) {
    const shown = tokens.slice(0, MAX_SHOWN);
    const go = (to) => {
      if (to < 0 || to >= shown.length) return;
      this.setState({ at: to });
      this.root.current.querySelector(`[data-at="${to}"]`)?.focus();
    };
    const onKeyDown = (event) => {
      const keys = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: shown.length - 1 };
      const to = keys[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    };
    const chosen = shown[at];
    return h('div', { class: 'tokens', ref: this.root },
      h('div', { role: 'listbox', 'aria-label': 'Tokens; arrow keys go on', onKeyDown },
        shown.map((token, n) => h('span', {
          key: n, role: 'option', tabIndex: n === at ? 0 : -1, 'aria-selected': n === at,
          'data-at': n, class: `token ${shade(token.p)}`, onClick: () => go(n),
          'aria-label': `${visible(token.text)}, ${percent(token.p)}`,
        }, visible(token.text)))),
      tokens.length > MAX_SHOWN && h('p', null, `The first ${MAX_SHOWN} of ${tokens.length}.`),
      chosen && h('table', { 'aria-live': 'polite' },
        h('caption', null, `Token ${at + 1}: ${visible(chosen.text)} had ${percent(chosen.p)}`),
        h('thead', null, h('tr', null, h('th', null, 'Instead'), h('th', null, 'Probability'))),
        h('tbody', null, chosen.top.map(([text, p]) => h('tr', null,
          h('td', null, h('code', null, visible(text))), h('td', null, percent(p)))))));
  }
}

const visible = (text) => text.replaceAll('\n', '↵').replaceAll(' ', '·') || '∅';
const percent = (p) => `${(100 * p).toPrecision(3)} %`;
const shade = (p) => (p > 0.9 ? 'sure' : p > 0.5 ? 'likely' : p > 0.1 ? 'doubt' : 'rare');

// What an answer took, as the server measured it.
function Figures({ node }) {
  const { timings, usage, ending } = node;
  if (!timings) return null;
  const cached = timings.cache_n ? ` (${timings.cache_n} cached)` : '';
  const parts = [
    `${usage.completion_tokens} tokens`,
    `${timings.predicted_per_second.toFixed(1)} tokens/s`,
    `prompt ${usage.prompt_tokens}${cached}`,
    node.firstSeconds !== undefined && `first after ${node.firstSeconds.toFixed(2)} s`,
    timings.resumed > 0 && `outlived ${timings.resumed} worker${timings.resumed > 1 ? 's' : ''}`,
    ending === 'length' && 'cut off at its limit',
  ];
  return h('p', { class: 'figures' }, parts.filter(Boolean).join(' · '));
}
