// A conversation as a tree of messages, and how conversations are kept in this browser.
//
// A message: id, parent, role, content; of an answer also reasoning, calls, ids (its tokens),
// tokens (with probabilities), state, problem, timings and body, which was sent for it. `state` is
// open while it comes, then done, stopped, broken or failed.

const LIST = 'hypo-talks';
const ONE = 'hypo-talk ';
const MAX_TALKS = 50;
const MAX_TITLE = 60;

export class Talk {
  constructor(saved = {}) {
    this.id = saved.id ?? newId();
    this.nodes = saved.nodes ?? [];
    // Of a parent (-1: none) the child that is shown.
    this.chosen = saved.chosen ?? {};
    for (const node of this.nodes) if (node.state === 'open') node.state = 'broken';
  }

  // From now on it is kept under a name of its own.
  part() {
    this.id = newId();
  }

  get title() {
    const first = this.nodes.find((node) => node.role === 'user');
    return first ? first.content.trim().slice(0, MAX_TITLE) || 'Untitled' : 'New conversation';
  }

  children(parent) {
    return this.nodes.filter((node) => node.parent === parent);
  }

  add(parent, role, content, more = {}) {
    const node = { id: this.nodes.length, parent, role, content, ...more };
    this.nodes.push(node);
    this.chosen[parent] = node.id;
    return node;
  }

  // The messages that are shown, from the first one on.
  path() {
    const found = [];
    let parent = -1;
    for (;;) {
      const children = this.children(parent);
      if (!children.length) return found;
      const node = children.find((child) => child.id === this.chosen[parent]) ?? children.at(-1);
      found.push(node);
      parent = node.id;
    }
  }

  // The messages from the first one to this one.
  upTo(id) {
    const found = [];
    while (id !== -1) {
      found.unshift(this.nodes[id]);
      id = this.nodes[id].parent;
    }
    return found;
  }

  // Show the branch that is so many beside this message.
  turn(node, by) {
    const siblings = this.children(node.parent);
    const at = siblings.indexOf(node) + by;
    if (siblings[at]) this.chosen[node.parent] = siblings[at].id;
  }
}

function newId() {
  return crypto.getRandomValues(new Uint32Array(2)).join('-');
}

// The name that a conversation is kept under.
export function keyOf(talk) {
  return ONE + talk.id;
}

// Messages as the server takes them.
export function asMessages(nodes, system) {
  const messages = system ? [{ role: 'system', content: system }] : [];
  for (const node of nodes) {
    const message = { role: node.role, content: node.content };
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.calls?.length) {
      message.tool_calls = node.calls.map((call) => ({
        id: call.id,
        type: 'function',
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    if (node.callId) message.tool_call_id = node.callId;
    messages.push(message);
  }
  return messages;
}

// The conversations that are kept: id and title, the last one that was changed first.
export function listTalks() {
  return read(LIST) ?? [];
}

export function loadTalk(id) {
  const saved = read(ONE + id);
  return saved && new Talk(saved);
}

// Whether it is kept now. The oldest ones go where there is no room.
export function saveTalk(talk) {
  const others = listTalks().filter((one) => one.id !== talk.id);
  const list = [{ id: talk.id, title: talk.title }, ...others];
  // Probabilities are large, and asked for again when somebody wants them.
  const nodes = talk.nodes.map(({ tokens, ...node }) => node);
  const text = JSON.stringify({ id: talk.id, nodes, chosen: talk.chosen });
  for (;;) {
    try {
      while (list.length > MAX_TALKS) localStorage.removeItem(ONE + list.pop().id);
      localStorage.setItem(keyOf(talk), text);
      localStorage.setItem(LIST, JSON.stringify(list));
      return true;
    } catch {
      // It is full, or this browser keeps nothing for pages.
      if (list.length === 1) return false;
      removeIfPossible(ONE + list.pop().id);
    }
  }
}

export function forgetTalk(id) {
  removeIfPossible(ONE + id);
  localStorage.setItem(LIST, JSON.stringify(listTalks().filter((one) => one.id !== id)));
}

function removeIfPossible(name) {
  try {
    localStorage.removeItem(name);
  } catch {
    // Nothing is kept there.
  }
}

// What is kept under a name; null for nothing, or what is no JSON.
export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}
