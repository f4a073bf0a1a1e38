// Asks the server that sent this page: with the key that a person typed, whole answers or events.

// The page lies at the server's first address, below the prefix of a proxy if there is one.
const BASE = new URL('.', document.baseURI);

export class ApiError extends Error {
  constructor(status, message, waitSeconds = 0) {
    super(message);
    this.status = status;
    this.waitSeconds = waitSeconds;
  }

  // Whether the same may be asked again in a moment.
  get isPassing() {
    return this.status === 429 || this.status === 503;
  }
}

// The stream ended without its last event: the server is gone, or the way to it.
export class BrokenOff extends Error {}

// A key that lives as long as this tab; a script of another site cannot read it.
export class Key {
  constructor(name) {
    this.name = `${name} ${BASE.pathname}`;
    this.value = '';
    try {
      this.value = sessionStorage.getItem(this.name) ?? '';
    } catch {
      // A browser that keeps nothing for pages: the key is typed again after each reload.
    }
  }

  set(value) {
    this.value = value;
    try {
      sessionStorage.setItem(this.name, value);
    } catch {
      // As above.
    }
  }
}

// The response to a request. Throws ApiError for a status of 400 or more, TypeError where no server
// answers.
export async function ask(path, key, { body, signal } = {}) {
  const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  const response = await fetch(new URL(path, BASE), {
    method: body === undefined ? 'GET' : 'POST',
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: 'no-store',
    credentials: 'omit',
    redirect: 'error',
  });
  if (response.ok) return response;
  let told = `status ${response.status}`;
  try {
    told = (await response.json()).error.message || told;
  } catch {
    // A proxy in between has a form of its own.
  }
  throw new ApiError(response.status, told, Number(response.headers.get('Retry-After')) || 2);
}

export async function askJson(path, key, options) {
  return (await ask(path, key, options)).json();
}

// The events of a stream, decoded; null where the server only says that it is still there.
// Throws ApiError for an error within it, BrokenOff where it ends too early.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === 'AbortError') throw error;
        throw new BrokenOff(String(error));
      }
      if (part.done) throw new BrokenOff('the stream has no end');
      rest += part.value;
      const whole = rest.split('\n\n');
      rest = whole.pop();
      for (const event of whole) {
        const lines = event.split('\n').filter((line) => line.startsWith('data:'));
        const data = lines.map((line) => line.slice(5).trimStart()).join('\n');
        if (data === '[DONE]') return;
        if (!data) {
          yield null;
          continue;
        }
        const read = JSON.parse(data);
        if (read.error) throw streamError(read.error);
        yield read;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// An error event has no status of its own; a worker that is gone may be there again.
function streamError(error) {
  const isPassing = error.code === 'worker_gone' || error.type === 'unavailable_error';
  return new ApiError(isPassing ? 503 : 500, error.message, 2);
}

export function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener('abort', () => {
      clearTimeout(timer);
      reject(new DOMException('stopped', 'AbortError'));
    });
  });
}
