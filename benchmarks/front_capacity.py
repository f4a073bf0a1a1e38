"""What the front of a server carries: pieces a second, and its processor time for each.

The workers are `steady_worker.py`: they have no model, and give each stream a token a step. So
this needs no card. The clients read bytes and no JSON, in one process, and take next to nothing.

    python benchmarks/front_capacity.py --replicas 2 --streams 128 --step 0.01
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

from serve_process import cpu_seconds, free_port, running

from hypocenter.base.package import bundled_model
from hypocenter.server.load import Load, run_load

_END = b"0\r\n\r\n"


def main() -> int:
    options = _options()
    if options.serve is not None:
        return _serve(options)
    port = free_port()
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", str(port)]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    with running(command, port) as pid:
        _ask(port, options, num_tokens=4)
        if options.again:
            _ask_by_load(port, options)
        before, own_before, began = cpu_seconds(pid), time.process_time(), time.monotonic()
        if options.client == "load":
            num_pieces, spreads = _ask_by_load(port, options)
        else:
            num_pieces, spreads = _ask(port, options, options.tokens), {}
        seconds = time.monotonic() - began
        used, own = cpu_seconds(pid) - before, time.process_time() - own_before
    num_tokens = options.streams * options.tokens
    row = {
        "replicas": options.replicas,
        "streams": options.streams,
        "step_ms": 1e3 * options.step,
        "route": options.route,
        "client": options.client,
        "tokens_per_second": round(num_tokens / seconds),
        "wanted_per_second": round(options.streams / options.step) if options.step else None,
        "pieces": num_pieces,
        "server_us_per_token": round(1e6 * used / num_tokens, 1),
        "server_ms_per_request": round(1e3 * used / options.streams, 2),
        "client_us_per_token": round(1e6 * own / num_tokens, 1),
        **spreads,
    }
    print(json.dumps(row))
    return 0


def _ask(port: int, options: argparse.Namespace, num_tokens: int) -> int:
    """All streams at once; how many pieces came of them. Raises SystemExit for a broken one."""
    body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True, "temperature": 0}
    if options.route == "chat":
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = [40 + number % 100 for number in range(options.prompt)]
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[options.route]
    data = json.dumps({**body, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    asked = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    num_pieces, num_open = 0, options.streams
    with selectors.DefaultSelector() as selector:
        for _ in range(options.streams):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(asked)
            selector.register(client, selectors.EVENT_READ, bytearray(8))
        while num_open:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                client, last = key.fileobj, key.data
                read = client.recv(1 << 16)
                if not read:
                    raise SystemExit("a stream broke off")
                num_pieces += read.count(b'"text":' if "text" in path else b"data: {")
                last[:] = (last + read)[-8:]
                if last.endswith(_END):
                    selector.unregister(client)
                    client.close()
                    num_open -= 1
    return num_pieces


def _ask_by_load(port: int, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """The same by the clients of the other benchmarks, with what these measure."""
    num = options.streams
    load = Load(
        url=f"http://127.0.0.1:{port}",
        num_requests=num,
        concurrency=num,
        prompt_length=options.prompt,
        token_ids=(40, 140),
        output_length=options.tokens,
    )
    figures, asked = run_load(load)
    if figures.num_errors:
        raise SystemExit(figures.first_error)
    spreads = {"ttft_ms": figures.ttft_ms, "itl_ms": figures.itl_ms}
    return sum(len(one.times) for one in asked), spreads


def _serve(options: argparse.Namespace) -> int:
    from hypocenter.server.hosting.terms import ModelTerms
    from hypocenter.server.serve import Listener, ServerConfig, serve
    from hypocenter.settings.config import EngineConfig

    terms = ModelTerms(
        path=str(bundled_model()),
        engine=EngineConfig(device="cpu", max_batch_requests=options.streams),
        devices=("cpu",) * options.replicas,
    )
    config = ServerConfig(
        models=(terms,),
        port=options.serve,
        has_spare=False,
        canary_minutes=0.0,
        worker=("steady_worker", str(options.step), str(options.token)),
    )
    return serve(config, Listener())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step", type=float, default=0.01, help="seconds between two tokens")
    parser.add_argument(
        "--token", type=float, default=0.0, help="seconds more for each token of a prompt"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--route", choices=("completions", "chat"), default="completions")
    parser.add_argument("--client", choices=("bytes", "load"), default="bytes")
    parser.add_argument(
        "--again", action="store_true", help="the second time, when all prompts are known"
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
