// Has a message answered: sends what is asked for, and adds to the message what comes.
//
// A server that starts again, a worker that is replaced, a queue that is full: the same request is
// sent again, with the ids of the tokens that came. With its seed the next piece is then the one
// that would have come. Draws nothing; `onNews` hears of each change.

import { ApiError, BrokenOff, ask, events, sleep } from './api.mjs';
import { asMessages } from './talk.mjs';

const MAX_TRIES = 60;
const TOP = 5;
const DEFAULT_TEXT_TOKENS = 256;

// The body for an answer to these messages; `isText`: the model has no chat template.
export function bodyOf(nodes, { model, isText, fields, settings }) {
  const seed = Math.floor(Math.random() * 2 ** 31);
  const body = { seed, ...fields, model, n: 1, stream: true, return_token_ids: true };
  body.stream_options = { include_usage: true };
  if (isText) {
    body.prompt = nodes.map((node) => node.content).join('');
    body.max_tokens ??= DEFAULT_TEXT_TOKENS;
    if (settings.tokens) body.logprobs = TOP;
  } else {
    body.messages = asMessages(nodes, settings.system?.trim());
    if (settings.tokens) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  }
  return body;
}

// Until `node` is done, stopped or failed. Returns the ApiError that ended it, if one did.
export async function answer(node, key, signal, onNews) {
  Object.assign(node, { state: 'open', problem: '', ending: undefined });
  const began = performance.now();
  for (let tries = 1; ; tries += 1) {
    try {
      for await (const event of await sent(node, key, signal)) {
        tries = 1;
        if (event) take(node, event, began);
        onNews(event ? '' : 'The server is still at it.');
      }
      node.state = 'done';
      return null;
    } catch (error) {
      const wait = error.name === 'AbortError' ? 0 : waitAfter(error);
      if (!wait || tries >= MAX_TRIES) return failed(node, error);
      const why = error instanceof ApiError ? error.message : 'No server answers';
      onNews(`${why.replace(/\.$/, '')}. Trying again.`);
      try {
        await sleep(wait, signal);
      } catch (stopped) {
        return failed(node, stopped);
      }
    }
  }
}

async function sent(node, key, signal) {
  const path = node.body.messages ? 'v1/chat/completions' : 'v1/completions';
  const body = node.ids.length ? { ...node.body, resume_token_ids: node.ids } : node.body;
  return events(await ask(path, key, { body, signal }));
}

// Seconds until the same may be asked again; 0: it would be in vain.
function waitAfter(error) {
  if (error instanceof ApiError) return error.isPassing ? error.waitSeconds : 0;
  return error instanceof BrokenOff || error instanceof TypeError ? 1 : 0;
}

function failed(node, error) {
  if (error.name === 'AbortError') {
    node.state = 'stopped';
    return null;
  }
  node.state = 'failed';
  node.problem = error.message;
  return error instanceof ApiError ? error : null;
}

// Add an event to the message.
function take(node, event, began) {
  if (event.usage) node.usage = event.usage;
  if (event.timings) node.timings = event.timings;
  const [choice] = event.choices;
  if (!choice) return;
  if (choice.token_ids?.length) {
    node.firstSeconds ??= (performance.now() - began) / 1000;
    node.ids.push(...choice.token_ids);
  }
  const { delta = {}, text = '' } = choice;
  node.content += delta.content ?? text;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? '') + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const call = (node.calls[part.index] ??= { id: '', name: '', arguments: '' });
    if (part.id) call.id = part.id;
    call.name += part.function.name ?? '';
    call.arguments += part.function.arguments ?? '';
  }
  if (choice.logprobs) node.tokens = [...(node.tokens ?? []), ...tokensOf(choice.logprobs)];
  if (choice.finish_reason) node.ending = choice.finish_reason;
}

// Tokens as the page shows them, of either form that the server has.
function tokensOf(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      text: one.token,
      p: Math.exp(one.logprob),
      top: one.top_logprobs.map((top) => [top.token, Math.exp(top.logprob)]),
    }));
  }
  return logprobs.tokens.map((text, n) => ({
    text,
    p: Math.exp(logprobs.token_logprobs[n]),
    top: Object.entries(logprobs.top_logprobs[n] ?? {}).map(([one, p]) => [one, Math.exp(p)]),
  }));
}
