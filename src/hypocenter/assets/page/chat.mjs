// The page at /: a conversation with the model. Conversations stay in this browser, and the key as
// long as the tab.

import { Component, h, render } from './preact.mjs';
import { answer, bodyOf } from './answering.mjs';
import { ApiError, Key, askJson, sleep } from './api.mjs';
import { KeyForm } from './key.mjs';
import { Message } from './message.mjs';
import { Settings, fieldsOf, loadSettings } from './settings.mjs';
import { Talk, forgetTalk, keyOf, listTalks, loadTalk, saveTalk } from './talk.mjs';

const SAVE_MS = 1000;
const DRAW_MS = 60;
const ANSWERS = 'The model answers.';

class Chat extends Component {
  constructor() {
    super();
    this.key = new Key('hypo-key');
    const [last] = listTalks();
    this.state = {
      talk: (last && loadTalk(last.id)) || new Talk(),
      settings: loadSettings(),
      models: [],
      model: '',
      isText: false,
      isLoading: true,
      needsKey: '',
      status: '',
      running: null,
    };
    this.on = {
      edit: (node, text) => this.edit(node, text),
      again: (node) => this.again(node),
      goOn: (node) => this.goOn(node),
      turn: (node, by) => this.change(() => this.state.talk.turn(node, by)),
      answerCall: (node, call, text) => this.answerCall(node, call, text),
    };
  }

  componentDidMount() {
    this.meet();
    addEventListener('pagehide', () => this.state.running && this.save());
    addEventListener('storage', (event) => {
      // Another tab goes on with this conversation: what is said here becomes one of its own.
      if (event.key === keyOf(this.state.talk) && event.newValue) this.state.talk.part();
    });
    addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && this.state.running && !event.defaultPrevented) this.stop();
    });
  }

  // Learn what model is there; waits while it is loaded.
  async meet() {
    for (;;) {
      try {
        const { data } = await askJson('v1/models', this.key);
        const props = await askJson('props', this.key);
        this.setState(({ model }) => ({
          models: data.map((one) => one.id),
          model: data.some((one) => one.id === model) ? model : data[0].id,
          isText: !props.chat_template,
          isLoading: false,
          needsKey: '',
          status: '',
        }));
        return;
      } catch (error) {
        if (error instanceof ApiError && error.status === 401) {
          this.setState({ needsKey: this.whichKey(), isLoading: false });
          return;
        }
        this.setState({ isLoading: true, status: await whyNot(this.key) });
        await sleep(1);
      }
    }
  }

  whichKey() {
    return this.key.value ? 'The server does not know that key.' : 'This server asks for a key.';
  }

  change(work) {
    work();
    this.save();
    this.setState({});
  }

  save() {
    const { talk } = this.state;
    if (talk.nodes.length && !saveTalk(talk)) {
      this.setState({ status: 'This browser has no room to keep the conversation.' });
    }
  }

  send(text) {
    const { talk } = this.state;
    const last = talk.path().at(-1);
    const node = talk.add(last ? last.id : -1, 'user', text);
    this.answer(node);
  }

  // Have the model answer what ends with this message.
  answer(node) {
    const { talk, model, isText, settings } = this.state;
    let body;
    try {
      const fields = fieldsOf(settings);
      body = bodyOf(talk.upTo(node.id), { model, isText, fields, settings });
    } catch (error) {
      this.change(() => {});
      this.setState({ status: error.message });
      return;
    }
    this.follow(talk, talk.add(node.id, 'assistant', '', { ids: [], body }));
  }

  async follow(talk, node) {
    const controller = new AbortController();
    this.setState({ running: controller, status: ANSWERS });
    saveTalk(talk);  // what was asked, before anything can go wrong
    const saving = setInterval(() => saveTalk(talk), SAVE_MS);
    const stopDrawing = this.draw();
    const error = await answer(node, this.key, controller.signal, (news) => {
      const status = news || ANSWERS;
      if (status === this.state.status) return;
      this.setState({ status });
      saveTalk(talk);
    });
    clearInterval(saving);
    stopDrawing();
    const said = { done: 'The answer is whole.', stopped: 'Stopped.', failed: 'The answer failed.' };
    const needsKey = error?.status === 401 ? this.whichKey() : '';
    this.setState({ running: null, status: said[node.state], needsKey });
    saveTalk(talk);
  }

  // Draw again and again until the function that is returned is called; a drawing that takes long
  // is followed by a longer pause, so that the keyboard is heard.
  draw() {
    let isOver = false;
    const once = () => {
      if (isOver) return;
      const began = performance.now();
      this.setState({}, () => setTimeout(once, Math.max(DRAW_MS, 4 * (performance.now() - began))));
    };
    setTimeout(once, DRAW_MS);
    return () => {
      isOver = true;
    };
  }

  stop() {
    this.state.running?.abort();
  }

  again(node) {
    this.answer(this.state.talk.nodes[node.parent]);
  }

  // The tokens that came are kept, and the next one is the one that would have come.
  goOn(node) {
    if (node.ending === 'length' && node.body.max_tokens) {
      const more = node.body.max_tokens;
      node.body = { ...node.body, max_tokens: node.ids.length + more };
    }
    this.follow(this.state.talk, node);
  }

  edit(node, text) {
    const { talk } = this.state;
    const { parent, role, callId } = node;
    const made = talk.add(parent, role, text, callId ? { callId } : {});
    if (role === 'assistant') this.change(() => {});
    else this.answer(made);
  }

  // Once each call has what its tool said, the model goes on.
  answerCall(node, call, text) {
    const { talk } = this.state;
    const path = talk.path();
    const behind = path.slice(path.indexOf(node) + 1);
    const end = behind.findIndex((one) => one.role !== 'tool');
    const given = end < 0 ? behind : behind.slice(0, end);
    const isNew = !given.some((one) => one.callId === call.id) && end < 0;
    const last = isNew ? given.at(-1) ?? node : node;
    const made = talk.add(last.id, 'tool', text, { callId: call.id });
    if ((isNew ? given.length + 1 : 1) === node.calls.length) this.answer(made);
    else this.change(() => {});
  }

  open(id) {
    this.save();
    this.setState({ talk: (id && loadTalk(id)) || new Talk(), status: '' });
  }

  forget() {
    forgetTalk(this.state.talk.id);
    this.setState({ talk: new Talk(), status: 'Forgotten.' });
  }

  render() {
    const { talk, running, status, isText, settings, isLoading, needsKey, model } = this.state;
    const path = talk.path();
    return [
      h('header', { class: 'top' },
        h('h1', null, 'hypocenter'),
        this.picker(talk, running),
        this.models(),
        h('a', { href: 'live' }, 'Live')),
      h('main', null,
        needsKey && h(KeyForm, {
          what: needsKey,
          onKey: (key) => {
            this.key.set(key);
            this.meet();
          },
        }),
        h('ol', { class: 'messages', role: 'log', 'aria-label': 'Conversation' },
          path.map((node) => h(Message, {
            key: `${talk.id} ${node.id}`, node, isText, on: this.on,
            siblings: talk.children(node.parent), isBusy: Boolean(running),
          }))),
        !path.length && !needsKey && h('p', { class: 'hint' }, isText
          ? 'This model has no chat template: it goes on with the text that you write.'
          : 'Write a message. Conversations stay in this browser.'),
        h(Settings, { settings, isText, onChange: (next) => this.setState({ settings: next }) })),
      h('footer', { class: 'bottom' },
        h('p', { class: 'status', role: 'status' }, status),
        h(Composer, {
          isText,
          isRunning: Boolean(running),
          isOff: isLoading || Boolean(needsKey) || !model,
          onSend: (text) => this.send(text),
          onStop: () => this.stop(),
        })),
    ];
  }

  picker(talk, running) {
    const kept = listTalks();
    const isKept = kept.some((one) => one.id === talk.id);
    return h('div', { class: 'picker' },
      h('label', { htmlFor: 'talks', class: 'hidden' }, 'Conversation'),
      h('select', {
        id: 'talks', value: talk.id, disabled: Boolean(running),
        onChange: (event) => this.open(event.target.value),
      },
        !isKept && h('option', { value: talk.id }, talk.title),
        kept.map((one) => h('option', { value: one.id, key: one.id }, one.title))),
      h('button', {
        type: 'button', disabled: Boolean(running), onClick: () => this.open(''),
      }, 'New'),
      h('button', {
        type: 'button', class: 'quiet', disabled: Boolean(running) || !isKept,
        onClick: () => this.forget(),
      }, 'Forget'));
  }

  models() {
    const { models, model } = this.state;
    if (models.length < 2) return h('p', { class: 'model' }, model);
    return h('div', { class: 'model' },
      h('label', { htmlFor: 'models', class: 'hidden' }, 'Model'),
      h('select', {
        id: 'models', value: model,
        onChange: (event) => this.setState({ model: event.target.value }),
      }, models.map((one) => h('option', { value: one, key: one }, one))));
  }

  // The end of the answer stays in sight for who is there already.
  getSnapshotBeforeUpdate() {
    const { scrollTop, scrollHeight, clientHeight } = document.documentElement;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  componentDidUpdate(props, state, wasAtEnd) {
    if (wasAtEnd && this.state.running) scrollTo(0, document.documentElement.scrollHeight);
  }
}

class Composer extends Component {
  render({ isText, isRunning, isOff, onSend, onStop }, { text = '' }) {
    const send = (event) => {
      event.preventDefault();
      if (!text.trim() || isRunning || isOff) return;
      this.setState({ text: '' });
      onSend(text);
    };
    const onKeyDown = (event) => {
      if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) send(event);
    };
    return h('form', { class: 'composer', onSubmit: send },
      h('label', { htmlFor: 'message', class: 'hidden' }, isText ? 'Text' : 'Message'),
      h('textarea', {
        id: 'message', rows: 2, value: text, onKeyDown, 'aria-describedby': 'keys',
        placeholder: isText ? 'Text to go on with' : 'Message', autofocus: true,
        onInput: (event) => this.setState({ text: event.target.value }),
      }),
      isRunning
        ? h('button', { type: 'button', key: 'stop', onClick: onStop }, 'Stop')
        : h('button', { type: 'submit', key: 'send', disabled: isOff || !text.trim() }, 'Send'),
      h('p', { id: 'keys', class: 'hint' }, 'Enter sends, Shift+Enter is a new line, Esc stops.'));
  }
}

// What keeps the server from answering, in its own words.
async function whyNot(key) {
  try {
    await askJson('health', key);
    return 'The server is starting.';
  } catch (error) {
    return error instanceof ApiError ? `${error.message} …` : 'No server answers. Trying again.';
  }
}

render(h(Chat), document.body);
