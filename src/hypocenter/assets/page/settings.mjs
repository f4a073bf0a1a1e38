// What is asked for beside the messages: system prompt, sampling, and any other field as JSON.

import { Component, h } from './preact.mjs';
import { read } from './talk.mjs';

const NAME = 'hypo-settings';
// field, label, kind of number, lowest, highest, step
const NUMBERS = [
  ['temperature', 'Temperature', 0, 5, 'any'],
  ['top_p', 'Top p', 0, 1, 'any'],
  ['top_k', 'Top k', 0, 100000, 1],
  ['min_p', 'Min p', 0, 1, 'any'],
  ['repeat_penalty', 'Repeat penalty', 0, 5, 'any'],
  ['max_tokens', 'Most tokens of an answer', 1, 1000000, 1],
  ['seed', 'Seed', 0, 4294967295, 1],
];
const EFFORTS = ['', 'none', 'low', 'medium', 'high'];

export function loadSettings() {
  const saved = read(NAME);
  return saved && typeof saved === 'object' ? saved : {};
}

// The fields of a request that these settings make. Throws Error for JSON that is none.
export function fieldsOf(settings) {
  const fields = {};
  for (const [name] of NUMBERS) {
    const given = settings[name] ?? '';
    if (given !== '') fields[name] = Number(given);
  }
  if (settings.effort) fields.reasoning_effort = settings.effort;
  const problem = problemOf(settings.more);
  if (problem) throw new Error(`Other fields: ${problem}`);
  return { ...fields, ...(settings.more?.trim() ? JSON.parse(settings.more) : {}) };
}

function problemOf(text) {
  if (!text?.trim()) return '';
  try {
    const value = JSON.parse(text);
    return value && typeof value === 'object' && !Array.isArray(value) ? '' : 'not an object';
  } catch (error) {
    return error.message;
  }
}

export class Settings extends Component {
  render({ settings, isText, onChange }) {
    const set = (name, value) => {
      const next = { ...settings, [name]: value };
      try {
        localStorage.setItem(NAME, JSON.stringify(next));
      } catch {
        // They hold for as long as the page is open.
      }
      onChange(next);
    };
    const field = (name, label, element, more) => h('div', { class: 'field' },
      h('label', { htmlFor: `set-${name}` }, label),
      h(element, {
        id: `set-${name}`, value: settings[name] ?? '',
        onInput: (event) => set(name, event.target.value), ...more,
      }, more?.options));
    const problem = problemOf(settings.more);
    return h('details', { class: 'settings' },
      h('summary', null, 'Settings'),
      h('p', null, 'An empty field is the server’s default. Kept in this browser.'),
      !isText && field('system', 'System prompt', 'textarea', { rows: 3 }),
      h('div', { class: 'grid' },
        NUMBERS.map(([name, label, min, max, step]) =>
          field(name, label, 'input', { type: 'number', min, max, step, inputMode: 'decimal' })),
        !isText && field('effort', 'Thought', 'select', {
          options: EFFORTS.map((one) => h('option', { value: one }, one || 'as the model does')),
        })),
      h('div', { class: 'check' },
        h('input', {
          id: 'set-tokens', type: 'checkbox', checked: Boolean(settings.tokens),
          onChange: (event) => set('tokens', event.target.checked),
        }),
        h('label', { htmlFor: 'set-tokens' }, 'Ask for the probabilities of tokens')),
      field('more', 'Other fields, as JSON', 'textarea', {
        rows: 3, spellcheck: false, placeholder: '{"tools": [], "stop": ["\\n\\n"]}',
        'aria-invalid': Boolean(problem), 'aria-describedby': 'more-problem',
      }),
      h('p', { id: 'more-problem', class: 'problem' }, problem));
  }
}
