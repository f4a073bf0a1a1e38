// The page at /live: what the server is at, and what its workers died of. Changes nothing.

import { Component, h, render } from './preact.mjs';
import { ApiError, Key, ask, askJson, sleep } from './api.mjs';
import { KeyForm } from './key.mjs';
import { markdown } from './markdown.mjs';

const SECONDS = 2;
const MAX_POINTS = 150;

class Live extends Component {
  constructor() {
    super();
    this.key = new Key('hypo-admin-key');
    this.state = { problem: '', asksKey: '', points: [] };
  }

  componentDidMount() {
    this.watch();
  }

  async watch() {
    for (;;) {
      if (!document.hidden) await this.look();
      if (this.state.asksKey) return;
      await sleep(SECONDS);
    }
  }

  async look() {
    try {
      const [debug, faults] = await Promise.all(
        ['debug/requests', 'debug/faults'].map((path) => askJson(path, this.key)));
      const [health, figures] = await Promise.all([this.health(), this.figures()]);
      const points = [...this.state.points, this.point(debug, figures)].slice(-MAX_POINTS);
      this.setState({
        debug, faults: faults.faults, health, figures, points, problem: '', at: new Date(),
      });
    } catch (error) {
      if (!(error instanceof ApiError)) this.setState({ problem: 'No server answers.' });
      else if (error.status === 401) this.setState({ asksKey: this.whichKey() });
      else this.setState({ problem: error.message });
    }
  }

  whichKey() {
    return this.key.value ? 'That is not the admin key.' : 'The admin key opens this page.';
  }

  // Not well is an answer as well.
  async health() {
    try {
      return await askJson('health', this.key);
    } catch (error) {
      if (error instanceof ApiError) return { status: error.message };
      throw error;
    }
  }

  async figures() {
    return sums(await (await ask('metrics', this.key)).text());
  }

  point(debug, figures) {
    const last = this.state.points.at(-1);
    const tokens = figures['vllm:generation_tokens_total'] ?? 0;
    const now = { time: performance.now() / 1000, tokens, steps: debug.engine.num_steps };
    const seconds = last ? now.time - last.time : 0;
    const rate = (name) => (seconds ? Math.max(0, (now[name] - last[name]) / seconds) : 0);
    return { ...now, tokenRate: rate('tokens'), stepRate: rate('steps') };
  }

  render(_, { asksKey, problem, debug, faults, health, figures, points, at }) {
    return [
      h('header', { class: 'top' },
        h('h1', null, 'hypocenter: live'), h('a', { href: './' }, 'Chat')),
      h('main', null,
        h('p', { class: 'problem', role: 'alert' }, problem),
        asksKey && h(KeyForm, {
          what: asksKey,
          onKey: (key) => {
            this.key.set(key);
            this.setState({ asksKey: '' }, () => this.watch());
          },
        }),
        debug && !asksKey && [
          h('p', { class: 'hint' }, `Looked at ${at.toLocaleTimeString()}, every ${SECONDS} s.`),
          h(State, { debug, health, figures, points }),
          h(Cache, { debug, figures }),
          h(Workers, { debug, health }),
          h(Requests, { open: debug.open }),
          h(Deaths, { faults }),
        ]),
    ];
  }
}

// Each figure of Prometheus' text, summed over its labels: over replicas, that is.
function sums(text) {
  const found = {};
  for (const line of text.split('\n')) {
    const read = /^([\w:]+)(?:\{.*\})? (\S+)/.exec(line);
    if (read) found[read[1]] = (found[read[1]] ?? 0) + Number(read[2]);
  }
  return found;
}

function section(title, ...inside) {
  return h('section', { 'aria-label': title }, h('h2', null, title), ...inside);
}

function facts(rows) {
  return h('dl', { class: 'facts' }, rows.map(([name, value]) =>
    h('div', null, h('dt', null, name), h('dd', null, value))));
}

function table(caption, heads, rows, none) {
  if (!rows.length) return h('p', null, none);
  return h('div', { class: 'wide', tabIndex: 0 }, h('table', null,
    h('caption', { class: 'hidden' }, caption),
    h('thead', null, h('tr', null, heads.map((head) => h('th', { scope: 'col' }, head)))),
    h('tbody', null, rows.map((row) => h('tr', null, row.map((cell) => h('td', null, cell)))))));
}

function State({ debug, health, figures, points }) {
  const { engine } = debug;
  const now = points.at(-1);
  const said = health.canary;
  const at = said?.at ? ` at ${new Date(said.at * 1000).toLocaleTimeString()}` : '';
  return section('State',
    facts([
      ['Health', health.status],
      ['Running', engine.num_running],
      ['Waiting', engine.num_waiting],
      ['Steps', `${engine.num_steps} (${now.stepRate.toFixed(1)}/s)`],
      ['Tokens', `${now.tokens} (${now.tokenRate.toFixed(1)}/s)`],
      ['Workers replaced', debug.restarts],
      ['Died of a fault', figures['hypocenter:faults_total'] ?? 0],
      ['Last canary', said ? `${said.said}${at}, ${said.num_asked} asked` : 'none is asked'],
    ]),
    said?.problem && h('p', { class: 'problem' }, said.problem),
    h(Curve, { values: points.map((point) => point.tokenRate), what: 'Tokens per second' }));
}

function Curve({ values, what }) {
  const most = Math.max(1, ...values);
  const line = values.map((value, n) =>
    `${((n + MAX_POINTS - values.length) * 300) / MAX_POINTS},${58 - (56 * value) / most}`);
  const label = `${what}, highest ${most.toFixed(0)}, now ${(values.at(-1) ?? 0).toFixed(0)}`;
  return h('figure', null,
    h('svg', {
      viewBox: '0 0 300 60', preserveAspectRatio: 'none', role: 'img', 'aria-label': label,
      class: 'curve',
    },
      h('polyline', { points: line.join(' ') })),
    h('figcaption', null, label));
}

function Cache({ debug, figures }) {
  const { engine, num_blocks: all } = debug;
  const used = all - engine.num_free_blocks;
  const asked = figures['vllm:prefix_cache_queries_total'] ?? 0;
  const hits = figures['vllm:prefix_cache_hits_total'] ?? 0;
  return section('Cache',
    h('label', { htmlFor: 'blocks' }, `Blocks of running requests: ${used} of ${all}`),
    h('meter', { id: 'blocks', min: 0, max: all, value: used }),
    facts([
      ['Blocks kept for later prompts', engine.num_kept_blocks],
      ['Prompt tokens found', asked ? `${((100 * hits) / asked).toFixed(1)} %` : 'none asked'],
    ]));
}

function Workers({ debug, health }) {
  const states = new Map((health.replicas ?? []).map((one) => [one.replica, one]));
  const rows = debug.replicas.map((one) => {
    const state = states.get(one.replica);
    return [
      one.replica, one.device, state?.state ?? (one.worker_pid ? 'there' : 'none'),
      one.worker_pid ?? '–', one.spare_pid ?? '–', one.restarts,
      state?.running ?? debug.engine.num_running,
    ];
  });
  const heads = ['Replica', 'Device', 'State', 'Worker', 'Spare', 'Restarts', 'Running'];
  return section('Workers', table('Workers', heads, rows, 'There is none.'),
    h('p', null, `The next worker: ${debug.spare_state}.`));
}

function Requests({ open }) {
  const rows = open.map((one) => [
    h('code', null, one.id),
    new Date(one.created * 1000).toLocaleTimeString(),
    one.usage.prompt_tokens,
    one.usage.prompt_tokens_details.cached_tokens,
    one.usage.completion_tokens,
    one.choices.reduce((sum, choice) => sum + choice.num_resumed, 0),
  ]);
  const heads = ['Request', 'Since', 'Prompt', 'Cached', 'Answer', 'Outlived'];
  return section('Open requests', table('Open requests', heads, rows, 'None.'));
}

// What workers left that died of a fault, the last one first.
function Deaths({ faults }) {
  const name = (fault) => fault.bundle.split('/').at(-1);
  return section('Deaths', faults.length ? h('ul', { class: 'deaths' }, faults.map((fault) =>
    h('li', { key: fault.bundle, id: name(fault) },
      fault.page
        ? h('a', { href: fault.page, target: '_blank', rel: 'noopener noreferrer' },
          `${name(fault)}: the doctor’s report`)
        : h('span', null, `${name(fault)}: the report is ${fault.report_state}`),
      fault.report && h('details', { class: 'fold' },
        h('summary', null, 'Report as text'),
        h('div', { class: 'content' }, markdown(fault.report))),
      h('p', { class: 'hint' }, 'Bundle: ', h('code', null, fault.bundle)))))
    : h('p', null, 'None.'));
}

render(h(Live), document.body);
