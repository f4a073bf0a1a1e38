// Where a person types the key that the server asks for.

import { Component, createRef, h } from './preact.mjs';

export class KeyForm extends Component {
  root = createRef();

  componentDidMount() {
    this.root.current.querySelector('input').focus();
  }

  render({ what, onKey }) {
    const give = (event) => {
      event.preventDefault();
      onKey(this.root.current.querySelector('input').value.trim());
    };
    return h('form', { class: 'key', onSubmit: give, ref: this.root },
      h('p', { id: 'key-what' }, what),
      h('label', { htmlFor: 'key' }, 'Key'),
      h('input', {
        id: 'key', type: 'password', autocomplete: 'off', 'aria-describedby': 'key-what',
      }),
      h('button', { type: 'submit' }, 'Use it'),
      h('p', { class: 'hint' }, 'It is forgotten when this tab is closed.'));
  }
}
